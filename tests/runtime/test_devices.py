"""Which program of an engine runs on which device, and what is said when none does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from castiron.runtime.devices import choose_device, match_target

from castiron.errors import EngineError

NO_DRIVER = {"devices": [], "driver": 0, "error": "libcuda.so.1 cannot be loaded"}


def probe(*capabilities: int) -> dict[str, Any]:
    gpus = [
        {
            "index": index,
            "name": f"Test GPU {cc}",
            "compute_capability": cc,
            "total_memory": 1 << 34,
            "multiprocessors": 100,
        }
        for index, cc in enumerate(capabilities)
    ]
    return {"devices": gpus, "driver": 13000, "error": ""}


def engine(*targets: str, cuda_major: int = 12) -> Any:
    def program(target: str) -> Any:
        if target not in targets:
            raise EngineError(f"no program for {target}")
        kernel = SimpleNamespace(resources={"cuda_major": cuda_major, "registers": 32})
        return SimpleNamespace(target=target, kernels=[kernel])

    return SimpleNamespace(
        path=Path("my-engine"),
        targets=list(targets),
        program=program,
        rebuild_command="castiron build my-model -o my-engine",
    )


@pytest.mark.parametrize(
    ("targets", "capability", "expected"),
    [
        (["sm_80", "sm_90", "compute_80"], 90, "sm_90"),
        (["sm_80", "sm_86"], 89, "sm_86"),  # nearest of the same major version
        (["sm_80", "sm_89"], 86, "sm_80"),  # never code of a later minor
        (["sm_89", "compute_80"], 86, "compute_80"),
        (["sm_90", "compute_80"], 100, "compute_80"),
        (["sm_100", "compute_80"], 103, "compute_80"),  # sm_100a code runs on 10.0 alone
        (["sm_120"], 121, None),
        (["sm_90"], 80, None),
        (["host"], 90, None),
        (["compute_80"], 75, None),
    ],
)
def test_the_nearest_program_that_the_gpu_runs_is_matched(
    targets: list[str], capability: int, expected: str | None
) -> None:
    assert match_target(targets, capability) == expected


def test_auto_prefers_a_gpu_and_says_why() -> None:
    choice = choose_device(engine("host", "sm_90"), "auto", probe(90))
    assert (choice.target, choice.gpu.index if choice.gpu else None) == ("sm_90", 0)
    assert "very architecture" in str(choice)


def test_auto_takes_the_first_gpu_that_has_a_program() -> None:
    choice = choose_device(engine("host", "sm_90"), "auto", probe(75, 90))
    assert choice.gpu is not None
    assert choice.gpu.index == 1


def test_auto_falls_back_to_the_cpu_and_names_the_reason() -> None:
    choice = choose_device(engine("host", "sm_90"), "auto", NO_DRIVER)
    assert choice.gpu is None
    assert "libcuda.so.1 cannot be loaded" in choice.why


def test_ptx_is_chosen_for_an_architecture_to_come_with_a_hint() -> None:
    choice = choose_device(engine("sm_90", "compute_80"), "cuda", probe(130))
    assert choice.target == "compute_80"
    assert "--target sm_130" in choice.why


def test_a_gpu_without_a_program_is_refused_with_both_sides_and_the_command() -> None:
    with pytest.raises(EngineError, match=r"built for sm_90, and the machine has GPU 0 .*sm_80") as error:
        choose_device(engine("sm_90"), "auto", probe(80))
    assert "castiron build my-model -o my-engine --target sm_80" in str(error.value)


def test_insisting_on_a_gpu_does_not_fall_back() -> None:
    with pytest.raises(EngineError, match=r"libcuda.so.1 cannot be loaded.*--device host"):
        choose_device(engine("host", "sm_90"), "cuda", NO_DRIVER)


def test_an_index_beyond_the_gpus_is_refused() -> None:
    with pytest.raises(EngineError, match="there is no GPU 3; the driver shows 1"):
        choose_device(engine("sm_90"), "cuda:3", probe(90))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "", "HOST", None, 0])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(EngineError, match="expected auto, host, cuda"):
        choose_device(engine("host"), device, NO_DRIVER)


def test_a_driver_that_is_older_than_the_compiler_gets_ptx() -> None:
    """Machine code runs on drivers of the major version of CUDA that made it; PTX is for the oldest."""
    old = {**probe(100), "driver": 12080}
    choice = choose_device(engine("sm_100", "compute_80", cuda_major=13), "auto", old)
    assert choice.target == "compute_80"
    assert "the driver is of CUDA 12.8 and the code for sm_100 needs CUDA 13.0" in choice.why
    assert choose_device(engine("sm_100", "compute_80", cuda_major=13), "auto", probe(100)).target == "sm_100"
    assert choose_device(engine("sm_100", "compute_80", cuda_major=12), "auto", old).target == "sm_100"


def test_an_old_driver_and_no_ptx_is_told_what_to_do() -> None:
    old = {**probe(100), "driver": 12080}
    with pytest.raises(
        EngineError, match=r"needs CUDA 13\.0.*Update the driver, or rebuild the engine without"
    ):
        choose_device(engine("sm_100", cuda_major=13), "cuda", old)
