"""Words of the command line: an answer, or a message and exit code 1 or 2; never a traceback."""

from contextlib import suppress
from random import Random

from typer.testing import CliRunner

from fuzzing import ODD, Reader, damaged_bytes, folder, fuzzed
from kvstow.cli import app
from kvstow.errors import PlanError, TransferError
from kvstow.plan.layout import ORDERS, parse_order
from kvstow.plan.view import parse_size
from kvstow.transfer.channel.address import check_dialled, is_loopback

FILE = folder() / "m.json"
FILE.write_text(
    '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, '
    '"num_key_value_heads": 2, "hidden_size": 64}'
)
LINES = (
    "plan MODEL --tp 2 --pp 2 --rank 1 --memory 20MiB --json",
    "plan MODEL --num-slabs 4 --block-tokens 8 --kv-dtype fp8 --order BHLNC --packing union",
    "plan MODEL --align 512 --align row=4KiB --align base=2MiB --align *.0.*=1k --memory 1.5GB",
    "route MODEL@tp=2,pp=1,order=BHLNC MODEL@tp=1,block_tokens=8,packing=union --json",
    "route MODEL@tp=2,rank=1,kv_dtype=fp8 MODEL@num_slabs=4,kv_dtype=fp8",
    "simulate MODEL --trace chat --requests 3 --rate 2 --seed 1 --memory 64MiB",
    "check /dev/null --json",
    "dash tcp://127.0.0.1:1 --listen 127.0.0.1:x",
    "20GiB",
    "1.5TiB",
    "blhnc",
    "tcp://127.0.0.1:5555",
)
PIECES = (
    *("0", "-1", "1" * 40, "1e9", "0x10", "²", "٣", "1_000", "10**18", str(10**18), str(10**27)),
    *("@", ",", "=", "tp=8,tp=4", "tp=", "=2", "@@", "rank=-1", "order=", "[", "]", "//", "%s"),
    *("PiB", "EiB", "kib", ".", "nan", "inf", "*", "[a-", "\\", "~", "~x", "/", "\0", "\udcff"),
)


def read(data: bytes) -> str:
    """The words of one command, or a single word that is read by itself."""
    named = data.replace(b"MODEL", str(FILE).encode())
    words = [word.decode("utf-8", "surrogateescape") for word in named.split(b" ")]
    if len(words) == 1:
        return read_word(words[0])
    if words[0] not in ("plan", "route", "simulate", "check") or "--html" in data.decode("latin"):
        return "refused: not run"
    result = CliRunner().invoke(app, words)
    if result.exit_code == 0:
        return "accepted"
    if result.exit_code not in (1, 2) or not isinstance(result.exception, SystemExit):
        raise AssertionError(result.output) from result.exception
    assert result.output.strip(), "an error has a message"
    return f"refused: {words[0]} {result.exit_code} | {result.stderr}"


def read_word(word: str) -> str:
    """A size, an order and an address, whichever it is."""
    fits: list[str] = []
    with suppress(PlanError):
        assert 0 < parse_size(word) < 2**63
        fits.append("size")
    with suppress(PlanError):
        assert parse_order(word) in ORDERS
        fits.append("order")
    with suppress(TransferError):
        check_dialled(word)
        fits.append("address")
    assert is_loopback(word) in (True, False)
    return "accepted" if fits else "refused: word"


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """A word made odd, dropped, doubled or exchanged; a piece put in somewhere."""
    words = data.split(b" ")
    at = random.randrange(min(1, len(words) - 1), len(words))
    match random.randrange(6):
        case 0:
            words[at] = str(random.choice(ODD)).encode("utf-8", "replace")
        case 1:
            words[at] = damaged_bytes(random, words[at], random.choice(other.split(b" ")))
        case 2:
            words.insert(at, random.choice(other.split(b" ")))
        case 3:
            del words[at]
        case _:
            piece = random.choice(PIECES).encode("utf-8", "surrogateescape")
            cut, end = sorted(random.randint(0, len(words[at])) for _ in range(2))
            words[at] = words[at][:cut] + piece + words[at][random.choice((cut, end)) :]
    return b" ".join(words) or b" "


READER = Reader(
    name="words",
    read=read,
    valid=lambda: [line.encode() for line in LINES],
    mutate=mutate,
    times=4,
)


@fuzzed(READER)
def test_odd_words_are_answered_or_refused(data):
    READER.outcome(data)
