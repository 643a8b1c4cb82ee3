"""What users are told when a driver is missing, old or failing, and that no request is left waiting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from castiron.build import BuildOptions, build
from castiron.engines import open_engine
from castiron.runtime.loading import load_core
from castiron.runtime.options import RuntimeOptions
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

from castiron.errors import EngineError

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "graph"), str(_TESTS / "runtime")]
from core_engine import finish, params, prompt  # noqa: E402
from zoo import make_checkpoint  # noqa: E402

OUT_OF_MEMORY, ILLEGAL_ADDRESS, LAUNCH_FAILED, ECC = 2, 700, 719, 214


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By targets: "fat" has host, sm_80, sm_90 and PTX; "sm_80" that alone."""
    folder = tmp_path_factory.mktemp("faults")
    make_checkpoint("llama", folder / "model")
    limits: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 64, "verify": "never"}
    with without_compiler():
        build(folder / "model", folder / "fat", BuildOptions(targets=("host", "sm_80", "sm_90"), **limits))
        build(folder / "model", folder / "sm_80", BuildOptions(targets=("sm_80",), ptx=False, **limits))
    return {name: folder / name for name in ("fat", "sm_80")}


def load(
    path: Path, device: str, cc: int | None, inject: tuple[str, int, int] | None = None, **driver: int
) -> str:
    """What runs, or what the user is told."""
    if cc is not None:
        gpu = VirtualGpu(path, cc, **driver)
        if inject is not None:
            gpu.driver.inject(*inject)
    try:
        loaded = load_core(open_engine(path), RuntimeOptions(device=device, kv_cache_blocks=4, num_threads=1))
    except EngineError as error:
        return f"EngineError: {error}"
    loaded.core.shutdown()
    return str(loaded.choice)


@pytest.mark.parametrize(
    ("name", "device", "cc", "driver", "expected"),
    [
        ("fat", "auto", None, {}, ["CPU", "libcuda.so.1"]),
        ("fat", "cuda", None, {}, ["EngineError", "libcuda.so.1 cannot be loaded", "driver 525"]),
        (
            "fat",
            "cuda",
            90,
            {"driver_version": 11080},
            ["EngineError", "speaks CUDA 11.8", "update the driver"],
        ),
        ("fat", "cuda", 90, {"devices": 0}, ["EngineError", "no GPU can be used"]),
        ("fat", "auto", 89, {}, ["program sm_80", "runs on sm_89"]),
        ("fat", "auto", 100, {}, ["program compute_80", "PTX"]),
        ("sm_80", "auto", 90, {}, ["EngineError", "built for sm_80", "sm_90", "--target sm_90"]),
        ("fat", "cuda", 90, {"memory": 200 << 10}, ["EngineError", "memory", "KiB"]),
    ],
)
def test_what_cannot_run_is_said_with_the_way_out(
    engines: dict[str, Path],
    name: str,
    device: str,
    cc: int | None,
    driver: dict[str, int],
    expected: list[str],
) -> None:
    told = in_process(load, engines[name], device, cc, **driver)
    for words in expected:
        assert words in told, told


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("cuMemAlloc", OUT_OF_MEMORY, "memory"),
        ("cuModuleLoadDataEx", LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuStreamCreate", OUT_OF_MEMORY, "memory"),
        ("cuGraphInstantiate", OUT_OF_MEMORY, "CUDA graphs do not fit"),
    ],
)
def test_a_failure_while_loading_is_an_engine_error(
    engines: dict[str, Path], function: str, code: int, words: str
) -> None:
    told = in_process(load, engines["fat"], "cuda", 90, (function, code, 1))
    assert told.startswith("EngineError"), told
    assert words in told


def lose_device(path: Path, function: str, code: int, at_call: int) -> dict[str, Any]:
    gpu = VirtualGpu(path, 90)
    core = load_core(open_engine(path), RuntimeOptions(device="cuda", kv_cache_blocks=8)).core
    # The stream is waited for where no step is queued behind: where tokens are wanted on the host.
    fields = {"repetition_penalty": 1.1} if function == "cuStreamSynchronize" else {}
    # All are in before the fault, which a slow machine would else meet too soon or too late.
    with gpu.interpreter.turn:
        ids = [core.submit(prompt([5 + n, 9, 77]), params(max_tokens=25, **fields)) for n in range(3)]
        gpu.driver.inject(function, code, at_call)
    outcomes = finish(core, ids, seconds=60)
    told = {"errors": [outcomes[i].error for i in ids], "reasons": [outcomes[i].finish_reason for i in ids]}
    try:
        later = core.submit(prompt([1, 2]), params(max_tokens=1))
        told["later"] = finish(core, [later], seconds=60)[later].error
    except Exception as error:
        told["later"] = f"{type(error).__name__}: {error}"
    core.shutdown()
    return told


@pytest.mark.parametrize(
    ("function", "code", "at_call", "name"),
    [
        ("cuStreamSynchronize", ILLEGAL_ADDRESS, 1, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuGraphLaunch", LAUNCH_FAILED, 2, "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuEventSynchronize", ECC, 3, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ],
)
def test_a_lost_device_ends_every_request_and_says_so_to_later_ones(
    engines: dict[str, Path], function: str, code: int, at_call: int, name: str
) -> None:
    told = in_process(lose_device, engines["fat"], function, code, at_call)
    assert told["reasons"] == ["error"] * 3
    assert all(name in error for error in told["errors"]), told
    assert told["later"]
