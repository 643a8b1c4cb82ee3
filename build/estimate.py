"""What a build will need, known before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx

from ..engines.golden import golden_bytes
from ..engines.layout import COPIED
from ..engines.weights_file import layout_bytes
from .lower import Lowered
from .packed import CHUNK_BYTES

#: Machine code of a kernel: 228 of them, for six architectures, took 3.9 MB.
_KERNEL_BYTES = 20_000
#: A weight's line in the header of its file.
_HEADER_BYTES = 160
#: Manifest and build report.
_REPORT_BYTES = 64 << 10
#: Graph, passes and transformers' model skeleton; measured on 135M to 70B shapes.
_GRAPH_BYTES = 400 << 20
#: The source model's pass with its weights streamed; measured on 8B shapes: 150 MB.
_STREAMED_SOURCE_BYTES = 256 << 20
#: Engines with larger weights are not loaded by the build itself: its memory stays bounded for any model.
VERIFY_WEIGHTS = 1 << 30


def weight_bytes(lowered: Iterable[Lowered]) -> int:
    """Bytes of all weights on disk."""
    stored = {weight.name: layout_bytes(weight) for one in lowered for weight in one.program.weights}
    return sum(stored.values())


def disk_bytes(lowered: list[Lowered], model: onnx.ModelProto, checkpoint: Path, *, golden: bool) -> int:
    """Size of the finished engine: what goes into it is at hand, but for machine code and golden outputs.

    checkpoint: the folder that tokenizer and configs are copied from.
    """
    programs = [one.program for one in lowered]
    weights = {weight.name for program in programs for weight in program.weights}
    files = [checkpoint / name for name in COPIED]
    return (
        weight_bytes(lowered)
        + _HEADER_BYTES * len(weights)
        + int(model.ByteSize())
        + sum(len(program.to_json()) for program in programs)
        + _KERNEL_BYTES * sum(len(one.requests) for one in lowered)
        + (golden_bytes(programs[0].vocab_size, programs[0].limits) if golden else 0)
        + sum(file.stat().st_size for file in files if file.is_file())
        + _REPORT_BYTES
    )


def fits_verification(lowered: Iterable[Lowered]) -> bool:
    """Whether the build may load the engine it has written, to compare it with the source model."""
    return weight_bytes(lowered) <= VERIFY_WEIGHTS


def peak_bytes(lowered: list[Lowered], *, verify: bool) -> int:
    """The build's own memory beyond Python and its libraries.

    Packing holds a few chunks. The source model is held whole in float32 when it is small, else a few pieces
    of a matrix at a time. Verification loads the weights and the program's activations.
    """
    from ..graph.reference import WHOLE_MODEL_BYTES

    elements = {w.name: _elements(w.shape) for one in lowered for w in one.program.weights}
    whole = 4 * sum(elements.values())
    source = whole if whole <= WHOLE_MODEL_BYTES else _STREAMED_SOURCE_BYTES
    loaded = weight_bytes(lowered) + max(one.program.arena_bytes for one in lowered) if verify else 0
    return _GRAPH_BYTES + max(4 * CHUNK_BYTES, source, loaded)


def _elements(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
