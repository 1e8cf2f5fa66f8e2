"""`kvstow demo`: prefill in one process, pull over NIXL, decode in another."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, INTERRUPTED, MISUSED, Json, refuse
from kvstow.errors import BackendMissing
from kvstow.plan.layout import Order

USUAL_MEMORY = 256 << 20

Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="smollm2, gemma3-270m, a checkpoint directory, or random:FAMILY (random:falcon_h1).",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A prompt; repeatable.", show_default="five prompts"),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
BlockTokensDecode = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens per block where answers are decoded.", show_default="as --block-tokens"
    ),
]
OrderDecode = Annotated[
    Order | None,
    typer.Option(
        parser=options.order,
        metavar="ORDER",
        help="Axes where answers are decoded.",
        show_default="as --order",
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        parser=options.size,
        metavar="SIZE",
        help="Memory for each side's rows.",
        show_default="256MiB",
    ),
]
Offload = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Store rows in DIR, and answer again from them in a fresh process.",
        show_default=False,
    ),
]
KillPrefill = Annotated[
    bool,
    typer.Option("--kill-prefill", help="Kill the prefill process while a ticket is in flight."),
]


def demo(
    model: Model = "smollm2",
    prompt: Prompts = None,
    new_tokens: NewTokens = 24,
    block_tokens: BlockTokens = 16,
    block_tokens_decode: BlockTokensDecode = None,
    order: options.OrderName = "BLHNC",
    order_decode: OrderDecode = None,
    memory: Memory = None,
    offload: Offload = None,
    kill_prefill: KillPrefill = False,
    json: Json = False,
) -> None:
    """Prefill here, decode there, compare the answers.

    Answers are compared token by token with those of a single process.
    Exits with 1 if any token differs.
    """
    from rich.console import Console

    _check_model(model)
    _check_installed(model)
    from kvstow.demo.screen import Screen
    from kvstow.demo.story import PROMPTS, DemoOptions, run

    if prompt is not None and not all(prompt):
        refuse("--prompt is empty\n\nhint: ask something", code=MISUSED)
    settings = DemoOptions(
        model=model,
        prompts=tuple(prompt or PROMPTS),
        new_tokens=new_tokens,
        block_tokens=block_tokens,
        block_tokens_decode=block_tokens_decode or block_tokens,
        order=order,
        order_decode=order_decode or order,
        memory=memory or USUAL_MEMORY,
        offload=offload,
        kill_prefill=kill_prefill,
    )
    try:
        with Screen(Console(stderr=json)) as screen:
            show = run(settings, screen.draw)
            if not json:
                screen.finish(show)
    except KeyboardInterrupt:
        typer.echo("interrupted: all processes of the demo have ended", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json:
        typer.echo(json_format.dumps(show.report(), indent=2))
    if not show.identical:
        raise typer.Exit(FAILED)


def _check_model(model: str) -> None:
    """Ends with 2 on a model that is none, before any process is started."""
    from kvstow.demo.packaged import PACKAGED

    kind, _, family = model.partition(":")
    if kind == "random":
        from kvstow.testing.tiny_models import FAMILIES

        if family not in FAMILIES:
            refuse(
                f"no family {family!r} of random models\n\n"
                f"hint: random: and one of {', '.join(FAMILIES)}",
                code=MISUSED,
            )
    elif model not in PACKAGED and not Path(model).is_dir():
        refuse(
            f"no model {model!r}\n\nhint: {', '.join(PACKAGED)}, the directory of a "
            "checkpoint, or random:FAMILY such as random:falcon_h1",
            code=MISUSED,
        )


def _check_installed(model: str) -> None:
    """Raises what one of the demo's processes would raise for want of a package, before they
    start."""
    from importlib.util import find_spec

    from kvstow.demo.packaged import PACKAGED

    for module in ("torch", "transformers", "safetensors"):
        if find_spec(module) is None:
            raise BackendMissing(module, "demo")
    if model in PACKAGED and not PACKAGED[model].is_unpacked():
        PACKAGED[model].paths()
