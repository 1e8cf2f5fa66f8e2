"""What an operator sets for SGLang's storage backend, and which computation makes its pages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvstow.adapters.chunks import stated_identity
from kvstow.errors import SpecError
from kvstow.plan.checkpoint import adapter_digest
from kvstow.plan.identity import Identity

PLACES = frozenset({"host", "disk", "disk_bytes", "remote"})
IDENTITY = frozenset({"model_dir", "unverified"})
SGLANGS = frozenset(
    {
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
    }
)
"""What SGLang itself reads of the same JSON object."""

SETTINGS = ("dtype", "json_model_override_args", "quantization", "quantization_param_path")
"""Settings of the engine that change what is cached and that no file of the model tells."""


class RankConfig(Protocol):
    """What is used of SGLang's `HiCacheStorageConfig`: which rank of which engine this is."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_rank: int
    dcp_size: int
    is_mla_model: bool
    model_name: str | None
    tp_lcm_size: int | None
    extra_config: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheOptions:
    """The JSON object of `--hicache-storage-backend-extra-config`, checked."""

    places: Mapping[str, Any] = field(default_factory=dict[str, Any])
    identity: Mapping[str, Any] = field(default_factory=dict[str, Any])
    uses_host_indices: bool = True

    @classmethod
    def of(cls, config: RankConfig) -> "HiCacheOptions":
        """SpecError for an option that nobody reads, or that cannot be kept."""
        settings = config.extra_config or {}
        unknown = set(settings) - PLACES - IDENTITY - SGLANGS
        if unknown:
            raise SpecError(
                f"hicache-storage-backend-extra-config has {', '.join(sorted(unknown))}\n\n"
                f"hint: kvstow reads {', '.join(sorted(PLACES | IDENTITY))}; SGLang "
                f"{', '.join(sorted(SGLANGS))}"
            )
        if config.tp_lcm_size is not None:
            raise SpecError(
                f"tp_lcm_size is {config.tp_lcm_size}: pages belong to one tensor parallel size\n\n"
                "hint: leave it out; engines of another size compute their own pages"
            )
        if ("disk" in settings) != ("disk_bytes" in settings):
            raise SpecError('a directory and its size go together: "disk" and "disk_bytes"')
        return cls(
            places={name: settings[name] for name in PLACES & set(settings)},
            identity={name: settings[name] for name in IDENTITY & set(settings)},
            uses_host_indices=bool(settings.get("interface_v1", 0)),
        )

    def computation(
        self, config: RankConfig, settings: Mapping[str, str], *, kv_dtype: str, interior: str
    ) -> Identity:
        """Which computation makes the pages: the model's files, and the settings of the engine
        that they do not tell."""
        stated = stated_identity(
            self.identity, name=config.model_name or "", kv_dtype=kv_dtype, interior=interior
        )
        fields = dict(stated.config) | {f"sglang {name}": value for name, value in settings.items()}
        return replace(stated, config=tuple(sorted(fields.items())))


def rank_name(config: RankConfig, *, is_replicated: bool) -> str:
    """Whose pages a rank's are. Ranks of tensor parallelism have one name where the cache is
    replicated, as a latent cache is."""
    tp = "all" if is_replicated else f"{config.tp_rank}/{config.tp_size}"
    return (
        f"tp {tp} pp {config.pp_rank}/{config.pp_size} "
        f"cp {config.attn_cp_rank}/{config.attn_cp_size} dcp {config.dcp_rank}/{config.dcp_size} "
        f"mla {config.is_mla_model}"
    )


def adapters_name(paths: Iterable[str]) -> str:
    """The LoRA adapters that a server was started with. SGLang's hashes have their names and paths,
    which say nothing of the weights that lie there today."""
    return " ".join(sorted(adapter_digest(path) for path in paths))
