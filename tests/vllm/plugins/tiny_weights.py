"""A plugin for vLLM that tests put on the path: made-up weights that make a cache matter.

vLLM's own dummy weights are so small that the text hardly depends on what was cached. These are
drawn from one seed, the same in every process, and large enough.
"""

import torch

SEED = 20


def draw_weights() -> None:
    """Replace what `--load-format dummy` fills weights with. vLLM calls this at its start."""
    from vllm.model_executor.model_loader import dummy_loader

    numbers = torch.Generator().manual_seed(SEED)

    def drawn(tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            return
        values = torch.randn(tensor.shape, generator=numbers)
        if tensor.ndim < 2:
            values = 1.0 + 0.1 * values  # norms, biases, sinks
        elif tensor.shape[0] < 4096:
            values *= 1.5 * tensor.shape[-1] ** -0.5
        else:
            values *= (
                0.02  # embeddings: small, or a model whose head is tied to them repeats itself
            )
        tensor.data.copy_(values.to(tensor.dtype))

    dummy_loader.initialize_single_dummy_weight = drawn
