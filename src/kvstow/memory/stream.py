"""Copies that leave the cache alone: 60 instructions of x86-64, mapped once.

The C library's memcpy does this too, but only for single copies longer than most of the
last-level cache; a row of 2 MB is shorter, and goes half as fast as one big copy. What is here
is the same trick for any list of rows: non-temporal stores, four pages at a time.

    for each row:   while 16 KiB are left:    64 bytes of each of four pages, 64 times
                    while 64 bytes are left:  64 bytes

docs/decisions/0005-streaming-host-copies.md says which alternatives lost.
"""

import ctypes
import mmap
import platform
from functools import cache

import numpy as np

from kvstow.plan.view import Ints

LINE = 64
"""Destinations are multiples of this, and lengths."""

_PAGE = 4096
_READ_AND_RUN = mmap.PROT_READ | mmap.PROT_EXEC


class Streamer:
    """The routine, in memory of its own; it runs without the interpreter's lock."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory = memory
        word = ctypes.c_size_t
        self._run = ctypes.CFUNCTYPE(None, word, word, word, word)(address)

    def __call__(self, destinations: Ints, sources: Ints, lengths: Ints) -> None:
        """Copy `lengths[i]` bytes from address `sources[i]` to address `destinations[i]`."""
        arrays = [np.ascontiguousarray(a, np.int64) for a in (destinations, sources, lengths)]
        self._run(*(array.ctypes.data for array in arrays), len(lengths))


@cache
def streamer() -> Streamer | None:
    """The routine, mapped once; None where the machine is no x86-64 with Linux, or where the
    system lets nothing be mapped that is to be run."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    memory = mmap.mmap(-1, _PAGE)
    memory.write(machine_code())
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return None if protect(address, _PAGE, _READ_AND_RUN) else Streamer(memory, address)


def machine_code() -> bytes:
    """rdi, rsi, rdx: arrays of destinations, sources, lengths; rcx: how many are left."""
    four = _moved(range(0, 4 * _PAGE, _PAGE))
    four_pages = (
        bytes.fromhex("b8 00100000")  # mov eax, 4096
        + four
        + bytes.fromhex("83e8 40")  # sub eax, 64
        + _jump("0f85", -len(four) - 3)  # jnz to the first of the four
        + bytes.fromhex("4981c2 00300000 4981c1 00300000")  # add r10, 12288; add r9, 12288
        + bytes.fromhex("4981eb 00400000")  # sub r11, 16384
    )
    pages = bytes.fromhex("4981fb 00400000")  # cmp r11, 16384
    pages += _jump("0f82", len(four_pages) + 5) + four_pages  # jb past the jump below
    pages += _jump("e9", -len(pages))  # jmp to the comparison
    line = _moved([0]) + bytes.fromhex("4983eb 40")  # sub r11, 64
    lines = bytes.fromhex("4d85db")  # test r11, r11
    lines += _jump("0f84", len(line) + 5) + line  # jz past the jump below
    lines += _jump("e9", -len(lines))  # jmp to the test
    row = bytes.fromhex("4c8b0f 4c8b16 4c8b1a")  # mov r9, [rdi]; mov r10, [rsi]; mov r11, [rdx]
    row += bytes.fromhex("4883c708 4883c608 4883c208 48ffc9")  # the next of each; dec rcx
    row += pages + lines
    rows = bytes.fromhex("4885c9")  # test rcx, rcx
    rows += _jump("0f84", len(row) + 5) + row  # jz past the jump below
    rows += _jump("e9", -len(rows))  # jmp to the test
    return rows + bytes.fromhex("0faef8 c3")  # sfence; ret


def _moved(offsets: "range | list[int]") -> bytes:
    """64 bytes from r10 to r9 at each of up to four offsets; then both go 64 bytes on."""
    places = [(offset + 16 * i, 4 * n + i) for n, offset in enumerate(offsets) for i in range(4)]
    code = b"".join(b"\x41\x0f\x18\x8a" + _number(offset + 128) for offset in offsets)  # prefetcht0
    for offset, register in places:  # movdqu xmm, [r10 + offset]
        high, low = divmod(register, 8)
        code += bytes([0xF3, 0x41 | high << 2, 0x0F, 0x6F, 0x82 | low << 3]) + _number(offset)
    for offset, register in places:  # movntdq [r9 + offset], xmm
        high, low = divmod(register, 8)
        code += bytes([0x66, 0x41 | high << 2, 0x0F, 0xE7, 0x81 | low << 3]) + _number(offset)
    return code + bytes.fromhex("4983c240 4983c140")  # add r10, 64; add r9, 64


def _jump(opcode: str, distance: int) -> bytes:
    """A jump over `distance` bytes from its end; backwards, from its start."""
    code = bytes.fromhex(opcode)
    return code + _number(distance if distance >= 0 else distance - len(code) - 4)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)
