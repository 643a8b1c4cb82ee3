"""What the GPU reaches by itself: the roofs that everything else is compared with.

peaks.py FILE      measures and writes {"bandwidth": bytes/s, "matrix": FLOP/s}
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rows import Row

_COPY_BYTES = 4 << 30
_MATRIX = 8192


def median_seconds(work: Callable[[], object], repeat: int = 15, warm: int = 3) -> float:
    """Median time of ``work`` on the device, by CUDA events around each call."""
    for _ in range(warm):
        work()
    times: list[float] = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source))


def matrix_peak() -> float:
    """FLOP/s of a large bf16 product by torch (cuBLAS)."""
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _MATRIX**3 / median_seconds(lambda: torch.mm(a, b, out=out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    peaks = {"bandwidth": copy_bandwidth(), "matrix": matrix_peak()}
    options.file.write_text(json.dumps(peaks))
    section = "what this GPU reaches"
    Row(section, "copy on the device, 4 GiB", value=peaks["bandwidth"] / 1e9, unit="GB/s").emit()
    Row(section, "torch bf16 product, 8192 cubed", value=peaks["matrix"] / 1e12, unit="TFLOP/s").emit()


if __name__ == "__main__":
    main()
