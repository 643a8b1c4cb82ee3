"""SamplingParams: what is refused, what is taken, and that the message says what to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from castiron.runtime.request_errors import ParameterError
from castiron.runtime.sampling_params import SamplingParams

from castiron.errors import RequestError

BAD = [
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_tokens", True),
    pytest.param("max_tokens", 10**5000, id="max_tokens-of-5001-digits"),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**64),
    ("seed", "1"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", 1e9),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop", ["x"] * 65),
    ("stop", ["x" * 1025]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 7),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [10**5000]),
    ("logprobs", -1),
    ("logprobs", 101),
    ("logprobs", True),
    ("n", 0),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name_with_what_was_expected(name, value):
    with pytest.raises(ParameterError, match=f"{name} is .*expected") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_contradicting_values_are_refused():
    with pytest.raises(RequestError, match=r"min_tokens is 5.*max_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_numpy_numbers_and_single_stop_strings_are_taken():
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        seed=np.uint64(2**63),
        stop="end",
        stop_token_ids=np.array([1, 2]),
    )
    assert (params.max_tokens, params.temperature, params.seed) == (5, 0.5, 2**63)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)


def test_negative_seeds_name_streams_of_their_own():
    assert SamplingParams(seed=-1).seed == 2**64 - 1


def test_outputs_of_one_seed_differ_in_seed():
    assert [SamplingParams(seed=2**64 - 1, n=3).for_request(k).seed for k in range(3)] == [2**64 - 1, 0, 1]
    assert SamplingParams(n=3).for_request(2).seed is None


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0
