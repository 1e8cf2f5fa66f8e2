"""`kvstow check`: a manifest against the laws."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli.options import read_manifest
from kvstow.cli.output import reporting
from kvstow.errors import LayoutError, ManifestError
from kvstow.plan.layout import Layout
from kvstow.text import plural

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A manifest; - reads stdin.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The layout of a manifest that keeps the laws, or every law that it breaks."""

    name: str
    layout: Layout | None
    violations: tuple[str, ...] = ()

    @property
    def failure(self) -> str | None:
        number = plural(len(self.violations), "violation")
        return f"{self.name}: {number}" if self.violations else None

    def as_json(self) -> dict[str, Any]:
        from kvstow.plan.manifest import fingerprint

        document = {"ok": self.layout is not None, "violations": list(self.violations)}
        if self.layout is None:
            return document
        return document | {"model": self.layout.model, "fingerprint": fingerprint(self.layout)}

    def __str__(self) -> str:
        layout = self.layout
        if layout is None:
            return "\n".join(self.violations)
        return (
            f"ok: {layout.model}, {plural(len(layout.layers), 'layer')} in "
            f"{plural(len(layout.groups), 'group')}, {plural(layout.num_slabs, 'slab')} of "
            f"{layout.slab_bytes:,} bytes\nfingerprint {self.as_json()['fingerprint']}"
        )


@reporting
def check(file: File) -> CheckReport:
    """Check a manifest: bounds, overlaps, alignment, capacity.

    Exits with 1 if it breaks one of the laws of a layout, or is not a manifest.
    """
    from kvstow.plan.manifest import decode

    name = "stdin" if str(file) == "-" else str(file)
    try:
        return CheckReport(name, decode(read_manifest(file)))
    except ManifestError as error:
        broken = error.__cause__
        return CheckReport(
            name, None, broken.violations if isinstance(broken, LayoutError) else (str(error),)
        )
