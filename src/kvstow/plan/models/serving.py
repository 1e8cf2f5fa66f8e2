"""How a model is served: its share of the ranks, tokens per block, element types of the cache.

Tensor parallelism has one rule:

    units % tp == 0    units / tp each, contiguous          8 heads, tp 2:  0-3 │ 4-7
    tp % units == 0    one each, on tp / units ranks alike  2 heads, tp 4:  0 │ 0 │ 1 │ 1
    otherwise          refused

What is only read (kv heads, state groups) may be replicated; what a rank computes
(query heads, recurrent heads, channels) must divide.

Pipeline stages are contiguous decoder layers, as even as the engines make them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstow.errors import ModelError, SpecError
from kvstow.plan.models.catalogue import is_named_only
from kvstow.plan.models.config import Config
from kvstow.plan.spec import DType, Extent, LayerSpec
from kvstow.plan.view import check_count

# ── ranks ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A stretch of an axis: `units` pieces of `size` elements, split by whole units."""

    what: str
    units: int
    size: int = 1
    replicable: bool = False


def check_rank(what: str, rank: object, size: int) -> None:
    """Raises ModelError for a rank that is not one of so many."""
    check_count(what, size, error=ModelError)
    if type(rank) is not int or not 0 <= rank < size:
        raise ModelError(f"{what} rank {rank!r} is not one of the {size} from 0")


def stage(num_layers: int, *, pp: int, pp_rank: int) -> range:
    """The decoder layers of stage `pp_rank` of `pp`.

    Every stage takes `num_layers // pp`. What remains goes one each to the stages from
    the last but one backwards: the last stage has the output head to compute, and the
    first the embedding. 61 layers on 4 stages are 15, 15, 16, 15.
    """
    check_rank("pp", pp_rank, pp)
    if pp > num_layers:
        raise ModelError(
            f"{num_layers} layers cannot fill {pp} pipeline stages"
            f"\n\nhint: choose a pp of at most {num_layers}"
        )
    each, left = divmod(num_layers, pp)
    sizes = [each + (pp - 1 - left <= i < pp - 1) for i in range(pp)]
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])


# ── element types ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Precision:
    """How keys, values and latents are stored: their elements, and the scales beside them.

    none     the elements alone
    head     one float32 scale each for k and v of a token and head
    group    nvfp4: one fp8 scale for every 16 elements
    latent   MLA: a float32 scale per 128 of an fp8 latent, beside a bfloat16 rope part
    """

    dtype: DType
    scales: Literal["none", "head", "group", "latent"] = "none"


_FLOATS = (
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.FLOAT8_E4M3,
    DType.FLOAT8_E5M2,
)
"""Element types that keys and values are kept in without scales of their own."""

_SCALED = {
    "fp8_per_token_head": Precision(DType.FLOAT8_E4M3, "head"),
    "int8": Precision(DType.INT8, "head"),
    "int8_per_token_head": Precision(DType.INT8, "head"),
    "int4_per_token_head": Precision(DType.INT4, "head"),
    "nvfp4": Precision(DType.FLOAT4_E2M1, "group"),
    "fp8_ds_mla": Precision(DType.FLOAT8_E4M3, "latent"),
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
    dtype = element(name)
    if dtype is not None:
        return Precision(dtype)
    if name.lower() not in _SCALED:
        names = [*("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"), *_SCALED]
        raise ModelError(f"unknown cache dtype {name!r}\n\nhint: one of {', '.join(names)}")
    return _SCALED[name.lower()]


_DTYPE = ("dtype", "torch_dtype")


def own_dtype(config: Config) -> DType:
    """The model's own element type; bfloat16 where the configuration names none."""
    return _dtype(config, _DTYPE, DType.BFLOAT16)


def state_dtype(config: Config) -> DType:
    """The element type of recurrent states: the model's own, whatever the kv dtype is, unless it
    wants them wider."""
    return _dtype(config, ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"), own_dtype(config))


def _dtype(config: Config, keys: Sequence[str], auto: DType) -> DType:
    key = config.present(*keys)
    name = "auto" if key is None else config.text(key, "")
    dtype = auto if name == "auto" else element(name)
    if dtype is None:
        raise config.error(f"{key} is {name!r}, not an element type", "for example 'bfloat16'")
    return dtype


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The cache's dtype that a checkpoint names, and under which key; None for one that vLLM does
    not take."""

    key: str
    dtype: str | None


_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4"}


def own_cache(config: Config) -> OwnCache | None:
    """What a checkpoint says about its cache, as vLLM reads it for `auto`; None where nothing.

    A scheme beside compressed tensors is fp8; modelopt has fp8 and nvfp4.
    """
    if "quantization_config" not in config:
        return None
    quantised = config.inner("quantization_config")
    method = quantised.text("quant_method", "")
    key = quantised.present("kv_cache_scheme", "kv_cache_quant_algo")
    if key is None:
        return None
    scheme = quantised.facts[key]
    dtype = None
    if isinstance(scheme, str) and method.startswith("modelopt"):
        dtype = _ALGORITHMS.get(scheme.lower())
    elif method.startswith("modelopt"):
        inner = quantised.inner(key)
        if inner.text("type", "") == "float":
            dtype = {8: "fp8", 4: "nvfp4"}.get(inner.count("num_bits", default=0))
    elif method in ("", "compressed-tensors"):
        dtype = "fp8"
    return OwnCache(key, dtype)


# ── what the operator chooses ─────────────────────────────────────────────────────────────

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Rank `rank` of `tp` tensor-parallel ranks, and what the operator chooses; `None` leaves
    the choice to the model."""

    tp: int = 1
    rank: int = 0
    block_tokens: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        check_rank("tp", self.rank, self.tp)
        if self.block_tokens is not None:
            check_count("block_tokens", self.block_tokens, error=ModelError)
        if self.kv_dtype is not None and not isinstance(self.kv_dtype, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(
                f"kv_dtype is {self.kv_dtype!r}, not a name\n\nhint: such as 'bfloat16' or 'fp8'"
            )

    @property
    def tokens(self) -> int:
        """Tokens per block of everything that grows with the sequence."""
        return DEFAULT_BLOCK_TOKENS if self.block_tokens is None else self.block_tokens

    @property
    def keeps_own_dtype(self) -> bool:
        return self.kv_dtype is None or self.kv_dtype.lower() == "auto"

    def precision(self, config: Config) -> Precision:
        """How keys, values and latents are stored."""
        if self.kv_dtype is not None and not self.keeps_own_dtype:
            return precision(self.kv_dtype)
        named = own_cache(config)
        if named is not None and named.dtype is not None:
            return precision(named.dtype)
        return Precision(own_dtype(config))

    def notes(self, config: Config) -> tuple[str, ...]:
        """What is assumed about element types."""
        if not self.keeps_own_dtype:
            return ()
        notes: tuple[str, ...] = ()
        if not config.present(*_DTYPE):
            notes = (f"no dtype in the configuration: planned as {own_dtype(config)}",)
        if named := own_cache(config):
            dtype = named.dtype or own_dtype(config)
            notes += (f"the checkpoint names a quantised cache ({named.key}): planned as {dtype}",)
        elif is_named_only(config.facts):
            notes += (
                f"the name does not tell the cache's dtype: planned as {own_dtype(config)}; if its "
                "hf_quant_config.json says kv_cache_quant_algo FP8, up to twice as many tokens "
                "fit: --kv-dtype fp8",
            )
        return notes

    def divided(self, what: str, units: int) -> tuple[int, int]:
        """This rank's interval of `units` that must divide evenly."""
        if units % self.tp:
            raise ModelError(
                f"{units} {what} cannot be split over {self.tp} tensor-parallel ranks"
                f"\n\nhint: choose a tp that divides {units}"
            )
        each = units // self.tp
        return self.rank * each, (self.rank + 1) * each

    def shared(self, what: str, units: int) -> tuple[int, int]:
        """This rank's interval of `units` that may be replicated."""
        if units < self.tp and self.tp % units == 0:
            unit = self.rank // (self.tp // units)
            return unit, unit + 1
        if units % self.tp:
            raise ModelError(
                f"{units} {what} cannot be split over {self.tp} tensor-parallel ranks, "
                f"nor replicated evenly\n\n"
                f"hint: choose a tp that divides {units} or is a multiple of it"
            )
        return self.divided(what, units)

    def split(self, axis: str, *parts: AxisPart) -> Extent:
        """What this rank holds of an axis made of `parts` one after the other.

        Each part is split on its own; pieces that touch become one.
        """
        pieces: list[tuple[int, int]] = []
        start = 0
        for part in parts:
            share = self.shared if part.replicable else self.divided
            lo, hi = share(part.what, part.units)
            piece = (start + lo * part.size, start + hi * part.size)
            if pieces and pieces[-1][1] == piece[0]:
                piece = (pieces.pop()[0], piece[1])
            pieces.append(piece)
            start += part.units * part.size
        return Extent(axis, start, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Stack:
    """What each decoder layer keeps, first layer first; a layer may keep nothing."""

    layers: tuple[tuple[LayerSpec, ...], ...]
    notes: tuple[str, ...] = ()
