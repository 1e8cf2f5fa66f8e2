"""`kvstow check`: a manifest against the laws."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, MISUSED, emit_json, emit_text, refuse
from kvstow.errors import LayoutError, ManifestError

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A manifest; - reads stdin.", show_default=False),
]


def check(file: File, json: options.Json = False) -> None:
    """Check a manifest: bounds, overlaps, alignment, capacity.

    Exits with 1 if it breaks one of the laws of a layout, or is not a manifest.
    """
    from kvstow.plan.manifest import decode

    data = _content(file)
    try:
        layout = decode(data)
    except ManifestError as error:
        _report_broken(file, _violations(error), json=json)
    else:
        _report_sound(layout, json=json)


def _content(file: Path) -> bytes:
    from kvstow.plan.manifest import MAX_BYTES

    try:
        if str(file) == "-":
            return typer.get_binary_stream("stdin").read(MAX_BYTES + 1)
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        refuse(f"{_named(file)}: cannot be read: {error.strerror}", code=MISUSED)


def _named(file: Path) -> str:
    return "stdin" if str(file) == "-" else str(file)


def _violations(error: ManifestError) -> list[str]:
    """Every broken law, or the one reason why the document could not be read."""
    if isinstance(error.__cause__, LayoutError):
        return list(error.__cause__.violations)
    return [str(error)]


def _report_broken(file: Path, violations: list[str], *, json: bool) -> None:
    if json:
        emit_json({"ok": False, "violations": violations})
        raise typer.Exit(FAILED)
    emit_text("\n".join(violations))
    number = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
    refuse(f"{_named(file)}: {number}", code=FAILED)


def _report_sound(layout: "Layout", *, json: bool) -> None:
    from kvstow.plan.manifest import fingerprint

    facts: dict[str, Any] = {
        "ok": True,
        "violations": [],
        "model": layout.model,
        "fingerprint": fingerprint(layout),
    }
    if json:
        emit_json(facts)
        return
    emit_text(
        f"ok: {layout.model}, {len(layout.layers):,} layers in {len(layout.groups):,} "
        f"{'group' if len(layout.groups) == 1 else 'groups'}, {layout.num_slabs:,} slabs of "
        f"{layout.slab_bytes:,} bytes\nfingerprint {facts['fingerprint']}"
    )
