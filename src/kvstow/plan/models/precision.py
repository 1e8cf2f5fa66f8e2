"""How a model is served: its share of the ranks, tokens per block, cache element types.

Plain          the elements alone
PerTokenHead   narrow elements, then one float32 scale each for k and v of a token and head
NvFp4          4-bit elements, and one fp8 scale for every 16 of them
ScaledLatent   MLA: an fp8 latent, a float32 scale per 128 of it, a bfloat16 rope part
"""

from dataclasses import dataclass

from kvstow.errors import ModelError, SpecError
from kvstow.plan.models.config import Config
from kvstow.plan.models.ranks import TensorRank
from kvstow.plan.spec import DType, LayerSpec


@dataclass(frozen=True, slots=True)
class Plain:
    dtype: DType


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    dtype: DType


@dataclass(frozen=True, slots=True)
class NvFp4:
    pass


@dataclass(frozen=True, slots=True)
class ScaledLatent:
    pass


Precision = Plain | PerTokenHead | NvFp4 | ScaledLatent

_FLOATS = (
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.FLOAT8_E4M3,
    DType.FLOAT8_E5M2,
)
"""Element types that keys and values are kept in without scales of their own."""

_SCALED: dict[str, Precision] = {
    "fp8_per_token_head": PerTokenHead(DType.FLOAT8_E4M3),
    "int8": PerTokenHead(DType.INT8),
    "int8_per_token_head": PerTokenHead(DType.INT8),
    "int4_per_token_head": PerTokenHead(DType.INT4),
    "nvfp4": NvFp4(),
    "fp8_ds_mla": ScaledLatent(),
}


def element(name: str) -> DType | None:
    """The floating-point type of that name, with or without `torch.` in front."""
    try:
        dtype = DType.parse(name)
    except SpecError:
        return None
    return dtype if dtype in _FLOATS else None


def precision(name: str) -> Precision:
    """How a cache of that dtype is stored: a floating-point type, or one with scales."""
    scaled = _SCALED.get(name.lower())
    if scaled is not None:
        return scaled
    dtype = element(name)
    if dtype is None:
        known = [*("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"), *_SCALED]
        raise ModelError(f"unknown cache dtype {name!r}\n\nhint: one of {', '.join(known)}")
    return Plain(dtype)


DEFAULT_BLOCK_TOKENS = 16
_DTYPE = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What all recurrent layers of a model share: rank and element types."""

    rank: TensorRank
    conv_dtype: DType
    state_dtype: DType


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What the operator chooses; `None` leaves the choice to the model."""

    rank: TensorRank
    block_tokens: int | None
    kv_dtype: str | None

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and not isinstance(self.kv_dtype, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(
                f"kv_dtype is {self.kv_dtype!r}, not a name\n\nhint: such as 'bfloat16' or 'fp8'"
            )
        tokens = self.block_tokens
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ModelError(f"block_tokens is {tokens!r}, not a whole number >= 1")

    @property
    def tokens(self) -> int:
        """Tokens per block of everything that grows with the sequence."""
        return DEFAULT_BLOCK_TOKENS if self.block_tokens is None else self.block_tokens

    @property
    def keeps_own_dtype(self) -> bool:
        return self.kv_dtype is None or self.kv_dtype.lower() == "auto"

    def precision(self, config: Config) -> Precision:
        """How keys, values and latents are stored."""
        if self.kv_dtype is None or self.keeps_own_dtype:
            return Plain(own_dtype(config))
        return precision(self.kv_dtype)

    def notes(self, config: Config) -> tuple[str, ...]:
        """What is assumed about element types."""
        if not self.keeps_own_dtype:
            return ()
        notes: tuple[str, ...] = ()
        if not config.present(*_DTYPE):
            notes = (f"no dtype in the configuration: planned as {own_dtype(config)}",)
        named = quantised_cache(config)
        if named:
            notes += (
                f"the checkpoint names a quantised cache ({named}): planned as "
                f"{own_dtype(config)}; with kv_dtype fp8 it takes half",
            )
        return notes

    def recurrence(self, config: Config) -> Recurrence:
        """How recurrent states are stored: in the model's dtype, whatever the kv dtype is.

        A model that wants its states wider says so in `mamba_ssm_cache_dtype` or
        `mamba_ssm_dtype`.
        """
        own = own_dtype(config)
        key = config.present("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        return Recurrence(
            rank=self.rank,
            conv_dtype=own,
            state_dtype=own if key is None else _dtype(config, key, own),
        )


def quantised_cache(config: Config) -> str:
    """The key by which a checkpoint says that its cache is narrower; empty where it does not."""
    if "quantization_config" not in config:
        return ""
    quantised = config.inner("quantization_config")
    return quantised.present("kv_cache_scheme", "kv_cache_quant_algo") or ""


@dataclass(frozen=True, slots=True)
class Stack:
    """What each decoder layer keeps, first layer first; a layer may keep nothing."""

    layers: tuple[tuple[LayerSpec, ...], ...]
    notes: tuple[str, ...] = ()


def own_dtype(config: Config) -> DType:
    """The model's own element type; bfloat16 where the configuration names none."""
    key = config.present(*_DTYPE)
    return DType.BFLOAT16 if key is None else _dtype(config, key, DType.BFLOAT16)


def _dtype(config: Config, key: str, auto: DType) -> DType:
    name = config.text(key, "")
    if name == "auto":
        return auto
    dtype = element(name)
    if dtype is None:
        raise config.error(f"{key} is {name!r}, not an element type", "for example 'bfloat16'")
    return dtype
