"""What an engine can be built for, and the facts of each GPU architecture that tactics choose by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Family = Literal["host", "cuda"]


@dataclass(frozen=True)
class Target:
    """A target by the name that users give.

    Attributes:
        name: "host", "sm_90", "compute_80", ...
        family: which runtime device executes it, and which tactics are considered.
        compute_capability: ten times major plus minor; 0 on host.
        ptx_only: no machine code, only PTX that drivers compile for architectures to come.
        shared_bytes: most shared memory of one block.
        multiprocessors, bandwidth, matrix_flops: of the best-known part of the architecture, for cost
            estimates: count, bytes/s, dense half-precision FLOP/s (NVIDIA's data sheets).
        registers: 32-bit registers of a multiprocessor. threads, blocks: the most that one holds.
    """

    name: str
    family: Family
    compute_capability: int = 0
    ptx_only: bool = False
    shared_bytes: int = 0
    multiprocessors: int = 0
    bandwidth: float = 30e9
    matrix_flops: float = 1.5e11
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32


def _gpu(
    name: str, shared_kib: int, sms: int, bandwidth: float, flops: float, threads: int, blocks: int
) -> Target:
    return Target(
        name=name,
        family="cuda",
        compute_capability=int(name.split("_")[1]),
        ptx_only=name.startswith("compute"),
        shared_bytes=shared_kib << 10,
        multiprocessors=sms,
        bandwidth=bandwidth,
        matrix_flops=flops,
        threads=threads,
        blocks=blocks,
    )


#: Shared memory, threads, blocks: CUDA C++ programming guide, "Technical specifications per compute
#: capability".
#: The part that figures describe stands behind each line.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("host", "host"),
        _gpu("sm_80", 163, 108, 2.0e12, 312e12, 2048, 32),  # A100 80 GB
        _gpu("sm_86", 99, 84, 0.77e12, 160e12, 1536, 16),  # A40 / RTX 3090 class
        _gpu("sm_89", 99, 142, 0.86e12, 362e12, 1536, 24),  # L40S
        _gpu("sm_90", 227, 132, 4.8e12, 989e12, 2048, 32),  # H200
        _gpu("sm_100", 227, 148, 8.0e12, 2250e12, 2048, 32),  # B200
        _gpu("sm_120", 99, 188, 1.79e12, 500e12, 1536, 24),  # RTX PRO 6000 Blackwell
        _gpu("compute_80", 99, 108, 1.0e12, 160e12, 1536, 16),  # anything from sm_80 on
    )
}
