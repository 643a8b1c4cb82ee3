from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.engines import Limits, make_golden, open_engine
from castiron.engines.golden import pack_arrays, read_golden, unpack_arrays
from tiny import LIMITS, TOKENS, VOCAB, TinyModel

from castiron.errors import EngineError

USED = TOKENS.vocab_size_used


class Counting(TinyModel):
    passes = 0

    def logits(self, token_ids: Sequence[int], rows: Sequence[int]) -> np.ndarray[Any, Any]:
        self.passes += 1
        return super().logits(token_ids, rows)


def test_golden_rows_are_the_source_models_and_survive_the_engine(tiny_engine: Path) -> None:
    sequences = open_engine(tiny_engine).golden()
    assert sequences is not None
    (sequence,) = sequences
    model = TinyModel()
    assert len(sequence.tokens) == LIMITS.max_seq_len
    assert {0, 6, 30, 31, 32, 63, 64, LIMITS.max_seq_len - 1} <= set(sequence.rows.tolist())
    np.testing.assert_array_equal(sequence.logits, model.logits(sequence.tokens, sequence.rows))


def test_the_continuation_is_the_source_models_greedy_one(tiny_engine: Path) -> None:
    sequences = open_engine(tiny_engine).golden()
    assert sequences is not None
    model, sequence = TinyModel(), sequences[0]
    text = sequence.tokens[: sequence.prefix].tolist()
    for index, token in enumerate(sequence.continuation.tolist()):
        row = model.logits(text, [len(text) - 1])[0]
        assert token == row[:USED].argmax()
        if index:
            np.testing.assert_array_equal(sequence.decode_logits[index - 1], row)
        text.append(token)


def test_passes_over_the_source_model_are_few() -> None:
    model = Counting()
    make_golden(model, USED, LIMITS)
    assert model.passes == 4
    model = Counting()
    make_golden(model, USED, LIMITS, tokenizer_ids=list(range(40)))
    assert model.passes == 5


def test_a_text_leads_the_main_sequence_and_random_ids_stay_below_the_used_vocabulary() -> None:
    text = list(range(20))
    arrays = make_golden(TinyModel(), USED, LIMITS, tokenizer_ids=text, seed=3)
    main, random = read_golden(arrays, VOCAB)
    assert main.tokens[:20].tolist() == text
    assert random.tokens.max() < USED
    assert not len(random.continuation)


def test_a_long_text_makes_both_sequences() -> None:
    text = [(7 * index) % USED for index in range(LIMITS.max_seq_len + 40)]
    main, second = read_golden(make_golden(TinyModel(), USED, LIMITS, tokenizer_ids=text, seed=3), VOCAB)
    assert main.tokens.tolist() == text[: len(main.tokens)]
    assert second.tokens.tolist() == text[len(main.tokens) : len(main.tokens) + len(second.tokens)]
    assert len(second.tokens) == min(40, len(main.tokens))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33])
def test_short_limits_give_short_sequences(length: int) -> None:
    limits = Limits(max_batch_size=1, max_num_tokens=1, max_logit_rows=1, max_seq_len=length)
    (sequence,) = read_golden(make_golden(TinyModel(), USED, limits), VOCAB)
    assert len(sequence.tokens) == length
    assert sequence.prefix + len(sequence.continuation) <= max(length, sequence.prefix)


def test_rows_are_bounded_for_a_large_vocabulary() -> None:
    class Wide:
        def logits(self, token_ids: Sequence[int], rows: Sequence[int]) -> np.ndarray[Any, Any]:
            assert len(rows) * 262_144 * 4 <= 33 << 20
            return np.zeros((len(rows), 262_144), np.float32)

    limits = Limits(max_batch_size=1, max_num_tokens=1, max_logit_rows=1, max_seq_len=4096)
    make_golden(Wide(), 262_144, limits)


def test_equal_seeds_give_equal_sequences() -> None:
    one, two, other = (make_golden(TinyModel(), USED, LIMITS, seed=seed) for seed in (1, 1, 2))
    assert pack_arrays(one) == pack_arrays(two) != pack_arrays(other)


@pytest.mark.parametrize(
    "change",
    [
        {"0.tokens": np.asarray([USED + VOCAB], np.int32)},
        {"0.rows": np.asarray([-1], np.int32)},
        {"0.logits": np.zeros((1, VOCAB), np.float32)},
        {"0.logits": np.full((89, VOCAB), np.nan, np.float32)},
        {"0.prefix": np.asarray([0], np.int32)},
        {"0.prefix": np.asarray([1, 2], np.int32)},
        {"0.continuation": np.asarray([], np.int32)},
        {"1.tokens": np.asarray([1], np.int32)},
    ],
)
def test_golden_arrays_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    arrays = make_golden(TinyModel(), USED, LIMITS)
    with pytest.raises(EngineError):
        read_golden({**arrays, **change}, VOCAB)


def test_arrays_survive_packing() -> None:
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 4), np.float32)}
    back = unpack_arrays(pack_arrays(arrays), "x")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
