"""Stored codes and scales, against a slow element-by-element reading of the layouts in engines/program.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from castiron.build import packing_quantized
from castiron.build.packed import Packed
from castiron.build.packing_quantized import CodeSource, ColumnSource, ScaleSource
from castiron.engines.weights_file import stored_shape
from castiron.graph.weights.exprs import Cast, Constant
from castiron.graph.weights.parts import QuantizedParts
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.errors import BuildError

RANGES = {"int8": (-128, 128), "int4": (-8, 8), "fp8": (0, 256), "fp4": (0, 16)}


def stored(source: Packed) -> npt.NDArray[np.uint8]:
    data = b"".join(bytes(chunk) for chunk in source.chunks())
    assert len(data) == source.nbytes
    assert source.nbytes % 64 == 0
    return np.frombuffer(data, np.uint8)


def parts_of(format: str, rows: int, inputs: int, seed: int, group: int = 0) -> QuantizedParts:
    rng = np.random.default_rng(seed)
    dtype = np.int8 if format.startswith("int") else np.uint8
    codes = rng.integers(*RANGES[format], (rows, inputs)).astype(dtype)
    groups = -(-inputs // group) if group else 1
    scale = rng.uniform(0.1, 1, (rows, groups)).astype(np.float32)
    return QuantizedParts(format, group, Constant("c", codes), Constant("s", scale))


def code_at(data: npt.NDArray[np.uint8], source: Packed, n: int, k: int) -> int:
    """The byte, or half byte, of output n and input k, counted out from the layout's definition."""
    quads = -(-source.shape[1] // 4)
    if source.layout == "plain":
        return int(data[n * source.shape[1] + k])
    if source.layout == "words":
        run = 32 if source.dtype == "i4" else 16
        third, word, pair = k % run // (run // 4), k % run % (run // 4) // 2, k % 2
        half = 4 * pair + third
        byte = data[(n * -(-source.shape[1] // run) + k // run) * (run // 2) + 4 * word + half // 2]
        return int(byte >> 4 if half % 2 else byte & 15)
    start = (n // 16 * quads + k // 4) * (64 if source.layout == "panel16x4" else 32)
    if source.layout == "panel16x4":
        return int(data[start + n % 16 * 4 + k % 4])
    byte = data[start + n % 8 * 4 + k % 4]
    return int(byte >> 4 if n % 16 >= 8 else byte & 15)


def expected_code(parts: QuantizedParts, n: int, k: int) -> int:
    code = int(parts.codes.whole()[n, k])
    return code + 8 if parts.format == "int4" else code % 256


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 37),
    format=st.sampled_from(sorted(RANGES)),
    panels=st.booleans(),
)
def test_every_code_is_where_the_kernel_looks(rows: int, inputs: int, format: str, panels: bool) -> None:
    parts = parts_of(format, rows, inputs, rows * 37 + inputs)
    source = CodeSource("w", [parts], panels=panels)
    data = stored(source)
    for n in range(rows):
        for k in range(inputs):
            assert code_at(data, source, n, k) == expected_code(parts, n, k)
    if panels:
        zero = 8 if format == "int4" else 0
        padded = [(n, k) for n in range(-(-rows // 16) * 16) for k in range(-(-inputs // 4) * 4)]
        beyond = [(n, k) for n, k in padded if n >= rows or k >= inputs]
        assert all(code_at(data, source, n, k) == zero for n, k in beyond)


@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_gate_and_up_lie_as_their_kernels_expect(
    format: str, panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_quantized, "CHUNK_BYTES", 4096)
    gate, up = parts_of(format, 40, 24, 1, group=8), parts_of(format, 40, 24, 2, group=8)
    codes = CodeSource("gu", [gate, up], panels=panels)
    scales = ScaleSource("gu.scales", [gate.scale, up.scale], panels=panels)
    assert codes.shape == ((96, 24) if panels else (80, 24))
    data = stored(codes)
    values = stored(scales).view(np.float32)
    for which, parts in enumerate((gate, up)):
        for n in range(40):
            row = n // 16 * 32 + which * 16 + n % 16 if panels else which * 40 + n
            assert all(code_at(data, codes, row, k) == expected_code(parts, n, k) for k in range(24))
            for g in range(3):
                at = (row // 16 * 3 + g) * 16 + row % 16 if panels else row * 3 + g
                assert values[at] == parts.scale.whole()[n, g]


def test_scales_that_the_checkpoint_holds_as_float16_stay_so() -> None:
    half = np.random.default_rng(3).uniform(0.1, 1, (17, 3)).astype(np.float16)
    source = ScaleSource("s", [Cast(Constant("s", half), np.dtype(np.float32))], panels=True)
    assert source.dtype == "f16"
    kept = stored(source)[: 2 * np.prod(stored_shape(source.weight))].view(np.float16).reshape(2, 3, 16)
    np.testing.assert_array_equal(kept.transpose(0, 2, 1).reshape(32, 3)[:17], half)
    assert ScaleSource("s", [Constant("s", half.astype(np.float32))], panels=True).dtype == "f32"


def test_a_scale_that_is_not_finite_is_refused_by_name() -> None:
    bad = np.ones((4, 2), np.float32)
    bad[2, 1] = np.inf
    with pytest.raises(BuildError, match=r"'layer\.scales': a scale is NaN or infinite"):
        stored(ScaleSource("layer.scales", [Constant("s", bad)], panels=True))


def test_the_order_of_columns_is_stored_as_it_is() -> None:
    order = np.random.default_rng(0).permutation(37)
    source = ColumnSource("w.columns", order)
    assert source.shape == (37,)
    np.testing.assert_array_equal(stored(source).view(np.int32)[:37], order)
