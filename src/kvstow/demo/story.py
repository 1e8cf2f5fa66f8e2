"""The steps of a demo, in order."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstow.child import Child, Say
from kvstow.demo.report import DemoPrompt, DemoReport
from kvstow.plan.layout import Order
from kvstow.plan.manifest import decode as read_manifest

_LOG = """\
Watch log of the lighthouse at Grey Point, third week of March.
Monday: wind from the north west, force five, rising. The supply boat turned back at the bar and
will try again with the morning tide. Lamp cleaned, two mantles replaced, oil down to nine drums.
Tuesday: fog from before dawn. Horn sounded every ninety seconds for eleven hours. A trawler
answered at noon, asked for a bearing, and was given one hundred and ten degrees. Nobody slept.
Wednesday: the fog lifted at four in the morning. The supply boat came in at seven with flour,
lamp oil, letters, and a cat that the harbour master says is a better sailor than he is. The cat
was named Admiral. Oil now at twenty one drums. The generator runs, the spare one does not.
Thursday: clear and cold. Painted the north rail. Admiral caught a rat as large as himself and
brought it up all one hundred and forty steps to the lantern room to be praised.
Friday: a coaster, the Ellen Mary, lost her rudder two miles out. Signalled the lifeboat station
by lamp at six in the evening; they had her in tow by eight. No one was hurt. The master sent a
bottle of rum and a sack of coal by the pilot boat with his thanks.
Saturday: rain. Letters written. The spare generator was taken apart on the kitchen table, and a
mouse nest was found where the fuel filter should have been. Admiral was informed.
Sunday: calm sea, slow swell from the west. Inspection by the district engineer, who found the
lamp in order, the log in order, and the cat asleep in the chart drawer, which is not in order.
"""

PROMPTS: tuple[str, ...] = (
    "What is the capital of France? DemoAnswer in one sentence.",
    f"{_LOG}\nWhat was the name of the cat, and what did it catch on Thursday?",
    f"{_LOG}\nWhich ship lost her rudder, and how was she helped?",
    "Write a haiku about a lighthouse in winter.",
    "Explain in two sentences why a bicycle stays upright when it moves.",
)
"""The second and the third share all but their last line."""


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""One thread for each process, no downloads."""


def run(
    say: Say,
    *,
    model: str,
    prompts: Sequence[str],
    new_tokens: int,
    block_tokens: int,
    block_tokens_decode: int,
    order: Order,
    order_decode: Order,
    memory: int,
    offload: Path | None,
    kill_prefill: bool,
) -> DemoReport:
    """Run the whole demo; `say` gets a line whenever something has happened.

    Every process that was started has ended when this returns or raises.
    """
    began = time.monotonic()
    rows: dict[str, Any] = {"model": model, "order": order, "block_tokens": block_tokens}
    rows |= {"memory": memory, "store": offload}
    other_rows = {"order": order_decode, "block_tokens": block_tokens_decode, "store": None}
    with ExitStack() as children:
        single, prefill, decode = (
            children.enter_context(_child(name, say)) for name in ("single", "prefill", "decode")
        )
        # The reference loads first: it may have to unpack the weights.
        name, tokens = single.call("load", model=model, texts=prompts)
        states = [DemoPrompt(*each) for each in zip(prompts, tokens, strict=True)]
        prefill.send("load_rows", **rows)
        decode.send("load_rows", **rows | other_rows)
        layouts = [read_manifest(child.result()) for child in (prefill, decode)]
        for number, prompt in enumerate(states, 1):
            say(f"prompt {number} of {len(states)}: {len(prompt.tokens)} tokens")
            kills = kill_prefill and prompt is states[-1]
            _hand_over(prompt, new_tokens, single, prefill, decode, kills=kills)
        if offload is not None:
            again = children.enter_context(_child("again", say))
            again.call("load_rows", **rows)
            for prompt in states:
                answer = again.call("answer", tokens=prompt.tokens, limit=new_tokens)
                if answer.found_tokens:
                    prompt.answers["reloaded"] = answer
    return DemoReport(model=name, layouts=layouts, prompts=states, seconds=time.monotonic() - began)


def _child(name: str, say: Say) -> Child:
    return Child(name, "kvstow.demo.engine:DemoEngine", say=say, environment=ENVIRONMENT)


def _hand_over(
    prompt: DemoPrompt, limit: int, single: Child, prefill: Child, decode: Child, *, kills: bool
) -> None:
    """Prefill, hand over, decode; the reference answers meanwhile."""
    ticket, first = prefill.call("prefill", tokens=prompt.tokens)
    if kills:
        prefill.kill()
    single.send("answer", tokens=prompt.tokens, limit=limit)
    prompt.answers["transferred"] = decode.call(
        "decode", tokens=prompt.tokens, first=first, ticket=ticket, limit=limit
    )
    prompt.answers["recomputed"] = single.result()
    if not kills:
        prefill.call("finish")
