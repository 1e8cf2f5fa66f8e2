"""kvstow's connector for vLLM: see `kvstow.adapters.vllm`."""

from kvstow.adapters.vllm import KvstowConnector

__all__ = ["KvstowConnector"]
