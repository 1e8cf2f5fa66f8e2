"""`kvstow why`: where reuse of a prompt ends in a store, and why."""

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import MISUSED, emit_json, emit_text, refuse
from kvstow.errors import KvstowError

if TYPE_CHECKING:
    from kvstow.blocks.prompt import Prompt
    from kvstow.offload.why import WhyEnded
    from kvstow.plan.identity import Identity

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The store's directory.", show_default=False)
]


def why(
    directory: Directory,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="The prompt as token ids: a JSON list, a file that holds one, or - for stdin.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="The prompt as text; needs --tokenizer.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder with tokenizer.json.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The model that asks, to compare identities.", show_default=False
        ),
    ] = None,
    salt: Annotated[str, typer.Option(help="The request's cache salt.")] = "",
    adapter: Annotated[str, typer.Option(help="The request's adapter.")] = "",
    json: options.Json = False,
) -> None:
    """Say where reuse of a prompt ends in a store, and why.

    The first token that differs, salt, adapter, a field of the identity with both values, evicted
    or never stored. Looks at the rows on disk: a running engine may hold more in memory.
    """
    from kvstow.blocks.prompt import Prompt

    ids = _token_ids(tokens, text, tokenizer)
    try:
        prompt = Prompt.of(ids)
    except KvstowError as error:
        refuse(str(error), code=MISUSED)
    found = _explained(directory, prompt, model, salt=salt, adapter=adapter)
    if json:
        emit_json(found.as_json())
    else:
        emit_text(
            f"{found.found_tokens:,} of {found.num_tokens:,} tokens are found: {found.reason}\n"
            f"{found.text}"
        )


def _explained(
    directory: Path, prompt: "Prompt", model: Path | None, *, salt: str, adapter: str
) -> "WhyEnded":
    from kvstow.offload.journal import FILE, Journal
    from kvstow.offload.store import Store

    options.check_store(directory)
    with Store.open(directory) as store:
        if not (directory / FILE).exists() and (directory.parent / FILE).exists():
            store.journal = Journal(directory.parent)  # ranks have folders of their own
        return store.why(prompt, _asking(store.identity, model, salt=salt, adapter=adapter))


def _asking(own: "Identity", model: Path | None, *, salt: str, adapter: str) -> "Identity":
    """The identity of a request: the store's, or that of a model, with its adapter and salt."""
    if model is None:
        return own.for_request(adapter=adapter, salt=salt)
    from kvstow.plan.identity import Identity

    asking = Identity.of(
        model, model=own.model, kv_dtype=own.kv_dtype, interior=own.interior, adapter=adapter
    )
    return asking.for_request(salt=salt)


def _token_ids(tokens: str | None, text: str | None, tokenizer: Path | None) -> list[int]:
    """The prompt's ids; ends with 2 where it is given not at all, twice, or not as it should."""
    if (tokens is None) == (text is None):
        refuse("give the prompt once\n\nhint: --tokens or --text", code=MISUSED)
    if text is not None:
        return _tokenized(text, tokenizer)
    assert tokens is not None
    try:
        source = sys.stdin.read() if tokens == "-" else tokens
        if not source.lstrip().startswith("["):
            source = Path(source).read_text()
        found = json_format.loads(source)
    except (OSError, ValueError) as error:
        refuse(f"token ids cannot be read: {error}", code=MISUSED)
    if not isinstance(found, list):
        refuse("token ids are a list of whole numbers", code=MISUSED)
    return found  # pyright: ignore[reportUnknownVariableType]


def _tokenized(text: str, folder: Path | None) -> list[int]:
    if folder is None:
        refuse("--text without --tokenizer\n\nhint: --tokenizer MODEL_DIR", code=MISUSED)
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        refuse(f"{file}: no such file\n\nhint: name the model's folder", code=MISUSED)
    try:
        loaded: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        refuse(f"{file}: no tokenizer: {error}", code=MISUSED)
    return loaded.encode(text).ids
