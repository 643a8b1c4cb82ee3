"""What the machine code of a kernel uses: registers, spills, shared memory, kinds of instructions.

Read with the tools of Triton's wheel, so that no CUDA toolkit is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .job import CompileError

#: Opcodes of the matrix units by generation: the name that people know, and how the SASS spells it.
_MATRIX = {
    "wgmma": re.compile(r"[HIQB]GMMA"),
    "tcgen05": re.compile(r"UTC[A-Z]*MMA"),
    "mma": re.compile(r"[HIBDQO]MMA"),
}
#: A line of SASS: address, perhaps a predicate, then opcode with its suffixes.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\s*\n?\s*(REG:[^\n]*)")
_TIMEOUT = 120.0


def inspect(cubin: bytes, function: str) -> dict[str, Any]:
    """Registers per thread, spills, static shared memory and the instruction mix of ``function``.

    Raises CompileError when the tools cannot read the image.
    """
    with tempfile.TemporaryDirectory(prefix="castiron-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        usage = _usage(_run("cuobjdump", "--dump-resource-usage", str(file)), function)
        code = _run("nvdisasm", "--print-code", str(file))
    return {
        "registers": usage["REG"],
        "stack_bytes": usage.get("STACK", 0),
        "static_shared_bytes": usage.get("SHARED", 0),
        **instruction_mix(code),
    }


def instruction_mix(sass: str) -> dict[str, Any]:
    """Counts of a listing's instructions; ``spills`` are loads and stores of local memory."""
    counts = Counter(match.group(1) for match in _INSTRUCTION.finditer(sass))
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
        "instructions": sum(counts.values()),
        "spills": by_root["LDL"] + by_root["STL"],
        "matrix": kind,
        "matrix_instructions": matrix.get(kind, 0),
        "global_loads": sum(loads.values()) + bulk,
        "wide_loads": wide + bulk,
    }


def _total(counts: Counter[str], pattern: re.Pattern[str]) -> int:
    return sum(count for opcode, count in counts.items() if pattern.fullmatch(opcode))


def _usage(text: str, function: str) -> dict[str, int]:
    for name, line in _USAGE.findall(text):
        if name == function:
            return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    raise CompileError(f"the machine code has no function {function!r}:\n{text[:400]}")


def _run(tool: str, *arguments: str) -> str:
    from triton import knobs  # type: ignore[import-untyped]

    path = getattr(knobs.nvidia, tool).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode != 0:
        raise CompileError(f"{tool} cannot read the machine code: {done.stderr.strip()[:400]}")
    return done.stdout
