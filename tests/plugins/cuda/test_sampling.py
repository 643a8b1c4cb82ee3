"""Tokens drawn by the kernels, interpreted, against the host sampler's definition in numpy and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from castiron.plugins import Call, Op, Operand
from castiron.plugins.cuda import sampling
from castiron.plugins.cuda.reference_sampling import feed_sampled, kept_tokens, sample
from castiron.plugins.tactic import FEED
from interpret import run_call
from lowering import context

DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "uniform": 0.5,
    "num_logprobs": -1,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
}
INTEGERS = ("top_k", "num_logprobs")
Edits = Sequence[tuple[int, int, int]]


class Sampling:
    """One step of sampling: ``fields`` are numbers or one number a row."""

    def __init__(self, logits: torch.Tensor, limit: int = 0, edits: Edits = (), **fields: Any) -> None:
        rows, vocab = logits.shape
        self.limit = limit or vocab
        self.inputs = {
            name: torch.tensor(np.array(np.broadcast_to(fields.get(name, default), rows))).to(
                torch.int32 if name in INTEGERS else torch.float32
            )
            for name, default in DEFAULTS.items()
        }
        # The block is padded: an edit of row -1 is none.
        for column, name in enumerate(("edit_row", "edit_token", "edit_count")):
            numbers = [edit[column] for edit in (*edits, (-1, 0, 0))]
            self.inputs[name] = torch.tensor(numbers, dtype=torch.int32)
        self.counts = {
            "N": rows,
            "V": self.limit,
            "E": len(edits) + 1 if edits else 0,
            "R": int((self.inputs["temperature"] >= 1e-5).sum()),
            "L": int((self.inputs["num_logprobs"] >= 0).sum()),
        }
        self.logits = logits

    def run(self, chunk: int = 64, candidates: int = 16) -> list[str]:
        """Run the launches in small chunks. Returns the names of the kernels that ran."""
        shape = self.logits.shape
        outputs = (
            Operand("sampled", ("N", 2), "i32"),
            Operand("top_ids", ("N", 20), "i32"),
            Operand("top_logprobs", ("N", 21)),
        )
        op = Op("castiron.Sample", (Operand("logits", ("N", shape[1])),), outputs)
        lowering = sampling.lower_in_chunks(op, chunk, candidates)
        self.values = {"logits": self.logits.clone()}
        for operand in (*outputs, *lowering.temporaries):
            size = [self.counts[dim] if isinstance(dim, str) else dim for dim in operand.shape]
            dtype = torch.int32 if operand.dtype == "i32" else torch.float32
            self.values[operand.name] = torch.full(size, -7, dtype=dtype)
        (call,) = lowering.actions
        assert isinstance(call, Call)
        return run_call(call, self.values, (), self.counts, self.inputs)

    def expected(self) -> tuple[np.ndarray[Any, Any], ...]:
        rows = {name: array.numpy() for name, array in self.inputs.items()}
        return sample(self.logits.numpy(), rows=rows, vocab_limit=self.limit)

    def assert_as_expected(self) -> None:
        sampled, top, logprobs = self.expected()
        np.testing.assert_array_equal(self.values["sampled"].numpy(), sampled)
        assert torch.equal(self.values["logits"], self.logits) or self.logits.isnan().any()
        for row in np.flatnonzero(self.inputs["num_logprobs"].numpy() >= 0):
            np.testing.assert_array_equal(self.values["top_ids"][row].numpy(), top[row])
            # Sums of exponentials in float32 and their logarithm.
            found = self.values["top_logprobs"][row].numpy()
            np.testing.assert_allclose(found, logprobs[row], atol=3e-6, rtol=1e-6)


def logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_a_greedy_step_takes_two_launches_and_the_lowest_of_equal_ids() -> None:
    x = logits(5, 300)
    x[0, [17, 70, 240]] = 30.0
    x[1, [64, 299]] = 30.0
    x[2, 295] = 50.0  # beyond vocab_limit
    x[3] = -1.0
    case = Sampling(x, limit=290)
    assert case.run() == ["largest_of_chunks", "choose_largest"]
    case.assert_as_expected()
    assert case.values["sampled"][:4, 0].tolist()[0:2] == [17, 64]


def test_rows_without_a_valid_choice_say_so() -> None:
    x = logits(6, 200)
    x[0, 100] = float("nan")
    x[1, 3] = float("inf")
    x[2] = float("-inf")
    x[3, 199] = float("nan")  # beyond vocab_limit: not looked at
    x[4, :] = float("-inf")
    x[4, 5] = 1.0
    masked = [(4, 5, -1), (0, 100, -1)]  # a masked NaN is still noticed
    case = Sampling(x, limit=199, edits=masked, temperature=[0, 1, 1, 1, 1, 0.0])
    case.run()
    case.assert_as_expected()
    assert case.values["sampled"][:, 1].tolist() == [1, 1, 2, 0, 2, 0]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_p": 0.2},
    {"top_p": 0.9, "temperature": 0.7},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "temperature": 1.5},
    {"top_p": 0.99, "temperature": 5.0},  # flat: more tokens than candidates are kept
    {"top_k": 90, "temperature": 8.0},  # likewise
    {"top_k": 400},  # more than there are
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_filters_and_draws_are_those_of_the_host_sampler(fields: dict[str, Any]) -> None:
    uniform = [0.0, 0.55, 0.9999]
    case = Sampling(logits(3, 140, seed=1), limit=130, **{"temperature": 1.0, **fields}, uniform=uniform)
    case.run()
    case.assert_as_expected()


@pytest.mark.parametrize(
    ("fields", "candidates"),
    [
        ({"top_k": 6}, 64),
        ({"top_k": 6}, 2),
        ({"top_p": 0.55}, 64),
        ({"top_p": 0.55}, 2),
        ({"min_p": 0.3}, 64),
    ],
)
def test_of_equal_logits_the_lowest_ids_are_kept(fields: dict[str, Any], candidates: int) -> None:
    x = torch.full((4, 128), -2.0)
    x[:, [3, 100]] = 3.0
    x[:, [9, 40, 70, 71, 77, 110, 127]] = 2.5
    x[:, 80:90] = 0.0
    case = Sampling(x, temperature=1.0, uniform=(np.arange(4) + 0.5) / 4, **fields)
    case.run(candidates=candidates)
    case.assert_as_expected()
    allowed = kept_tokens(
        x[0].double().numpy(), 1.0, *({**DEFAULTS, **fields}[n] for n in ("top_k", "top_p", "min_p"))
    )
    assert set(case.values["sampled"][:, 0].tolist()) <= set(allowed.tolist())


def test_penalties_and_masks_are_applied_in_order_and_taken_back() -> None:
    x = logits(4, 200, seed=2)
    best = [int(x[row].argmax()) for row in range(4)]
    edits = [
        (0, best[0], 0),
        (0, (best[0] + 1) % 200, 3),
        (1, best[1], 2),
        (2, best[2], -1),
        (3, best[3], 1),
        (3, 7, 4),
    ]
    fields = {
        "repetition": [5.0, 1.0, 1.0, 0.5],
        "frequency": [0.0, 2.5, 9.0, 0.1],
        "presence": [1, 0.5, 9, -2],
    }
    case = Sampling(x, edits=edits, num_logprobs=2, **fields)
    ran = case.run()
    assert ran[0] == "apply_edits"
    assert "undo_edits" in ran
    case.assert_as_expected()
    assert case.values["sampled"][2, 0] != best[2]


def test_log_probabilities_are_of_the_raw_row_and_its_likeliest_tokens() -> None:
    x = logits(4, 300, seed=3)
    x[1, 295] = 20.0  # counts in the sum, but is not listed
    x[2, 4:] = float("-inf")  # fewer tokens than asked for
    x[3, [5, 90, 200]] = 15.0  # equal ones by id
    case = Sampling(x, limit=290, temperature=[0, 1.0, 0, 2.0], top_k=3, num_logprobs=[0, 5, 20, 4])
    case.run()
    case.assert_as_expected()
    assert case.values["top_ids"][3, :3].tolist() == [5, 90, 200]
    assert case.values["top_ids"][2, 4:].tolist() == [-1] * 16


def test_evenly_spaced_numbers_draw_each_token_in_proportion() -> None:
    # 20 evenly spaced numbers hit a token of probability p between 20 p - 1 and 20 p + 1 times.
    count, fields = 20, {"top_p": 0.9, "temperature": 1.3}
    row = logits(1, 60, seed=4, spread=1.0)
    case = Sampling(row.repeat(count, 1), uniform=(np.arange(count) + 0.5) / count, **fields)
    case.run(candidates=64)
    drawn = np.bincount(case.values["sampled"][:, 0].numpy(), minlength=60)
    x = row[0].double().numpy()
    kept = kept_tokens(x, 1.3, 0, 0.9, 0.0)
    probability = np.zeros(60)
    probability[kept] = np.exp(x[kept] / 1.3) / np.exp(x[kept] / 1.3).sum()
    assert (np.abs(drawn - count * probability) <= 1).all()


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_tokens_of_the_step_before_take_the_places_that_name_their_rows(tokens: int) -> None:
    random = np.random.default_rng(tokens)
    sampled = np.stack([random.integers(0, 1000, 7), np.zeros(7)], axis=1).astype(np.int32)
    sampled[3] = [-1, 1]  # no token: its request has ended
    ids = random.integers(0, 1000, tokens).astype(np.int32)
    source = random.integers(-1, 7, tokens).astype(np.int32)
    source[0] = 3
    expected = [
        max(sampled[row, 0], 0) if row >= 0 else known for row, known in zip(source, ids, strict=True)
    ]
    np.testing.assert_array_equal(feed_sampled(ids, source, sampled)[0], expected)
    tactic = next(t for t in sampling.TACTICS if t.kind == FEED)
    lowering = tactic.lower(Op(FEED, (Operand("sampled", ("N", 2), "i32"),), ()), context())
    (call,) = lowering.actions
    assert isinstance(call, Call)
    # The block is longer than the step: what lies behind belongs to others.
    inputs = {
        "token_ids": torch.from_numpy(np.append(ids, [-5] * 9).astype(np.int32)),
        "token_source": torch.from_numpy(np.append(source, [2] * 9).astype(np.int32)),
    }
    run_call(call, {"sampled": torch.from_numpy(sampled)}, (), {"T": tokens}, inputs)
    np.testing.assert_array_equal(inputs["token_ids"].numpy(), [*expected, *[-5] * 9])
