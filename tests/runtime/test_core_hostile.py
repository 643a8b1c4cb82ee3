"""Whatever it is given, the core answers with an exception that says what is wrong; it never crashes."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.runtime import _core
from core_engine import arguments, generate, params, prompt


@pytest.fixture(scope="module")
def made(engine_folder: Path) -> dict[str, Any]:
    return arguments(engine_folder)


@pytest.fixture(scope="module")
def core(made: dict[str, Any]) -> Iterator[Any]:
    engine = _core.Engine(**made)
    yield engine
    engine.shutdown()


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """``put("values", 0, "name", 3)`` sets program["values"][0]["name"] = 3."""

    def change(arguments: dict[str, Any]) -> None:
        target: Any = arguments["program"]
        for key in path[:-2]:
            target = target[key]
        target[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("values", 0, "name", 3), r"program.values\[0\].name is 3; expected a string"),
        (put("values", 0, "dtype", "f64"), r"dtype is 'f64'; expected one of 'f32', 'i32', 'bf16', 'f16'"),
        (put("values", 0, "shape", []), "expected 1 to 6 sizes"),
        (put("values", 0, "shape", ["X"]), "expected one of the symbols T, N"),
        (put("values", 0, "shape", [0]), "expected an integer from 1"),
        (put("values", 0, "shape", [True]), "expected an integer from 1"),
        (put("values", 0, "shape", [1 << 40] * 6), "fewer than 2"),
        (put("values", 0, "offset", -64), r"values\[0\].offset is -64"),
        (put("values", 0, "offset", 1 << 70), r"values\[0\].offset is 1180591620717411303424"),
        (put("values", 0, "base", "nowhere"), "is 'nowhere'; expected the name of a value"),
        (put("values", 0, "base", "token_ids"), "is not a view on columns"),
        (put("values", 1, "name", "token_ids"), 'the name "token_ids" is used twice'),
        (put("values", 0, "surprise", 1), 'unknown field "surprise"; known: name, dtype'),
        (put("values", {}), "program.values is {}; expected a list"),
        (put("weights", 0, "layout", "panel16"), None),
        (put("weights", 1, "layout", "panel16x2"), "panel16x2 of bf16"),
        (put("weights", 0, "shape", [5, 7]), "its shape and layout need 140"),
        (put("steps", 0, "inputs", ["tokens"]), r"steps\[0\].inputs\[0\] is 'tokens'; expected the name"),
        (put("steps", 0, "weights", ["x"]), "expected the name of a weight"),
        (put("steps", 0, "kernel", "no_such_kernel"), "no_such_kernel"),
        (put("steps", 0, "attrs", {"scale": float("nan")}), "expected a finite number"),
        (put("steps", 0, "attrs", {"scale": None}), "expected a bool, int, float"),
        (put("steps", 0, "attrs", {"scale": [1, 2.5]}), "not both"),
        (put("kv_layers", 0, "head_dim", 0), "head_dim is 0"),
        (put("weights", 0, "dtype", "i2"), r"weights\[0\].dtype is 'i2'; expected one of"),
        (put("weights", 0, "layout", "panel16x4"), "panel16x4 of i8 or f8e4m3"),
        (put("kv_layers", 0, "dtype", "i4"), r"kv_layers\[0\].dtype is 'i4'"),
        (put("kv_layers", 0, "k_scale", [0.0]), "expected a positive float"),
        (put("kv_layers", 0, "v_scale", [1.0] * 99), "one scale for each KV head, or none"),
        (put("limits", "max_num_tokens", 0), "max_num_tokens is 0"),
        (put("limits", {}), "limits.max_batch_size is missing"),
        (put("format", [2, 0]), "expected format 1.x"),
        (put("format", "10"), "program.format is '10'; expected a list"),
        (put("target", "tpu"), 'target "tpu"'),
        (put("vocab_size", 10**9), "vocab_size is 1000000000"),
        (put("arena_bytes", 0), None),
        (lambda a: a.update(program=[]), r"program is \[\]; expected a dict"),
        (lambda a: a["tensors"].pop("embed"), r'tensors\["embed"\] is missing'),
        (lambda a: a["tensors"].update(embed=(0, 1 << 50)), "expected an integer from 0"),
        (lambda a: a["tensors"].update(embed=(1, a["tensors"]["embed"][1])), "a multiple of 4"),
        (lambda a: a["tensors"].update(embed=7), "expected a list"),
        (lambda a: a["options"].update(num_thread=1), 'unknown field "num_thread"'),
        (lambda a: a["options"].update(num_threads=-1), "options.num_threads is -1"),
        (lambda a: a["options"].update(huge_pages=1), "options.huge_pages is 1; expected True or False"),
        (lambda a: a["options"].update(isa="mmx"), "mmx"),
        (lambda a: a["options"].update(max_batch_size=5), "max_batch_size is 5; the engine was built for"),
        (lambda a: a.update(weights_path="/nowhere"), "cannot open the weights file /nowhere"),
        (lambda a: a.update(weights_path="/tmp"), "weights file /tmp"),
    ],
)  # fmt: skip
def test_a_program_that_is_wrong_is_refused_with_the_place(
    made: dict[str, Any], change: Callable[[dict[str, Any]], Any], message: str | None
) -> None:
    broken = copy.deepcopy(made)
    change(broken)
    with pytest.raises(ValueError, match=message or "."):
        _core.Engine(**broken)


def test_a_program_with_random_damage_is_refused_or_runs(made: dict[str, Any]) -> None:
    junk = [
        None,
        -1,
        0,
        1,
        3,
        1 << 40,
        1 << 63,
        1 << 80,
        -0.5,
        float("inf"),
        "",
        "x",
        "T",
        "q",
        b"",
        [],
        [1],
        {},
        True,
    ]
    seed = 1
    rng = random.Random(seed)
    refused = 0
    for _ in range(3000):
        broken = copy.deepcopy(made)
        target: Any = rng.choice([broken["program"], broken["program"], broken["tensors"]])
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(target[key], dict | list) and target[key] and rng.random() < 0.85:
                target = target[key]
                continue
            if isinstance(target, tuple):
                break
            action = rng.random()
            if action < 0.2:
                del target[key]
            elif action < 0.3 and isinstance(target, list):
                target.insert(key, copy.deepcopy(rng.choice(target)))
            else:
                target[key] = rng.choice(junk)
            break
        try:
            core = _core.Engine(**broken)
        except (ValueError, MemoryError):
            refused += 1
            continue
        with contextlib.suppress(ValueError):  # the limits may have shrunk below the request
            generate(core, [1, 2, 3], max_tokens=3)
        core.shutdown()
    assert refused > 1500, f"seed {seed}"


@pytest.mark.parametrize(
    ("tokens", "fields", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([53], {}, "token id 53 is in the prompt; the vocabulary has 53 ids"),
        ([-1], {}, "token id -1"),
        ([1] * 96, {"max_tokens": 1}, "maximum context length is 96 tokens; the prompt has 96"),
        ([1] * 97, {"max_tokens": 0}, "maximum context length"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"min_tokens": 99}, "min_tokens is 99"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
        ([1], {"min_p": 2.0}, "min_p is 2"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ([1], {"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ([1], {"stop_token_ids": [53]}, "an entry of stop_token_ids is 53"),
        ([1], {"logprobs": 1000}, "logprobs is 1000"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(
    core: Any, tokens: list[int], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        core.submit(prompt(tokens), params(**fields))


@pytest.mark.parametrize(
    "bad",
    [None, 3, "x", [1, 2], np.array([1, 2]), np.array([1.5], np.float32), np.zeros((2, 2), np.int32),
     np.arange(10, dtype=np.int32)[::2]],
)  # fmt: skip
def test_a_prompt_of_another_type_is_a_type_error(core: Any, bad: object) -> None:
    with pytest.raises(TypeError):
        core.submit(bad, params())


def test_parameters_of_another_type_are_type_errors() -> None:
    made = _core.SamplingParams()
    for name, value in (("max_tokens", 1 << 40), ("seed", -1), ("seed", 1 << 64), ("temperature", "hot")):
        with pytest.raises(TypeError):
            setattr(made, name, value)


def test_an_engine_object_that_was_never_made_does_not_crash() -> None:
    hollow = _core.Engine.__new__(_core.Engine)
    with pytest.raises(TypeError), pytest.warns(RuntimeWarning, match="uninitialized"):
        hollow.poll(0.0)


def test_odd_timeouts_and_ids_do_no_harm(core: Any) -> None:
    for timeout in (float("nan"), -1.0, -float("inf"), 0):
        assert core.poll(timeout) == []
    for request_id in (0, -1, 2**63 - 1):
        core.cancel(request_id)
