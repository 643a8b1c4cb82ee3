"""How many blocks of a kernel a multiprocessor can hold at once."""

from __future__ import annotations

from ...plugins.targets import Target

#: Registers are given out by warp in units of 256 (CUDA occupancy calculator, all architectures since 7.0).
_REGISTER_UNIT = 256
_WARP = 32
#: Shared memory that the driver takes from each block.
RESERVED_SHARED = 1024


def blocks_per_multiprocessor(target: Target, registers: int, threads: int, shared_bytes: int) -> int:
    """Resident blocks, by registers, threads, shared memory and the architecture's own bound."""
    warps = -(-threads // _WARP)
    warp_registers = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    bounds = [
        target.blocks,
        target.threads // (warps * _WARP),
        target.registers // (max(1, warp_registers) * warps),
        (target.shared_bytes + RESERVED_SHARED) // (shared_bytes + RESERVED_SHARED),
    ]
    return min(bounds)


def occupancy(target: Target, registers: int, threads: int, shared_bytes: int) -> float:
    """Resident threads as a share of the most that a multiprocessor can hold."""
    blocks = blocks_per_multiprocessor(target, registers, threads, shared_bytes)
    return blocks * -(-threads // _WARP) * _WARP / target.threads
