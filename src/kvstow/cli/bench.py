"""`kvstow bench`: transfers on this machine."""

import logging
import os
from typing import Annotated, Any, Literal

import typer

from kvstow.cli.output import (
    INTERRUPTED,
    Answer,
    CommandGroup,
    refuse,
    reporting,
    say,
    wrapped,
)
from kvstow.text import human, table

bench = typer.Typer(cls=CommandGroup, help="Measure transfers on this machine.")

Rows = Annotated[int, typer.Option(min=1, help="Rows of one request.")]
Layers = Annotated[
    int, typer.Option(min=1, max=4096, help="Layers, each with 16 KiB of K and of V.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; the best counts.")]
Tcp = Annotated[bool, typer.Option("--tcp", help="Use TCP on loopback, as between hosts.")]
Device = Annotated[str, typer.Option(help="Where the arenas are: cpu, cuda:0 …")]
Way = Annotated[
    Literal["read", "write", "slots"] | None,
    typer.Option(help="Force a direction; without it, the fastest is measured."),
]


@bench.command("transfer")
@reporting
def transfer(
    rows: Rows = 512,
    layers: Layers = 46,
    repeats: Repeats = 5,
    tcp: Tcp = False,
    device: Device = "cpu",
    direction: Way = None,
) -> Answer:
    """Pull scattered rows between two processes, mapped or over NIXL.

    Compares with a plain copy, and with one contiguous buffer and per-layer pieces through NIXL
    alone, all in the same run.
    """
    if tcp:  # has to be there before NIXL is loaded, here and in the other process
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    _check_device(device)
    from kvstow.testing.bench_transfer import Setting, measure_transfer

    setting = Setting(rows=rows, layers=layers, repeats=repeats, device=device)
    say(
        f"moving {human(setting.nbytes)} between two processes, {1 + repeats} rounds of "
        f"{len(NAMES)} ways"
    )
    logging.getLogger("kvstow").setLevel(logging.ERROR)  # whose bytes these are does not matter
    try:
        figures = measure_transfer(
            setting, direction, lambda i: say(f"round {i + 1} of {1 + repeats}")
        )
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        os._exit(INTERRUPTED)  # NIXL may crash if it is unloaded in the middle of a transfer
    return Answer(figures, _text(figures))


def _check_device(device: str) -> None:
    """Ends with 2 on a device that this machine does not have."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        refuse(f"--device {device}: {why}\n\nhint: cpu is always there")


NAMES = {
    "plain copy": "as many bytes copied inside one process",
    "raw": "one contiguous buffer, NIXL alone",
    "contiguous": "rows in order, pulled",
    "rows": "rows scattered, pulled",
    "sampled": "rows scattered, pulled, digest sampled",
    "by NIXL": "rows scattered, pulled by NIXL",
    "prepared": "pieces of 16 KiB picked from lists, NIXL alone",
    "built": "pieces of 16 KiB listed per request, NIXL alone",
    "prepared by threads": "pieces picked from lists, NIXL alone with threads",
}
"""What is measured; pieces by threads of NIXL's on the host only."""


def _text(figures: dict[str, Any]) -> str:
    """Rates of this machine, and what kvstow adds to them."""
    rates, descriptors = figures["gigabytes_per_second"], figures["descriptors"]
    lines = [
        (text, f"{descriptors[name]:,}", f"{rates[name]:.2f}")
        for name, text in NAMES.items()
        if name in rates
    ]
    columns = (f"way: {figures['direction']}", "descriptors", "GB/s")
    threads = figures["ratio_to_per_layer_by_threads"]
    beside = f", {threads:.2f} times with NIXL's threads" if threads else ""
    ratios = wrapped(
        f"scattered rows: {figures['ratio_to_raw']:.2f} of one buffer's rate, "
        f"{figures['ratio_to_per_layer']:.2f} times the pieces', "
        f"{figures['ratio_to_per_layer_built']:.2f} times where they are listed per "
        f"request{beside}"
    )
    return (
        f"{figures['machine']}\n\n"
        f"{table(columns, lines)}\n\n"
        f"{ratios}\n"
        f"{figures['overhead_us_per_pull']:,.0f} µs of its own per pull; the digest's sample "
        f"took {100 * figures['digest_sample_cost']:.1f} % (medians)\n"
        f"{figures['contact_ms']:.1f} ms at first contact"
    )
