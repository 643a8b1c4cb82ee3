from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.engines import open_engine
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.verify import verify
from castiron.runtime.verify_report import tolerance_for
from numpy_core import NumpyRunner
from tiny import TinyModel, write_tiny_engine

from castiron.errors import EngineError


def check(folder: Path, model: TinyModel | None = None, defect: Any = None) -> Any:
    return verify(open_engine(folder), NumpyRunner(model or TinyModel(), defect))


def test_the_same_model_passes_with_no_error(tiny_engine: Path) -> None:
    report = check(tiny_engine)
    assert report.passed
    assert report.problems == []
    assert report.max_abs_error == 0
    assert report.top1_agreement == 1
    assert report.decode_max_abs_error < 1e-6
    assert [p.prompt_tokens for p in report.prompts if p.phase == "prefill"] == [1, 7, 31, 32, 40, 96]
    assert report.rows == sum(p.rows for p in report.prompts if p.phase == "prefill")
    assert report.decode_rows == 12
    assert report.summary().rows == report.rows + 12


def test_rounding_passes_and_a_hundred_times_rounding_fails(tiny_engine: Path) -> None:
    rng = np.random.default_rng(0)

    def noise(size: float) -> Any:
        return lambda logits, _: (logits + rng.uniform(-size, size, logits.shape)).astype(np.float32)

    scale = 10.0  # the tiny model's largest logits
    assert check(tiny_engine, defect=noise(1e-5 * scale)).passed
    report = check(tiny_engine, defect=noise(1e-3 * scale))
    assert not report.passed
    assert any("max error" in problem for problem in report.problems)


def test_another_models_weights_fail(tiny_engine: Path) -> None:
    report = check(tiny_engine, TinyModel(seed=2))
    assert not report.passed
    assert report.mean_kl > 0.1


def test_a_bf16_engine_tolerates_rounding_to_bf16_and_no_wrong_weights(tmp_path: Path) -> None:
    engine = write_tiny_engine(tmp_path / "engine", "bf16")
    model = TinyModel("bf16")
    rng = np.random.default_rng(1)

    def rounded(logits: Any, _: bool) -> Any:
        return (logits * (1 + rng.uniform(-1, 1, logits.shape) * 2**-8)).astype(np.float32)

    assert check(engine, model, rounded).passed
    model.down = model.down.copy()
    model.down[:4] = 0  # an eighth of one matrix
    assert not check(engine, model).passed


def test_a_defect_of_decode_alone_is_found(tiny_engine: Path) -> None:
    def broken(logits: Any, decode: bool) -> Any:
        return logits + 0.02 * logits * decode

    report = check(tiny_engine, defect=lambda logits, decode: broken(logits, decode).astype(np.float32))
    assert not report.passed
    assert all(problem.startswith("decode") for problem in report.problems)


def test_logits_that_are_not_finite_fail(tiny_engine: Path) -> None:
    def poisoned(logits: Any, _: bool) -> Any:
        logits = logits.copy()
        logits[-1, 3] = np.nan
        return logits

    report = check(tiny_engine, defect=poisoned)
    assert not report.passed
    assert any("not finite" in problem for problem in report.problems)


def test_an_engine_without_golden_outputs_says_how_to_get_them(tmp_path: Path) -> None:
    engine = write_tiny_engine(tmp_path / "engine", golden=False)
    with pytest.raises(EngineError, match=r"holds no golden outputs.*castiron build"):
        check(engine)


def test_progress_reaches_its_end(tiny_engine: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(open_engine(tiny_engine), NumpyRunner(TinyModel()), progress=lambda *step: seen.append(step))
    assert seen == [(index + 1, 7) for index in range(7)]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_real_runtime_agrees_with_the_model_in_float64(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("castiron.runtime._core", reason="the C++ runtime is not built")
    report = verify(
        open_engine(write_tiny_engine(tmp_path / "engine", dtype)), options=RuntimeOptions(num_threads=1)
    )
    assert report.problems == []
    assert report.passed


def test_mixtures_forgive_a_few_rows_and_no_more() -> None:
    dense, mixed = (tolerance_for("bfloat16", None, routes=routes) for routes in (False, True))
    assert (dense.outliers, dense.may_leave) == (0, False)
    assert (mixed.outliers, mixed.may_leave, mixed.own) == (0.1, True, dense.own)
    assert mixed.relative > dense.relative
    exact = tolerance_for("float32", None, routes=True)
    assert (exact.max_abs, exact.relative) == (2e-4, 2e-4)
    assert exact.outliers == 0.02


def test_rows_of_other_experts_pass_where_they_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = write_tiny_engine(tmp_path / "engine", "bf16"), TinyModel("bf16")

    def elsewhere(every: int) -> Any:
        def defect(logits: Any, decode: bool) -> Any:
            logits = logits.copy()
            if not decode:
                logits[every - 1 :: every] = -logits[every - 1 :: every]
            return logits

        return defect

    assert not check(engine, model, elsewhere(16)).passed
    monkeypatch.setattr("castiron.runtime.verify._routes", lambda *_: True)
    report = check(engine, model, elsewhere(16))
    assert report.passed
    assert report.max_abs_error > 1
    assert report.mean_kl < 1e-6
    assert not check(engine, model, elsewhere(4)).passed


def test_formats_with_few_bits_have_wider_bounds_and_float32_engines_have_not() -> None:
    plain, bytes_, halves = (
        tolerance_for("bfloat16", None, frozenset(formats)) for formats in ((), ("fp8",), ("mxfp4", "fp8"))
    )
    # neighbours of e4m3 are an eighth apart, of e2m1 a half: the bounds are ordered like them
    assert plain.relative < bytes_.relative < halves.relative
    assert plain.max_abs < bytes_.max_abs < halves.max_abs
    # int8 with a scale a token: what is rounded away is another part each time; not so in the cache
    assert tolerance_for("bfloat16", None, frozenset({"int8"})).mean_kl > plain.mean_kl
    assert tolerance_for("bfloat16", None, cache="int8") == plain
    assert tolerance_for("bfloat16", None, cache="fp8") == bytes_
    assert tolerance_for("float32", None, frozenset({"int8"})) == tolerance_for("float32", None)
    assert tolerance_for("float32", None, frozenset({"fp8"})) == tolerance_for("float32", None)
