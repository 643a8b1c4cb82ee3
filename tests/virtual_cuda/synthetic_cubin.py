"""Cubins (and PTX) without machine code: what a driver reads of one to load and launch it.

Tests of whole models on the virtual device run kernels in the interpreter and need no compiler for that: with
these in place of compiled kernels fifty model families build in a minute.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_MACHINE_CUDA = 190
_PROGBITS, _STRTAB, _CUDA_INFO = 1, 3, 0x70000000
_ACCELERATED = 0x800  # the "a" of sm_90a in flags of ABI 7


def synthetic_cubin(
    function: str, param_sizes: Sequence[int], compute_capability: int, threads: int, tag: str
) -> bytes:
    """A cubin (ELF, ABI 7) with one kernel.

    Args:
        param_sizes: bytes of each parameter, naturally aligned.
        threads: of a block, as .reqntid would fix them.
        tag: makes the image its own, as machine code would.
    """
    info = b""
    offset = 0
    for ordinal, size in enumerate(param_sizes):
        offset = -(-offset // size) * size
        info += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, size << 18)  # EIATTR_KPARAM_INFO
        offset += size
    info += struct.pack("<BBH", 3, 0x19, offset)  # EIATTR_CBANK_PARAM_SIZE
    info += struct.pack("<BBHIII", 4, 0x10, 12, threads, 1, 1)  # EIATTR_REQNTID
    sections = [
        ("", 0, b""),
        (f".nv.info.{function}", _CUDA_INFO, info),
        (f".text.{function}", _PROGBITS, tag.encode()),
    ]
    names = b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", _STRTAB, names))

    body, headers = b"", b""
    for name, kind, content in sections:
        place = 64 + len(body)
        start = names.index(name.encode() + b"\0")
        headers += struct.pack("<IIQQQQIIQQ", start, kind, 0, 0, place, len(content), 0, 0, 4, 0)
        body += content + b"\0" * (-len(content) % 8)
    flags = compute_capability | compute_capability << 16 | (_ACCELERATED if compute_capability >= 90 else 0)
    identity = b"\x7fELF" + bytes([2, 1, 1, 0x33, 7]) + b"\0" * 7
    table = 64 + len(body)
    header = struct.pack(
        "<HHIQQQIHHHHHH",
        2,
        _MACHINE_CUDA,
        1,
        0,
        0,
        table,
        flags,
        64,
        0,
        0,
        64,
        len(sections),
        len(sections) - 1,
    )
    return identity + header + body + headers


def synthetic_ptx(
    function: str, param_sizes: Sequence[int], compute_capability: int, threads: int, tag: str
) -> bytes:
    """PTX of ISA 8.0 with one kernel that does nothing; arguments as for ``synthetic_cubin``."""
    params = ", ".join(f".param .u{8 * size} p{index}" for index, size in enumerate(param_sizes))
    comment = "".join(f"// {line}\n" for line in tag.splitlines())
    return (
        f".version 8.0\n.target sm_{compute_capability}\n.address_size 64\n{comment}"
        f".visible .entry {function}({params}) .reqntid {threads} {{ ret; }}\n"
    ).encode()
