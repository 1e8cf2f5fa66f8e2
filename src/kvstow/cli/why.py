"""`kvstow why`: where reuse of a prompt ends in a store, and why."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli.output import refuse, reporting, usage
from kvstow.cli.store import client_at, stores_in
from kvstow.errors import KvstowError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstow.blocks.prompt import Prompt
    from kvstow.offload.store import Store
    from kvstow.offload.why import WhyEnded

PATIENCE = 10
"""Seconds that a look-up of the command line may take; an engine's budget is far less."""

Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL", help="The store's directory, or s3://…, redis://… with --journal."
    ),
]
TokenIds = Annotated[
    str | None,
    typer.Option(
        metavar="IDS",
        help="The prompt as token ids: a JSON list, a file that holds one, or - for stdin.",
    ),
]
Text = Annotated[str | None, typer.Option(help="The prompt as text; needs --tokenizer.")]
TokenizerFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A folder with tokenizer.json.")
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The model in use; its identity is compared with the store's."
    ),
]
Salt = Annotated[str, typer.Option(help="The request's cache salt.")]
Adapter = Annotated[str, typer.Option(help="The request's adapter.")]
JournalFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Journal of the stored prompts, if it is not in the store."),
]
IdentityDigits = Annotated[
    str,
    typer.Option(
        metavar="DIGITS", help="First digits of the identity, if a remote store holds several."
    ),
]


@reporting
def why(
    place: Place,
    tokens: TokenIds = None,
    text: Text = None,
    tokenizer: TokenizerFolder = None,
    model: ModelFolder = None,
    salt: Salt = "",
    adapter: Adapter = "",
    journal: JournalFolder = None,
    identity: IdentityDigits = "",
) -> "WhyEnded":
    """Explain where a store stops matching a prompt.

    The reason is the first token that differs, the salt, the adapter, a field of the identity with
    both values, eviction, or that it was never stored. Looks at the rows on disk or in a remote
    store: a running engine may hold more in memory. Where every rank has a folder, the rank that
    finds the fewest tokens counts.
    """
    from kvstow.blocks.prompt import Prompt

    with usage(KvstowError):
        prompt = Prompt.of(_token_ids(tokens, text, tokenizer))
    explained = [
        _explained(store, prompt, model, salt=salt, adapter=adapter)
        for store in _stores(place, journal, identity)
    ]
    return min(explained, key=lambda each: each.found_tokens)


def _explained(
    store: "Store", prompt: "Prompt", model: Path | None, *, salt: str, adapter: str
) -> "WhyEnded":
    from kvstow.offload.why import compared_identity
    from kvstow.plan.checkpoint import adapter_digest
    from kvstow.plan.identity import Identity

    with store:
        own, note = store.identity, ""
        if model is not None:
            checkpoint = Identity.of(
                model, model=own.model, kv_dtype=own.kv_dtype, interior=own.interior
            )
            own, note = compared_identity(own, checkpoint)
            adapter = adapter_digest(adapter)
        request = own.for_request(adapter=adapter, salt=salt)
        return replace(store.why(prompt, request), note=note)


def _stores(place: str, journal: Path | None, identity: str) -> "Iterator[Store]":
    """The stores of all ranks at a place, one after the other, each with the journal."""
    from kvstow.offload.journal import FILE, Journal
    from kvstow.offload.store import Store

    if "://" in place:
        store = _remote_store(place, identity)
        store.journal = None if journal is None else Journal(journal)
        yield store
        return
    directory = Path(place)
    for rank in stores_in(directory):
        store = Store.open(rank)
        if journal is not None:
            store.journal = Journal(journal)
        elif not (rank / FILE).exists() and (rank.parent / FILE).exists():
            store.journal = Journal(rank.parent)  # ranks have folders of their own
        yield store


def _remote_store(url: str, identity: str) -> "Store":
    """The store at a URL, as the writers of one computation see it; ends with 2 where there is
    none, or where there are several and `identity` does not choose."""
    from kvstow.offload.remote.client import parse
    from kvstow.offload.remote.collect import writers
    from kvstow.offload.store import Store

    with client_at(url) as client:
        tenant = parse(url)[2].tenant
        layouts = {
            writer_identity: writer.layout
            for (owner, writer_identity, _), writer in writers(client).items()
            if owner == tenant and writer_identity.startswith(identity)
        }
    if len(layouts) != 1:
        lines = [f"\n  {each[:8]} {layout.model}" for each, layout in sorted(layouts.items())]
        refuse(
            f"{url}: {len(layouts)} computations have written there for tenant {tenant!r}"
            + "".join(lines)
            + "\n\nhint: kvstow store inspect URL; choose one with --identity"
        )
    (layout,) = layouts.values()
    patient = url if "budget=" in url else f"{url}{'&' if '?' in url else '?'}budget={PATIENCE}"
    return Store(remote=patient).bind(layout)


def _token_ids(tokens: str | None, text: str | None, tokenizer: Path | None) -> list[int]:
    """The prompt's ids; ends with 2 where it is given not at all, twice, or not as it should."""
    if (tokens is None) == (text is None):
        refuse("give the prompt once\n\nhint: --tokens or --text")
    if text is not None:
        return _tokenized(text, tokenizer)
    assert tokens is not None
    try:
        source = sys.stdin.read() if tokens == "-" else tokens
        if not source.lstrip().startswith("["):
            source = Path(source).read_text()
        ids = json.loads(source)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        refuse(
            f"token ids cannot be read from {tokens[:80]!r}: {why}\n\n"
            "hint: --tokens '[1, 2, 3]', or the file that holds such a list"
        )
    if not isinstance(ids, list):
        refuse("token ids are a list of whole numbers")
    return ids  # pyright: ignore[reportUnknownVariableType]


def _tokenized(text: str, folder: Path | None) -> list[int]:
    if folder is None:
        refuse("--text without --tokenizer\n\nhint: --tokenizer MODEL_DIR")
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        refuse(f"{file}: no such file\n\nhint: name the model's folder")
    try:
        loaded: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        refuse(f"{file}: no tokenizer: {error}")
    return loaded.encode(text).ids
