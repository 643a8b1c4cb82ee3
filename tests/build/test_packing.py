"""Stored bytes, against a slow element-by-element reading of the layouts in engines/program.py."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from castiron.build import packing
from castiron.build.packing import PackedSource
from castiron.engines.program import WeightDType
from castiron.graph.weights.exprs import Cast, Constant, WeightExpr
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.errors import BuildError

BF16 = np.dtype(ml_dtypes.bfloat16)


def stored(source: PackedSource) -> npt.NDArray[np.uint8]:
    data = b"".join(bytes(chunk) for chunk in source.chunks())
    assert len(data) == source.nbytes
    assert source.nbytes % 64 == 0
    return np.frombuffer(data, np.uint8)


def numbers(source: PackedSource) -> npt.NDArray[np.float32]:
    dtype = np.dtype(np.float32) if source.dtype == "f32" else BF16
    return stored(source).view(dtype).reshape(source.stored_shape).astype(np.float32)


def torch_rounded(matrix: npt.NDArray[np.float32], dtype: WeightDType) -> npt.NDArray[np.float32]:
    if dtype == "f32":
        return matrix
    return torch.from_numpy(matrix).to(torch.bfloat16).float().numpy()


def matrix_of(rows: int, inputs: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 4096)


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 70), inputs=st.integers(1, 40), bf16=st.booleans(), source16=st.booleans())
def test_every_panel_element_is_where_the_kernel_looks(
    rows: int, inputs: int, bf16: bool, source16: bool
) -> None:
    dtype: WeightDType = "bf16" if bf16 else "f32"
    matrix = matrix_of(rows, inputs, rows * 41 + inputs)
    if source16:
        matrix = matrix.astype(BF16).astype(np.float32)
    expr: WeightExpr = Constant("w", matrix.astype(BF16) if source16 else matrix)
    packed = numbers(PackedSource.panels("w", expr, dtype))
    expected = torch_rounded(matrix, dtype)
    seen = np.zeros_like(packed, dtype=bool)
    for n in range(rows):
        for k in range(inputs):
            at = (n // 16, k // 2, n % 16, k % 2) if bf16 else (n // 16, k, n % 16)
            assert packed[at] == expected[n, k]
            seen[at] = True
    assert not packed[~seen].any(), "padding is zero"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows", [16, 33, 130])
def test_gated_panels_alternate_gate_and_up(dtype: WeightDType, rows: int) -> None:
    gate, up = matrix_of(rows, 24, 1), matrix_of(rows, 24, 2)
    both = PackedSource.gated_panels("gu", Constant("g", gate), Constant("u", up), dtype)
    packed = numbers(both)
    assert both.shape == (2 * -(-rows // 16) * 16, 24)
    assert both.weight.shape == list(both.shape)
    np.testing.assert_array_equal(packed[0::2], numbers(PackedSource.panels("g", Constant("g", gate), dtype)))
    np.testing.assert_array_equal(packed[1::2], numbers(PackedSource.panels("u", Constant("u", up), dtype)))


def test_gated_bias_follows_the_order_of_the_panels() -> None:
    gate, up = np.arange(20, dtype=np.float32), np.arange(100, 120, dtype=np.float32)
    source = PackedSource.gated_vector("b", Constant("g", gate), Constant("u", up))
    zeros = [0.0] * 12
    expected = [*range(16), *range(100, 116), *range(16, 20), *zeros, *range(116, 120), *zeros]
    assert numbers(source).tolist() == expected
    assert source.shape == (64,)


@pytest.mark.parametrize(
    ("shape", "dtype", "stored_shape"),
    [
        ((), "f32", (16,)),
        ((5,), "f32", (16,)),
        ((48,), "f32", (48,)),
        ((3, 7), "f32", (32,)),
        ((3, 7), "bf16", (32,)),
        ((4, 8), "bf16", (4, 8)),
    ],
)
def test_plain_tensors_are_padded_with_zeros_to_64_bytes(
    shape: tuple[int, ...], dtype: WeightDType, stored_shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    source = PackedSource.plain("v", Constant("v", values), dtype)
    assert source.stored_shape == stored_shape
    flat = numbers(source).reshape(-1)
    np.testing.assert_array_equal(flat[: values.size], torch_rounded(values, dtype).reshape(-1))
    assert not flat[values.size :].any()


def test_rounding_to_bfloat16_is_to_nearest_even_as_in_torch() -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 15, dtype=np.uint32) << 16) | 0x8000  # exactly between two bfloat16 values
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.abs(values) < 3e38]  # NaN and infinity are refused, see below
    values = values[: len(values) // 32 * 32]
    packed = numbers(PackedSource.plain("v", Constant("v", values), "bf16"))
    np.testing.assert_array_equal(packed, torch_rounded(values, "bf16"))


def test_float16_and_bfloat16_sources_reach_float32_exactly() -> None:
    for dtype in (np.dtype(np.float16), BF16):
        values = matrix_of(16, 8, 5).astype(dtype)
        packed = numbers(PackedSource.panels("w", Constant("w", values), "f32"))
        np.testing.assert_array_equal(packed[0].T, values.astype(np.float32))


def test_a_value_too_large_for_bfloat16_is_an_error_that_names_the_tensor() -> None:
    values = np.full((1, 32), 3.4e38, np.float32)
    with pytest.raises(BuildError, match=r"'layers\.3\.w' \(from stored\.w\).*3\.4e\+38.*bfloat16.*float32"):
        stored(PackedSource.panels("layers.3.w", Constant("stored.w", values), "bf16"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("source", [np.dtype(np.float32), np.dtype(np.float16), BF16])
def test_a_weight_that_is_not_finite_is_an_error(bad: float, source: np.dtype[np.float32]) -> None:
    values = np.zeros((16, 4))
    values[7, 2] = bad
    with pytest.raises(BuildError, match=r"'w'.*NaN or infinity"):
        stored(PackedSource.panels("w", Constant("w", values.astype(source)), "bf16"))


def test_an_upcast_of_the_graph_is_not_carried_out_for_a_bfloat16_target() -> None:
    values = matrix_of(16, 8, 9).astype(BF16)

    class Refusing(Cast):
        def fill(self, start: int, stop: int, out: npt.NDArray[np.float32]) -> None:
            raise AssertionError("converted to float32 and back")

    source = PackedSource.panels("w", Refusing(Constant("w", values), np.dtype(np.float32)), "bf16")
    np.testing.assert_array_equal(
        numbers(source)[0].transpose(1, 0, 2).reshape(16, 8), values.astype(np.float32)
    )


def test_memory_stays_within_a_few_chunks_for_a_large_matrix() -> None:
    class Zeros(WeightExpr):
        def fill(self, start: int, stop: int, out: npt.NDArray[np.float32]) -> None:
            out[...] = 0

    source = PackedSource.panels("w", Zeros("z", (16000, 4096), np.dtype(np.float32)), "bf16")
    tracemalloc.start()
    total = sum(len(chunk) for chunk in source.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == source.nbytes == 16000 * 4096 * 2
    assert peak < 6 * packing.CHUNK_BYTES  # f32 rows (two), finite mask, bf16 rows, packed


def test_shapes_that_do_not_fit_a_layout_are_refused() -> None:
    vector, matrix = Constant("v", np.zeros(4, np.float32)), Constant("m", np.zeros((4, 4), np.float32))
    with pytest.raises(BuildError, match=r"'w'.*\[4\].*matrix"):
        PackedSource.panels("w", vector, "f32")
    with pytest.raises(BuildError, match=r"gate \[4, 4\] and up \[4\]"):
        PackedSource.gated_vector("w", matrix, vector)
