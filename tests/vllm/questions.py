"""A few hundred questions with known answers that a model of 135 million parameters partly solves.

The same questions each time: sums, words to copy, facts, series to continue. Each comes after
eight examples of its kind, most prompts more than one block of a cache.
"""

import json
from pathlib import Path
from random import Random


def words(text: str) -> list[str]:
    return text.split()


def pairs(text: str) -> dict[str, str]:
    """What comes before each `-`, and after it."""
    return dict(pair.split("-") for pair in words(text))


CAPITALS = pairs(
    """France-Paris Italy-Rome Spain-Madrid Germany-Berlin Japan-Tokyo China-Beijing Russia-Moscow
    Greece-Athens Egypt-Cairo Portugal-Lisbon Austria-Vienna Poland-Warsaw Sweden-Stockholm
    Norway-Oslo Denmark-Copenhagen Finland-Helsinki Ireland-Dublin Hungary-Budapest Turkey-Ankara
    Cuba-Havana Peru-Lima Chile-Santiago Kenya-Nairobi Iran-Tehran Iraq-Baghdad Thailand-Bangkok
    Vietnam-Hanoi Canada-Ottawa Australia-Canberra Ukraine-Kyiv"""
)
OPPOSITES = pairs(
    """hot-cold big-small up-down left-right day-night fast-slow old-young rich-poor happy-sad
    open-closed hard-soft early-late full-empty wet-dry light-dark high-low long-short strong-weak
    good-bad new-old"""
)
OBJECTS = words(
    """apple river window garden silver market bridge candle forest basket planet button rocket
    pencil island camera orange winter hammer ladder mirror pocket saddle tunnel violin walnut"""
)
WEEK = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    """January February March April May June July August September October November December"""
)

Pair = tuple[str, str]
"""A question and its answer."""


def sums(draw: Random) -> list[Pair]:
    terms = [(draw.randrange(1, 30), draw.randrange(1, 30)) for _ in range(100)]
    return [(f"{a} + {b} =", str(a + b)) for a, b in terms]


def copies(draw: Random) -> list[Pair]:
    lists = [" ".join(draw.sample(OBJECTS, 3)) for _ in range(100)]
    return [(f"Repeat: {text}.", text) for text in lists]


def facts(draw: Random) -> list[Pair]:
    capitals = [(f"The capital of {land}?", city) for land, city in CAPITALS.items()]
    opposites = [(f"The opposite of {one}?", other) for one, other in OPPOSITES.items()]
    made = capitals + opposites
    return draw.sample(made, len(made))


def series(draw: Random) -> list[Pair]:
    """The next number, day or month."""
    made: list[Pair] = []
    for _ in range(40):
        first, step = draw.randrange(1, 20), draw.choice((1, 2, 5, 10))
        shown = [str(first + k * step) for k in range(5)]
        made.append((" ".join(shown[:4]), shown[4]))
    for names in (WEEK, MONTHS):
        for k in range(len(names)):
            shown = [names[(k + i) % len(names)] for i in range(4)]
            made.append((" ".join(shown[:3]), shown[3]))
    return draw.sample(made, len(made))


EXAMPLES = 8
KINDS = {"sums": sums, "copies": copies, "facts": facts, "series": series}


def questions() -> list[dict[str, str]]:
    """All of them: the kind, the prompt with its examples, and the answer."""
    made: list[dict[str, str]] = []
    for kind, make in KINDS.items():
        made_pairs = make(Random(kind))
        rest, examples = made_pairs[:-EXAMPLES], made_pairs[-EXAMPLES:]
        shown = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in examples)
        made += [
            {"kind": kind, "prompt": f"{shown}Question: {question}\nAnswer:", "answer": answer}
            for question, answer in rest
        ]
    return made


def write(path: Path) -> Path:
    """One line of JSON each."""
    path.write_text("".join(json.dumps(each) + "\n" for each in questions()))
    return path
