"""What a demo is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from kvstow.plan.layout import Order

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
    "What is the capital of France? Answer in one sentence.",
    f"{_LOG}\nWhat was the name of the cat, and what did it catch on Thursday?",
    f"{_LOG}\nWhich ship lost her rudder, and how was she helped?",
    "Write a haiku about a lighthouse in winter.",
    "Explain in two sentences why a bicycle stays upright when it moves.",
)
"""The second and the third share all but their last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """A demo: the model, both sides' ranks and layouts, what else to show."""

    model: str = "smollm2"
    prompts: tuple[str, ...]
    new_tokens: int = 24
    tp_prefill: int = 1
    tp_decode: int = 1
    block_tokens: int = 16
    block_tokens_decode: int = 16
    order: Order = "BLHNC"
    order_decode: Order = "BLHNC"
    memory: int = 256 << 20
    offload: Path | None = None
    kill_prefill: bool = False
