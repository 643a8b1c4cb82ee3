"""What the machine code of a kernel uses: registers, spills, shared memory, kinds of instructions.

Read with the tools of Triton's wheel, so that no CUDA toolkit is needed.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .job import CompileError
from .occupancy import RESERVED_SHARED

#: Opcodes of the matrix units by generation: the name that people know, and how the SASS spells it.
_MATRIX = {
    "wgmma": re.compile(r"[HIQB]GMMA"),
    "tcgen05": re.compile(r"UTC[A-Z]*MMA"),
    "mma": re.compile(r"[HIBDQO]MMA"),
}
#: A line of SASS: address, perhaps a predicate, then opcode with its suffixes.
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\s*\n?\s*(REG:[^\n]*)")
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_TIMEOUT = 300.0


def usage(cubin: bytes, function: str, compute_capability: int) -> dict[str, int]:
    """Registers per thread, stack and static shared memory of ``function``.

    Raises CompileError when the image has no such function.
    """
    with tempfile.TemporaryDirectory(prefix="castiron-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        text = _run("cuobjdump", "--dump-resource-usage", str(file))
    for name, line in _USAGE.findall(text):
        if name == function:
            found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            # From sm_90 on the tool counts what the driver reserves for itself: no part of the limit.
            reserved = RESERVED_SHARED if compute_capability >= 90 else 0
            return {
                "registers": found["REG"],
                "stack_bytes": found.get("STACK", 0),
                "static_shared_bytes": max(0, found.get("SHARED", 0) - reserved),
            }
    raise CompileError(f"the machine code has no function {function!r}:\n{text[:400]}")


def instruction_mixes(kernels: Sequence[tuple[bytes, str]], compute_capability: int) -> list[dict[str, Any]]:
    """Counts of the instructions of (cubin, function) pairs of one architecture (``instruction_mix``).

    All in one run: the disassembler takes half a second to start, longer than most kernels to compile.
    """
    codes = [code_of(cubin, function) for cubin, function in kernels]
    suffix = "a" if compute_capability >= 90 else ""
    with tempfile.TemporaryDirectory(prefix="castiron-sass-") as folder:
        file = Path(folder, "kernels.bin")
        file.write_bytes(b"".join(codes))
        listing = _run("nvdisasm", "--no-dataflow", "--binary", f"SM{compute_capability}{suffix}", str(file))
    opcodes = [(int(match.group(1), 16), match.group(2)) for match in _INSTRUCTION.finditer(listing)]
    mixes, start, at = [], 0, 0
    for code in codes:
        first, start = at, start + len(code)
        while at < len(opcodes) and opcodes[at][0] < start:
            at += 1
        mixes.append(instruction_mix([opcode for _, opcode in opcodes[first:at]]))
    return mixes


def code_of(cubin: bytes, function: str) -> bytes:
    """The instructions of a function: the section .text.NAME of an ELF image."""
    header = _ELF_HEADER.unpack_from(cubin)
    table, size, count, names_at = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(cubin, table + i * size) for i in range(count)]
    names = sections[names_at][4]
    for section in sections:
        start = names + section[0]
        if cubin[start : cubin.index(b"\0", start)].decode() == f".text.{function}":
            return cubin[section[4] : section[4] + section[5]]
    raise CompileError(f"the machine code has no section .text.{function}")


def instruction_mix(opcodes: Sequence[str]) -> dict[str, Any]:
    """Counts by kind; ``spills`` are loads and stores of local memory."""
    counts = Counter(opcodes)
    by_root: Counter[str] = Counter()
    for opcode, count in counts.items():
        by_root[opcode.split(".")[0]] += count
    matrix = {name: _total(by_root, pattern) for name, pattern in _MATRIX.items()}
    kind = next((name for name, count in matrix.items() if count), "")
    # Bulk copies of the tensor memory accelerator move whole tiles: they count as wide.
    bulk = by_root["UTMALDG"] + by_root["UBLKCP"]
    loads = {op: n for op, n in counts.items() if op.split(".")[0] in ("LDG", "LDGSTS")}
    wide = sum(n for op, n in loads.items() if "128" in op.split(".") or "256" in op.split("."))
    return {
        "instructions": sum(counts.values()) - by_root["NOP"],
        "spills": by_root["LDL"] + by_root["STL"],
        "matrix": kind,
        "matrix_instructions": matrix.get(kind, 0),
        "global_loads": sum(loads.values()) + bulk,
        "wide_loads": wide + bulk,
    }


def _total(counts: Counter[str], pattern: re.Pattern[str]) -> int:
    return sum(count for opcode, count in counts.items() if pattern.fullmatch(opcode))


def _run(tool: str, *arguments: str) -> str:
    from triton import knobs  # type: ignore[import-untyped]

    path = getattr(knobs.nvidia, tool).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode != 0:
        raise CompileError(f"{tool} cannot read the machine code: {done.stderr.strip()[:400]}")
    return done.stdout
