"""Identity: which computation made the bytes of a cache.

Two caches may exchange rows only if they come from the same computation. Equal shapes do
not say that: another checkpoint, another rope, another adapter fill rows of the same size
with other numbers. An identity holds everything that decides those numbers:

    model       the model's name, as people say it
    weights     a digest of the weights: headers, and a sample of every tensor
    config      every field of the model's configuration that can change what is cached, and
                digests of modelling code: the checkpoint's own, or what a model in memory runs
    kv_dtype    the cache's element type as the engine names it (`fp8_e4m3`, not `uint8`)
    interior    how the attention backend arranges a page inside
    tokenizer   a digest of the tokenizer's files, because prefixes are found by token ids
    adapter     name and digest of a LoRA adapter
    salt        what keeps tenants apart

It is part of a layout's manifest, and so of tickets, handshakes, stores and block keys.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, cast

from kvstow.errors import ModelError, SpecError

TOKEN_ORDERED = "token-ordered"
"""Pages whose cells lie one token after the other: every GPU backend we know."""

HINT = "hint: pass identity=Identity.of(model_dir), or Identity.unverified('why') to go without"

WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "keys_to_ignore_at_inference",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a `config.json` that never change what is cached. All others count."""

CODE = "modelling_code"
"""The field of an identity's configuration under which files of modelling code stand."""

MAX_FIELDS = 1024
MAX_TEXT = 200


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
    ) -> "Identity":
        """The identity of a checkpoint on disk: reads headers and samples, not the weights.

        `adapter` is a LoRA's directory, or a name for one that lies elsewhere. Modelling code
        that the checkpoint brings counts, unless `trust_remote_code` says that the engine runs
        code of its own.
        Raises ModelError where there is no configuration or there are no weights.
        """
        # Here, because layouts have identities and must not need msgspec to be imported.
        from kvstow.plan.checkpoint import adapter_digest, read_checkpoint

        checkpoint = read_checkpoint(Path(model_dir))
        code = {CODE: checkpoint.code} if trust_remote_code and checkpoint.code else {}
        return Identity(
            model=model or checkpoint.name,
            weights=checkpoint.weights,
            config=config_fields({**checkpoint.config, **code}, nulls=True),
            kv_dtype=kv_dtype,
            interior=interior,
            tokenizer=checkpoint.tokenizer,
            adapter=adapter_digest(adapter),
            salt=salt,
        )

    @staticmethod
    def of_tensors(
        model: str,
        config: Mapping[str, Any],
        tensors: Iterable[tuple[str, str, bytes]],
        *,
        kv_dtype: str = "",
        interior: str = TOKEN_ORDERED,
        tokenizer: str = "",
        adapter: str = "",
        salt: str = "",
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
            weights=state.hexdigest(),
            config=config_fields(config),
            kv_dtype=kv_dtype,
            interior=interior,
            tokenizer=tokenizer,
            adapter=adapter,
            salt=salt,
        )

    @staticmethod
    def unverified(why: str, *, model: str = "", kv_dtype: str = "") -> "Identity":
        """No identity, on purpose: whoever uses it vouches that both sides compute alike.

        Exchangeable with other unverified identities of the same model name only.
        """
        return Identity(model=model, kv_dtype=kv_dtype, unverified_because=why)

    def __post_init__(self) -> None:
        if bool(self.weights) == bool(self.unverified_because):
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
                f"identity of {self.model!r}: something that is no Unicode text: {error}"
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

    def for_request(self, *, adapter: str = "", salt: str = "") -> "Identity":
        """The identity of one request's bytes: the model's, with its adapter and its salt. It is
        this very one where the request has neither, so that its digest is computed once."""
        if not adapter and not salt:
            return self
        return replace(self, adapter=adapter or self.adapter, salt=salt or self.salt)

    @cached_property
    def digest(self) -> bytes:
        """BLAKE2b-256 of all that counts; equal for identities without `differences`."""
        parts = dict(self._compared())
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=32, person=b"kvstow identity").digest()

    def differences(self, other: "Identity") -> tuple[str, ...]:
        """What keeps bytes of one from being used by the other, with both values."""
        ours, theirs = dict(self._compared()), dict(other._compared())
        return tuple(
            f"{name} is {_shown(ours.get(name, ''))} in the source, "
            f"{_shown(theirs.get(name, ''))} in the destination"
            for name in (*ours, *(name for name in theirs if name not in ours))
            if ours.get(name, "") != theirs.get(name, "")
        )

    @property
    def fields(self) -> dict[str, str]:
        """Everything that counts, by name, in words; of a salt only a digest."""
        return dict(self._compared())

    def _compared(self) -> Iterator[tuple[str, str]]:
        """Everything that counts, in words. Why an identity is unverified does not."""
        yield "model", self.model
        yield "weights", self.weights or "unverified"
        yield "cache dtype", self.kv_dtype
        yield "page interior", self.interior
        yield "tokenizer", self.tokenizer
        yield "adapter", self.adapter
        yield "salt", self.salt and blake2b(self.salt.encode(), digest_size=8).hexdigest()
        for name, value in self.config:
            yield f"config {name}", value


def config_fields(config: Mapping[str, Any], *, nulls: bool = False) -> tuple[tuple[str, str], ...]:
    """The fields of a configuration that can change what is cached, flat, as sorted text.

    Nested mappings become dotted names. Long values stand as their digest. With `nulls` a field
    that is null counts: in a file it says something else than none, which has a default.
    """
    try:
        return tuple(sorted(_flat(config, "", nulls=nulls)))
    except (RecursionError, UnicodeEncodeError) as error:
        raise ModelError(f"a configuration that cannot be compared: {error}") from None


def _flat(config: Mapping[str, Any], prefix: str, *, nulls: bool) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if key in WITHOUT_EFFECT or (value is None and not nulls):
            continue
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.", nulls=nulls)
            continue
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        if len(text) > MAX_TEXT:
            text = f"digest {blake2b(text.encode(), digest_size=16).hexdigest()}"
        yield f"{prefix}{key}", text


def _shown(value: str) -> str:
    return repr(value) if value else "not set"
