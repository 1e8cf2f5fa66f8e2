"""`model_type` → what each decoder layer keeps."""

from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import decoder
from kvstow.plan.models.deepseek import compressed_decoder, indexed_decoder, latent_decoder
from kvstow.plan.models.hybrid import jamba, qwen3_next
from kvstow.plan.models.serving import Serving, Stack


def stack(config: Config, serving: Serving) -> Stack:
    """The whole model's layers, this tensor-parallel rank's part of each."""
    match config.model_type:
        case "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "glm4_moe_lite":
            return latent_decoder(config, serving)
        case "deepseek_v32" | "glm_moe_dsa":
            return indexed_decoder(config, serving)
        case "deepseek_v4":
            return compressed_decoder(config, serving)
        case "jamba":
            return jamba(config, serving)
        case "qwen3_next":
            return qwen3_next(config, serving)
        case _:
            return decoder(config, serving)
