"""Fuzzing of readers: valid documents with something wrong in them, and what may come of it.

A reader gets bytes. It returns a value that keeps the laws and is written back as an equal one, or
raises the errors that it names; nothing else, in bounded memory and time. `tests/fuzz` has a file
per reader and the inputs that broke one; `scripts/fuzz` runs them for longer.
"""

import atexit
import importlib.util
import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
SHM = Path("/dev/shm")
CPU_SECONDS = 10.0
"""What reading one small document may take, of the processor's time: a hang, not a limit."""

Mutate = Callable[[Random, bytes, bytes], bytes]
"""A damaged form of the first document, perhaps with parts of the second."""


class TooLong(BaseException):
    """A reader did not come back."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """`read` returns "accepted" or "refused: kind | message"; what it raises is a failure."""

    name: str
    read: Callable[[bytes], str]
    valid: Callable[[], Sequence[bytes]]
    mutate: Mutate
    times: int = 6
    """How many times the examples of the hypothesis profile are tried."""
    memory: int = 256 << 20

    @cached_property
    def documents(self) -> list[bytes]:
        """The valid documents, and after them the corpus."""
        return [*self.valid(), *(file.read_bytes() for file in self.corpus())]

    def corpus(self) -> list[Path]:
        return sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())

    def outcome(self, data: bytes) -> str:
        """What `read` says, within bounds."""
        with bounded(self.memory):
            said = self.read(data)
        assert said == "accepted" or said.startswith("refused: "), said
        return said

    def damaged(self, random: Random, documents: Sequence[bytes]) -> bytes:
        """One to three things go wrong with a document."""
        data = random.choice(documents)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = self.mutate(random, data, random.choice(documents))
        return data

    def inputs(self) -> st.SearchStrategy[bytes]:
        return st.randoms(use_true_random=False).map(lambda r: self.damaged(r, self.documents))


def fuzzed(reader: Reader) -> Callable[[Callable[[bytes], None]], Callable[[], None]]:
    """Run a test with damaged documents of a reader."""

    def decorate(test: Callable[[bytes], None]) -> Callable[[], None]:
        examples = reader.times * settings().max_examples
        return settings(max_examples=examples)(given(reader.inputs())(test))

    return decorate


def folder() -> Path:
    """A fresh directory, in memory where that can be had; gone at the end."""
    made = Path(tempfile.mkdtemp(prefix="kvstow-fuzz-", dir=SHM if SHM.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@contextmanager
def bounded(nbytes: int) -> Generator[None]:
    """MemoryError where more than so many bytes are taken, TooLong where it does not end."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _too_long(*_: object) -> None:
    raise TooLong(f"no end within {CPU_SECONDS} seconds of the processor's time")


# ── bytes ─────────────────────────────────────────────────────────────────────────────


def damaged_bytes(random: Random, data: bytes, other: bytes) -> bytes:
    """Bits flipped, bytes cut out, put in, repeated, or taken from another document."""
    at = random.randint(0, len(data))
    size = random.choice((1, 1, 2, 4, 8, 64))
    end = min(len(data), at + size)
    match random.randrange(7):
        case 0:
            flip = 1 << random.randrange(8)
            return data[:at] + bytes(byte ^ flip for byte in data[at : at + 1]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + random.choice((b"\0", b"\xff", b"\x80", b"\x7f")) * size + data[end:]
        case 4:
            return data[:end] + data[at:]
        case 5:
            cut = random.randint(0, len(other))
            return data[:at] + other[cut : cut + size] + data[at:]
        case _:
            return data[:at] + other[random.randint(0, len(other)) :]


# ── documents ─────────────────────────────────────────────────────────────────────────

DEEP = "@deep@"
"""Stands for lists nested without end, until it is written."""
NESTED = 50_000

# fmt: off
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, -2**31, 2**31, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -2**63, 10**18, 10**27, 10**60, 1.5, -0.0, 1e-300, 1e300, float("nan"),
    float("inf"), float("-inf"), "", "0", "-1", "\0", "\ud800", "é", "x" * 600, "auto", "../x",
    "1e9", [], {}, [[]], [0], [0, 0], [[0, 1]], {"": 0}, {"kvstow": 2}, DEEP,
)
# fmt: on


def damaged_value(random: Random, value: Any, other: Any) -> Any:
    """The value with one part of it, anywhere, made odd, taken away, doubled or swapped."""
    parent, key = random.choice(_places(value) or [(None, None)])
    if parent is None:
        return random.choice(ODD)
    match random.randrange(7):
        case 0 | 1 | 2:
            parent[key] = random.choice(ODD)
        case 3 if type(parent[key]) is int:
            parent[key] += random.choice((-1, 1, parent[key], 2**32, 10**12))
        case 4 if isinstance(parent, list):
            parent.insert(random.randint(0, len(parent)), parent[key])
        case 5:
            del parent[key]
        case _:
            theirs, at = random.choice(_places(other) or [([None], 0)])
            parent[key] = theirs[at]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every part of a document, as its parent and its key there."""
    found: list[tuple[Any, Any]] = []
    for key in range(len(value)) if isinstance(value, list) else value:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def damaged_json(random: Random, data: bytes, other: bytes) -> bytes:
    """A JSON document with something wrong in its values, its keys or its bytes."""
    kind = random.randrange(10)
    if kind < 2:
        return damaged_bytes(random, data, other)
    try:
        value, theirs = json.loads(data), json.loads(other)
        assert isinstance(value, dict | list)
        text = json.dumps(damaged_value(random, value, _tree(theirs)))
    except (ValueError, RecursionError, AssertionError):
        return damaged_bytes(random, data, other)
    if kind == 2 and '":' in text:  # a key twice
        key = random.choice(text.split('":')[:-1]).rpartition('"')[2]
        text = text.replace("{", f'{{"{key}":{random.choice(("0", "[]", "null"))},', 1)
    deep = random.choice(("[" * NESTED + "]" * NESTED, '{"":' * NESTED + "0" + "}" * NESTED))
    return text.replace(f'"{DEEP}"', deep).encode()


def damaged_msgpack(random: Random, data: bytes, other: bytes) -> bytes:
    """A MessagePack document with something wrong in its values or its bytes."""
    if not random.randrange(4):
        return damaged_bytes(random, data, other)
    try:
        value, theirs = msgspec.msgpack.decode(data), msgspec.msgpack.decode(other)
        assert isinstance(value, dict | list)
        body = msgspec.msgpack.encode(damaged_value(random, value, _tree(theirs)))
    except (ValueError, RecursionError, AssertionError, OverflowError):
        return damaged_bytes(random, data, other)
    mark = msgspec.msgpack.encode(DEEP)
    return body.replace(mark, b"\x91" * NESTED + b"\x90")


def _tree(value: Any) -> Any:
    return value if isinstance(value, dict | list) else [value]


def readers() -> dict[str, Reader]:
    """Every reader that a test of its own is about, by name."""
    found: dict[str, Reader] = {}
    for file in sorted(CORPUS.parent.glob("test_*.py")):
        if file.stem != "test_readers":
            spec = importlib.util.spec_from_file_location(f"fuzz_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found[module.READER.name] = module.READER
    return found
