"""Packed codes of quantization tools, packed here bit by bit, and of GGUF, decoded by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from castiron.graph.weights import exprs as weight_exprs
from castiron.graph.weights.exprs import Constant
from castiron.graph.weights.gguf_blocks import BLOCK_KINDS
from castiron.graph.weights.quantized import dequantize
from castiron.graph.weights.unpack import LAYOUTS, Unpack, unpack
from gguf_files import random_blocks

from castiron.errors import BuildError

Array = npt.NDArray[Any]
#: The order in which AutoAWQ stores the columns of eight (its ORDER table).
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def numbers(low: int, high: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape)


def word(codes: list[int], bits: int) -> int:
    """Codes in one signed 32-bit number, the first in the lowest bits."""
    value = sum((code & ((1 << bits) - 1)) << (bits * place) for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def across(codes: Array, bits: int, order: list[int] | None = None) -> Array:
    count = 32 // bits
    rows = []
    for row in codes.tolist():
        groups = [row[i : i + count] for i in range(0, len(row), count)]
        rows.append([word([g[i] for i in order or range(count)], bits) for g in groups])
    return np.array(rows, np.int32)


def down(codes: Array, bits: int) -> Array:
    return np.ascontiguousarray(across(codes.T, bits).T)


Packing = Callable[[], tuple[Array, Array]]


def _signed(bits: int, pack: Callable[[Array], Array], rows: int = 16) -> tuple[Array, Array]:
    middle = 1 << (bits - 1)
    codes = numbers(-middle, middle, rows, 24)
    return pack(codes + middle), codes.astype(np.int8)


def _unsigned(bits: int, pack: Callable[[Array], Array]) -> tuple[Array, Array]:
    codes = numbers(0, 1 << bits, 5, 24)
    return pack(codes), codes.astype(np.uint8)


def _row_pairs() -> tuple[Array, Array]:
    codes = numbers(-8, 8, 6, 5)
    raw = [[(a & 15) | (b & 15) << 4 for a, b in zip(*pair, strict=True)] for pair in codes.reshape(3, 2, 5)]
    return np.array(raw, np.uint8), codes.astype(np.int8)


def _fp4_pairs() -> tuple[Array, Array]:
    codes = numbers(0, 16, 5, 8)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8), codes.astype(np.uint8)


def _e4m3() -> tuple[Array, Array]:
    codes = numbers(0, 256, 5, 8).astype(np.uint8)
    return codes, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e8m0() -> tuple[Array, Array]:
    codes = numbers(0, 255, 5, 8).astype(np.uint8)
    return codes, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


PACKINGS: dict[str, Packing] = {
    "int4_words": lambda: _signed(4, lambda codes: across(codes, 4)),
    "int8_words": lambda: _signed(8, lambda codes: across(codes, 8)),
    "uint4_words": lambda: _unsigned(4, lambda codes: across(codes, 4)),
    "uint8_words": lambda: _unsigned(8, lambda codes: across(codes, 8)),
    "int4_words_awq": lambda: _signed(4, lambda codes: across(codes, 4, AWQ)),
    "uint4_words_awq": lambda: _unsigned(4, lambda codes: across(codes, 4, AWQ)),
    "int4_words_down": lambda: _signed(4, lambda codes: down(codes, 4)),
    "int8_words_down": lambda: _signed(8, lambda codes: down(codes, 8)),
    "int4_row_pairs": _row_pairs,
    "fp4_pairs": _fp4_pairs,
    "e4m3": _e4m3,
    "e8m0": _e8m0,
}


def test_every_layout_is_tested_here() -> None:
    of_gguf = {f"{kind.lower()}_{part}" for kind in BLOCK_KINDS for part in ("codes", "scales", "offsets")}
    assert set(LAYOUTS) - of_gguf == set(PACKINGS)


@pytest.mark.parametrize("piece", [1, 1 << 24])
@pytest.mark.parametrize("layout", PACKINGS)
def test_unpacking_gives_the_codes_that_were_packed(
    layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_exprs, "PIECE_BYTES", piece)
    raw, expected = PACKINGS[layout]()
    expr = Unpack(Constant("w", raw), layout)
    assert (expr.shape, expr.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(expr.whole(), expected)
    np.testing.assert_array_equal(unpack(raw, layout), expected)
    for start in range(len(expected)):  # also ranges that begin inside a word of rows
        for stop in {start + 1, min(len(expected), start + 7)}:
            np.testing.assert_array_equal(expr.rows(start, stop), expected[start:stop])


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_gguf_blocks_have_the_numbers_that_the_gguf_package_decodes(name: str) -> None:
    kind = BLOCK_KINDS[name]
    raw = random_blocks(name, 5, 3 * kind.width, seed=3)
    parts = [unpack(raw, f"{name.lower()}_{part}") for part in ("codes", "scales")]
    offset = unpack(raw, f"{name.lower()}_offsets") if kind.has_offset else None
    decoded = dequantize(parts[0], parts[1], offset, format=kind.format, group=kind.group)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert parts[0].dtype == np.int8
    if kind.format == "int4":
        assert parts[0].min() >= -8
        assert parts[0].max() <= 7
    if not kind.has_offset:
        np.testing.assert_array_equal(decoded, expected)
        return
    # d * q - m there, d * (q - 8) + (8 * d - m) here: each rounds in float32 at the size of its largest term
    size = (np.abs(parts[1]).repeat(kind.group, 1) * 32) + np.abs(offset).repeat(kind.group, 1)
    assert (np.abs(decoded - expected) <= size * 2**-22).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_and_scales_of_gguf_blocks_are_those_that_were_quantized(name: str) -> None:
    w = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType[name])
    kind = BLOCK_KINDS[name]
    scales = unpack(raw, f"{name.lower()}_scales")
    assert (scales.shape, scales.dtype) == ((4, 3), np.float16)  # as stored
    offset = unpack(raw, f"{name.lower()}_offsets") if kind.has_offset else None
    codes = unpack(raw, f"{name.lower()}_codes")
    error = np.abs(dequantize(codes, scales, offset, format=kind.format, group=kind.group) - w)
    # half a step; a whole one for the far end of Q4_0 and Q5_0, which has no code of its own
    assert (error <= np.abs(scales).repeat(32, 1) * (1.01 if name in ("Q4_0", "Q5_0") else 0.51)).all()


def test_gguf_layouts_stream_like_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_exprs, "PIECE_BYTES", 1)
    raw = random_blocks("Q5_K", 5, 512, seed=3)
    for part in ("codes", "scales", "offsets"):
        expr = Unpack(Constant("w", raw), f"q5_k_{part}")
        np.testing.assert_array_equal(expr.rows(1, 4), unpack(raw, f"q5_k_{part}")[1:4])


def test_rows_that_end_inside_a_block_are_refused() -> None:
    with pytest.raises(BuildError, match=r"shape \[2, 19\], expected a matrix with rows of a multiple of 18"):
        Unpack(Constant("w", np.zeros((2, 19), np.uint8)), "q4_0_codes")
