"""Occupancy, against numbers of NVIDIA's occupancy calculator worked out by hand."""

from __future__ import annotations

import pytest
from castiron.build.kernels.occupancy import blocks_per_multiprocessor, occupancy
from castiron.plugins.targets import TARGETS


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared", "blocks"),
    [
        ("sm_80", 32, 128, 0, 16),  # 2048 threads
        ("sm_80", 255, 256, 0, 1),  # 256 * 32 * 8 registers are all 65536
        ("sm_80", 128, 128, 0, 4),  # 65536 / (128 * 128)
        ("sm_86", 32, 128, 48 << 10, 2),  # 100 KiB / 49 KiB
        ("sm_86", 16, 32, 0, 16),  # at most 16 blocks
        ("sm_90", 64, 128, 113 << 10, 2),  # 228 KiB / 114 KiB
        ("sm_90", 168, 384, 200 << 10, 1),
        ("sm_120", 40, 256, 0, 6),  # 1536 threads
    ],
)
def test_resident_blocks(target: str, registers: int, threads: int, shared: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(TARGETS[target], registers, threads, shared) == blocks
    share = blocks * threads / TARGETS[target].threads
    assert occupancy(TARGETS[target], registers, threads, shared) == pytest.approx(share)
