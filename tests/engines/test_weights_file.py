from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from castiron.engines import Weight, layout_bytes, open_engine
from castiron.engines.weights_file import read_header
from castiron.engines.weights_writer import write_weights
from edit import copy_engine, read_weights_header, write_weights_header
from tiny import ArraySource, pack

from castiron.errors import BuildError, EngineError


def test_the_safetensors_library_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal(48).astype(np.float32),
        "ü b": rng.standard_normal(64).astype(ml_dtypes.bfloat16),
    }
    sources = [ArraySource(name, "f32" if a.itemsize == 4 else "bf16", a) for name, a in arrays.items()]
    size, _ = write_weights(tmp_path / "w", sources)
    assert size == (tmp_path / "w").stat().st_size
    loaded = safetensors.load_file(tmp_path / "w")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name].view(np.uint8), array.view(np.uint8))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    sources = [ArraySource(name, "f32", np.zeros(48, np.float32)) for name in ("a", "b")]
    write_weights(tmp_path / "w", sources, lambda *step: seen.append(step))
    assert seen[-1] == (384, 384)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        # By hand from docs/program.md: [ceil(17/16)][5][16] floats, [2][ceil(5/2)][16][2] halves.
        (Weight(name="w", dtype="f32", layout="panel16", shape=[17, 5]), 2 * 5 * 16 * 4),
        (Weight(name="w", dtype="bf16", layout="panel16x2", shape=[17, 5]), 2 * 3 * 16 * 2 * 2),
        (Weight(name="w", dtype="bf16", layout="plain", shape=[17, 5]), 170),
        (Weight(name="w", dtype="f32", layout="plain", shape=[1]), 4),
    ],
)
def test_bytes_of_a_layout(weight: Weight, expected: int) -> None:
    assert layout_bytes(weight) == expected
    padded = pack(np.zeros(weight.shape), weight.layout, weight.dtype).nbytes
    assert padded == -(-expected // 64) * 64


class Lying(ArraySource):
    @property
    def nbytes(self) -> int:
        return 128

    @property
    def stored_shape(self) -> list[int]:
        return [32]


@pytest.mark.parametrize(
    "sources",
    [
        [ArraySource("a", "f32", np.zeros(3, np.float32))],
        [
            ArraySource("a", "f32", np.zeros(16, np.float32)),
            ArraySource("a", "f32", np.zeros(16, np.float32)),
        ],
        [ArraySource("a", "f64", np.zeros(16, np.float64))],
        [ArraySource("a", "bf16", np.zeros(16, np.float32))],
        [ArraySource("a", "f32", np.zeros(0, np.float32))],
        [Lying("a", "f32", np.zeros(16, np.float32))],
        [Lying("a", "f32", np.zeros(64, np.float32))],
    ],
)
def test_a_source_that_contradicts_itself_is_refused(tmp_path: Path, sources: list[ArraySource]) -> None:
    with pytest.raises(BuildError):
        write_weights(tmp_path / "w", sources)


def _first(table: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = table["embed"]
    return entry


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("head"),
        lambda t: _first(t).update(dtype="F64"),
        lambda t: _first(t).update(dtype=["F32"]),
        lambda t: _first(t).update(shape=[-1696]),
        lambda t: _first(t).update(shape=[1696.0]),
        lambda t: _first(t).update(shape=[True, 1696]),
        lambda t: _first(t).update(shape=[1] * 7 + [1696]),
        lambda t: _first(t).update(shape="1696"),
        lambda t: _first(t).update(data_offsets=[0, 6783]),
        lambda t: _first(t).update(data_offsets=[0]),
        lambda t: _first(t).update(data_offsets=[0, 1 << 60]),
        lambda t: _first(t).update(data_offsets=[64, 6848]),
        lambda t: _first(t).update(data_offsets=[-64, 6720]),
        lambda t: _first(t).update(extra=1),
        lambda t: t.update(extra={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}),
        lambda t: t.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}),
        lambda t: t.update(extra=None),
        lambda t: t.update({"": _first(t)}),
        lambda t: t.update({"x" * 600: t.pop("embed")}),
    ],
)
def test_a_dishonest_tensor_table_is_refused(tiny_engine: Path, tmp_path: Path, change: Any) -> None:
    engine = copy_engine(tiny_engine, tmp_path / "engine")
    table = read_weights_header(engine)
    change(table)
    write_weights_header(engine, table)
    with pytest.raises(EngineError):
        open_engine(engine)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"null"])
def test_a_tensor_table_that_is_none_is_refused(tiny_engine: Path, tmp_path: Path, text: bytes) -> None:
    engine = copy_engine(tiny_engine, tmp_path / "engine")
    write_weights_header(engine, text)
    with pytest.raises(EngineError):
        open_engine(engine)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_header_longer_than_its_file_is_refused_without_allocating_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(EngineError):
        read_header(tmp_path / "w")


def test_a_file_whose_data_is_not_aligned_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"a": np.zeros(16, np.float32)}, tmp_path / "w", {"pad": "x" * 5})
    if int.from_bytes((tmp_path / "w").read_bytes()[:8], "little") % 64 != 56:
        with pytest.raises(EngineError, match="multiple of 64"):
            read_header(tmp_path / "w")
