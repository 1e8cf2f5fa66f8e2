"""Identity: which computation made the bytes of a cache.

Two caches may exchange rows only if they come from the same computation. Equal shapes do
not say that: another checkpoint, another rope, another adapter fill rows of the same size
with other numbers. An identity holds everything that decides those numbers:

    model       the model's name, as people say it
    weights     their format, and a digest of them: `safetensors:…` of files, from headers and
                samples of every tensor; `memory:…` of a model in memory
    config      every field of the model's configuration that can change what is cached, and
                digests of other files that decide what is computed, such as the model's own code
    kv_dtype    the cache's element type as the engine names it (`fp8_e4m3`, not `uint8`)
    interior    how the attention backend arranges a page inside
    tokenizer   a digest of the tokenizer's files, because prefixes are found by token ids
    adapter     name and digest of a LoRA adapter
    salt        what keeps tenants apart

It is part of a layout's manifest, and so of tickets, handshakes, stores and block keys.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, cast

from kvstow.errors import ModelError, SpecError
from kvstow.plan import checkpoint

TOKEN_ORDERED = "token-ordered"
"""Pages whose cells lie one token after the other: every GPU backend we know."""

HINT = "hint: pass identity=Identity.of(model_dir), or Identity.unverified('why') to go without"

# fmt: off
WITHOUT_EFFECT = frozenset((
    "_attn_implementation", "_commit_hash", "_name_or_path", "attn_implementation", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "eos_token_id",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "id2label", "keys_to_ignore_at_inference", "label2id", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "task_specific_params", "tokenizer_class", "torchscript", "transformers_version",
    "use_cache",
))
# fmt: on
"""Fields of a `config.json` that never change what is cached. All others count."""

MEMORY = "memory"
"""The format of weights that were digested in memory. Nothing that is read from files can be
compared with it."""

UNVERIFIED = "unverified"
MAX_FIELDS = 4096
MAX_TEXT = 200
PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What two caches must have in common to be exchangeable.

    `unverified_because` is empty unless nobody looked at the weights; then it says why.
    """

    model: str
    weights: str = ""
    config: tuple[tuple[str, str], ...] = ()
    kv_dtype: str = ""
    interior: str = TOKEN_ORDERED
    tokenizer: str = ""
    adapter: str = ""
    salt: str = ""
    unverified_because: str = ""

    @staticmethod
    def of(
        model_dir: str | Path,
        *,
        model: str = "",
        kv_dtype: str = "",
        interior: str = TOKEN_ORDERED,
        adapter: str | Path = "",
        salt: str = "",
        trust_remote_code: bool = True,
        weight_files: str = "",
    ) -> "Identity":
        """The identity of a checkpoint on disk: reads headers and samples, not the weights.

        `adapter` is a LoRA's directory, or a name for one that lies elsewhere. Modelling code
        that the checkpoint brings counts, unless `trust_remote_code` says that the engine runs
        code of its own. `weight_files` is the pattern of those that the engine loads (`*.bin`),
        where it does not prefer safetensors.
        Raises ModelError where there is no configuration or there are no weights.
        """
        folder = Path(model_dir)
        config = checkpoint.checkpoint_config(folder)
        fields = {
            **dict(config_fields(config)),
            **checkpoint.deciding_fields(folder, config, trust_remote_code=trust_remote_code),
        }
        return Identity(
            model=model or checkpoint.checkpoint_name(folder),
            weights=checkpoint.weights_digest(folder, weight_files),
            config=tuple(sorted(fields.items())),
            kv_dtype=kv_dtype,
            interior=interior,
            tokenizer=checkpoint.tokenizer_digest(folder),
            adapter=checkpoint.adapter_digest(adapter),
            salt=salt,
        )

    @staticmethod
    def of_tensors(
        model: str,
        config: Mapping[str, Any],
        tensors: Iterable[tuple[str, str, bytes]],
        *,
        kv_dtype: str = "",
        adapter: str = "",
    ) -> "Identity":
        """The identity of a model in memory: per tensor its name, its type and shape in words,
        and a sample of its bytes. The order of the tensors does not matter."""
        samples = sorted(tensors)
        if not samples:
            raise ModelError(f"model {model!r} has no tensors to identify it by\n\n{HINT}")
        state = blake2b(digest_size=16)
        for part in (part for sample in samples for part in sample):
            data = part if isinstance(part, bytes) else part.encode()
            state.update(len(data).to_bytes(8, "little") + data)
        return Identity(
            model=model,
            weights=f"{MEMORY}:{state.hexdigest()}",
            config=config_fields(config),
            kv_dtype=kv_dtype,
            adapter=adapter,
        )

    @staticmethod
    def unverified(why: str, *, model: str = "", kv_dtype: str = "") -> "Identity":
        """No identity, on purpose: you guarantee that both sides compute the same.

        Exchangeable with other unverified identities of the same model name only.
        """
        return Identity(model=model, kv_dtype=kv_dtype, unverified_because=why)

    def __post_init__(self) -> None:
        if bool(self.weights) == bool(self.unverified_because) or self.weights == UNVERIFIED:
            raise SpecError(
                f"identity of {self.model!r}: weights {self.weights!r}, unverified because "
                f"{self.unverified_because!r}: exactly one of them must be said\n\n{HINT}"
            )
        texts = (self.model, self.weights, self.kv_dtype, self.interior, self.tokenizer)
        texts += (self.adapter, self.salt, self.unverified_because, *chain(*self.config))
        try:
            "\n".join(texts).encode()
        except (UnicodeEncodeError, TypeError) as error:
            raise SpecError(
                f"identity of {self.model!r}: a value is not Unicode text: {error}"
            ) from None
        names = [name for name, _ in self.config]
        if len(names) > MAX_FIELDS or names != sorted(set(names)):
            raise SpecError(
                f"identity of {self.model!r}: its {len(names)} configuration fields must be "
                f"sorted, unique and at most {MAX_FIELDS}"
            )

    @property
    def is_verified(self) -> bool:
        return not self.unverified_because

    @property
    def is_of_files(self) -> bool:
        """Whether the weights were read from a checkpoint's files, as `Identity.of` does."""
        return self.is_verified and not self.weights.startswith(f"{MEMORY}:")

    def for_request(self, *, adapter: str = "", salt: str = "") -> "Identity":
        """The identity of one request's bytes: the model's, with its adapter and its salt. It is
        this very one where the request has neither, so that its digest is computed once."""
        if not adapter and not salt:
            return self
        return replace(self, adapter=adapter or self.adapter, salt=salt or self.salt)

    @cached_property
    def digest(self) -> bytes:
        """BLAKE2b-256 of `fields`: equal for identities without `differences`, and no others."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=32, person=b"kvstow identity").digest()

    def differences(self, other: "Identity") -> tuple[str, ...]:
        """What keeps bytes of one from being used by the other, with both values."""
        ours, others = self.fields, other.fields
        return tuple(
            f"{name} is {shown(ours.get(name))} in the source, "
            f"{shown(others.get(name))} in the destination"
            for name in ours | others
            if ours.get(name) != others.get(name)
        )

    @property
    def fields(self) -> dict[str, str]:
        """Everything that is compared, by name, as text: the salt as a digest, and not why an
        identity is unverified."""
        salt = self.salt and blake2b(self.salt.encode(), digest_size=16).hexdigest()
        return {
            "model": self.model,
            "weights": self.weights or UNVERIFIED,
            "cache dtype": self.kv_dtype,
            "page interior": self.interior,
            "tokenizer": self.tokenizer,
            "adapter": self.adapter,
            "salt": salt,
            **{f"config {name}": value for name, value in self.config},
        }


def config_fields(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The fields of a configuration that can change what is cached, flat, as sorted text.

    Values stand as JSON, long ones as its digest, and nested mappings as dotted names, of which
    parts that are not plain words are quoted: two configurations that differ in anything but
    fields without effect have different fields. Null counts: absent fields have defaults.
    """
    try:
        return tuple(sorted(_flat(config, "")))
    except (RecursionError, UnicodeEncodeError) as error:
        raise ModelError(f"a configuration that cannot be compared: {error}") from None


def shown(value: str | None) -> str:
    """A field's value for people; None where there is no such field."""
    return "absent" if value is None else repr(value) if value else "not set"


def _flat(config: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if key in WITHOUT_EFFECT:
            continue
        plain = isinstance(key, str) and PLAIN_KEY.fullmatch(key) is not None
        name = f"{prefix}{key if plain else json.dumps(key, default=str)}"
        fields: list[tuple[str, str]] = []
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value)
            fields = [*_flat(value, f"{name}.")]
        yield from fields or [(name, _text({} if isinstance(value, Mapping) else value))]


def _text(value: Any) -> str:
    text = _canonical(value)
    if len(text) > MAX_TEXT:
        return f"digest {blake2b(text.encode(), digest_size=16).hexdigest()}"
    return text


def _canonical(value: Any) -> str:
    """JSON of a value, the same for equal mappings in any order."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        inner = ",".join(sorted(f"{_canonical(key)}:{_canonical(each)}" for key, each in pairs))
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_canonical, cast('list[Any]', value)))}]"
    return json.dumps(value, default=str)
