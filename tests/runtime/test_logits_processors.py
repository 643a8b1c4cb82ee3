"""Functions of the caller's that change logits, on the real core."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_calls import wait_until

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engines"))

from tiny import TOKENS, VOCAB, TinyModel

from castiron.errors import RequestError

pytest.importorskip("castiron.runtime._core", reason="the C++ runtime is not built")

from castiron import ModelRunner, SamplingParams

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def runner(engine_folder: Path) -> Iterator[ModelRunner]:
    with ModelRunner.from_dir(engine_folder, num_threads=1) as made:
        yield made


def test_a_processor_sees_tokens_and_raw_logits_and_decides(runner: ModelRunner) -> None:
    model = TinyModel()
    calls: list[list[int]] = []

    def second_best(tokens: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        calls.append(tokens)
        assert logits.dtype == np.float32
        expected = model.logits(tokens, [len(tokens) - 1])[0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        logits[logits[: TOKENS.vocab_size_used].argmax()] = -np.inf
        return logits

    (result,) = runner.generate(
        input_ids=PROMPT, max_new_tokens=6, end_id=-1, logits_processors=[second_best]
    )
    assert result.error is None
    tokens = list(PROMPT)
    for _ in range(6):
        row = model.logits(tokens, [len(tokens) - 1])[0][: TOKENS.vocab_size_used]
        tokens.append(int(np.argsort(-row)[1]))
    assert result.outputs[0].token_ids == tokens[3:]
    assert calls == [tokens[: 3 + i] for i in range(6)]


def test_processors_come_before_bias_and_one_after_the_other(runner: ModelRunner) -> None:
    def only_7_and_8(tokens: list[int], logits: np.ndarray[Any, Any]) -> list[float]:
        return [0.0 if token in (7, 8) else -np.inf for token in range(VOCAB)]

    def rather_7(tokens: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert sorted(np.flatnonzero(np.isfinite(logits))) == [7, 8]
        logits = logits.astype(np.float64)
        logits[7] += 1
        return logits

    options = {"max_new_tokens": 3, "end_id": -1, "logits_processors": [only_7_and_8, rather_7]}
    (result,) = runner.generate(input_ids=PROMPT, **options)
    assert result.outputs[0].token_ids == [7, 7, 7]
    (result,) = runner.generate(input_ids=PROMPT, logit_bias={8: 2.0}, **options)
    assert result.outputs[0].token_ids == [8, 8, 8]


def raising(error: BaseException) -> Any:
    def process(tokens: list[int], logits: np.ndarray[Any, Any]) -> None:
        raise error

    return process


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (lambda tokens, logits: 1 / 0, "the logits processor failed: ZeroDivisionError"),
        (lambda tokens, logits: None, "expected numbers of shape"),
        (lambda tokens, logits: logits[:5], r"of shape \(5,\)"),
        (lambda tokens, logits: logits * np.nan, "NaN or"),
        (lambda tokens, logits: np.full_like(logits, -np.inf), "no token is allowed"),
        (raising(ValueError("\ud800")), r"ValueError: \\ud800"),
        (raising(_UnspeakableError()), "_UnspeakableError: .its text cannot be made"),
        (raising(SystemExit(3)), "SystemExit: 3"),
    ],
    ids=["raises", "none", "short", "nan", "nothing", "surrogate", "no text", "exit"],
)
def test_a_bad_processor_ends_its_own_request_alone(runner: ModelRunner, process: Any, words: str) -> None:
    good: list[Any] = []
    other = threading.Thread(
        target=lambda: good.extend(runner.generate(input_ids=PROMPT, max_new_tokens=40, end_id=-1))
    )
    other.start()
    (result,) = runner.generate(input_ids=PROMPT, logits_processors=process)
    other.join()
    assert result.outputs[0].finish_reason == "error"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(result.error)
    assert len(good[0].outputs[0].token_ids) == 40


def test_a_cancelled_request_leaves_no_thread_behind(runner: ModelRunner) -> None:
    stream = runner.generate(
        input_ids=PROMPT,
        max_new_tokens=80,
        end_id=-1,
        logits_processors=lambda tokens, logits: logits,
        streaming=True,
    )
    next(stream)
    stream.close()
    wait_until(lambda: not any(t.name.startswith("castiron-logits") for t in threading.enumerate()))


def test_what_is_no_function_is_refused(runner: ModelRunner) -> None:
    for wrong in (5, [5], "name", {"a": 1}):
        with pytest.raises(RequestError, match="logits_processors is"):
            SamplingParams(logits_processors=wrong)  # type: ignore[arg-type]
