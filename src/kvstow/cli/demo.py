"""`kvstow demo`: prefill in one process, pull over NIXL, decode in another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstow.cli import options
from kvstow.cli.output import INTERRUPTED, refuse, reporting
from kvstow.plan.layout import Order

if TYPE_CHECKING:
    from kvstow.demo.report import DemoReport

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
    int, options.size_option(help="Memory for each side's rows.", show_default="256MiB")
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


@reporting
def demo(
    model: Model = "smollm2",
    prompt: Prompts = None,
    new_tokens: NewTokens = 24,
    block_tokens: BlockTokens = 16,
    block_tokens_decode: BlockTokensDecode = None,
    order: options.OrderName = "BLHNC",
    order_decode: OrderDecode = None,
    memory: Memory = 256 << 20,
    offload: Offload = None,
    kill_prefill: KillPrefill = False,
) -> "DemoReport":
    """Prefill in one process, decode in another, compare answers.

    Answers are compared token by token with those of a single process.
    Exits with 1 if any token differs.
    """
    from kvstow.demo.story import PROMPTS, run
    from kvstow.demo.weights import check_model

    check_model(model)
    if prompt is not None and not all(prompt):
        refuse("--prompt is empty\n\nhint: write a prompt")
    try:
        return run(
            lambda text: typer.echo(text, err=True),
            model=model,
            prompts=prompt or PROMPTS,
            new_tokens=new_tokens,
            block_tokens=block_tokens,
            block_tokens_decode=block_tokens_decode or block_tokens,
            order=order,
            order_decode=order_decode or order,
            memory=memory,
            offload=offload,
            kill_prefill=kill_prefill,
        )
    except KeyboardInterrupt:
        typer.echo("interrupted: all processes of the demo have ended", err=True)
        raise typer.Exit(INTERRUPTED) from None
