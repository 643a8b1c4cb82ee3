"""Which of an engine's programs runs here, and why: its targets against this machine's devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from castiron.errors import EngineError

if TYPE_CHECKING:
    from ..engines import Engine

#: Machine code for these runs on later minors of the same major. From sm_90 on kernels use instructions of
#: the one architecture ("sm_90a"), which no other has.
_PORTABLE = (80, 86, 89)
_PTX = re.compile(r"compute_(\d+)")
_CUBIN = re.compile(r"sm_(\d+)")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows. ``compute_capability``: ten times major plus minor."""

    index: int
    name: str
    compute_capability: int
    total_memory: int = 0
    multiprocessors: int = 0

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, sm_{self.compute_capability})"


@dataclass(frozen=True)
class DeviceChoice:
    """The program that will run, where, and the reason in a sentence.

    Attributes:
        target: one of the engine's targets.
        gpu: None for the CPU.
    """

    target: str
    gpu: Gpu | None
    why: str

    def __str__(self) -> str:
        return f"{self.gpu or 'CPU'}, program {self.target} ({self.why})"


def choose_device(engine: Engine, device: str, probe: Mapping[str, Any]) -> DeviceChoice:
    """Choose among the engine's programs.

    device: "auto" prefers a GPU that has a program and falls back to the CPU; "cuda", "cuda:1" and "host"
    insist. probe: what ``_core.cuda_probe()`` returned.

    Raises EngineError that lists what the engine holds and what the machine has.
    """
    wanted = re.fullmatch(r"auto|host|cuda(?::(\d{1,3}))?", device) if isinstance(device, str) else None
    if wanted is None:
        raise EngineError(f"device is {device!r}; expected auto, host, cuda, or cuda:INDEX")
    if device == "host":
        return DeviceChoice(engine.program("host").target, None, "asked for")
    gpus = [Gpu(**entry) for entry in probe["devices"]]
    if wanted[1] is not None:
        gpus = [gpu for gpu in gpus if gpu.index == int(wanted[1])]
    driver = int(probe["driver"])
    runnable = [target for target in engine.targets if _needed_driver(engine, target) <= driver]
    for gpu in gpus:
        target = match_target(runnable, gpu.compute_capability)
        if target is not None:
            better = match_target(engine.targets, gpu.compute_capability)
            return DeviceChoice(target, gpu, _reason(target, gpu, _too_old(engine, better, target, driver)))
    missing = _why_no_gpu(engine, device, gpus, probe)
    if device == "auto" and "host" in engine.targets:
        only = engine.targets == ["host"]
        return DeviceChoice("host", None, "its only target" if only else f"the CPU, because {missing}")
    raise EngineError(f"{engine.path} cannot run here: {missing}. {_advice(engine, gpus)}")


def match_target(targets: Sequence[str], compute_capability: int) -> str | None:
    """The best of ``targets`` for a GPU: its own machine code, the nearest that it runs, PTX, or None."""
    code = [int(m[1]) for m in map(_CUBIN.fullmatch, targets) if m]
    if compute_capability in code:
        return f"sm_{compute_capability}"
    same_major = [
        cc
        for cc in code
        if cc in _PORTABLE and cc // 10 == compute_capability // 10 and cc <= compute_capability
    ]
    if same_major:
        return f"sm_{max(same_major)}"
    ptx = [int(m[1]) for m in map(_PTX.fullmatch, targets) if m]
    usable = [cc for cc in ptx if cc <= compute_capability]
    return f"compute_{max(usable)}" if usable else None


def _needed_driver(engine: Engine, target: str) -> int:
    """The oldest driver, as cuDriverGetVersion counts, that takes a program's machine code: one of the same
    major version of CUDA as the compiler that made it. PTX is written for the oldest of all.
    """
    if _CUBIN.fullmatch(target) is None:
        return 0
    majors = [kernel.resources.get("cuda_major") for kernel in engine.program(target).kernels]
    return 1000 * max((major for major in majors if isinstance(major, int)), default=0)


def _too_old(engine: Engine, better: str | None, target: str, driver: int) -> str:
    """Why ``better`` is not what runs; empty where it is."""
    if better is None or better == target:
        return ""
    return (
        f"the driver is of CUDA {_cuda(driver)} and the code for {better} needs CUDA "
        f"{_cuda(_needed_driver(engine, better))}: update it for full speed"
    )


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _reason(target: str, gpu: Gpu, too_old: str) -> str:
    if too_old:
        return too_old
    if target == f"sm_{gpu.compute_capability}":
        return "machine code for this very architecture"
    if target.startswith("sm_"):
        return f"machine code for {target} runs on sm_{gpu.compute_capability} (same major version)"
    return (
        f"no machine code for sm_{gpu.compute_capability}; the driver compiles the engine's PTX at load "
        f"(rebuild with --target sm_{gpu.compute_capability} for full speed)"
    )


def _why_no_gpu(engine: Engine, device: str, gpus: Sequence[Gpu], probe: Mapping[str, Any]) -> str:
    if gpus:
        found = ", ".join(map(str, gpus))
        driver = int(probe["driver"])
        for gpu in gpus:
            target = match_target(engine.targets, gpu.compute_capability)
            if target is not None:
                return f"{_too_old(engine, target, '', driver)} ({found})"
        return f"it was built for {', '.join(engine.targets)}, and the machine has {found}"
    if probe["devices"]:
        return f"there is no GPU {device.removeprefix('cuda:')}; the driver shows {len(probe['devices'])}"
    return f"no GPU can be used ({probe['error'] or 'the driver shows none'})"


def _advice(engine: Engine, gpus: Sequence[Gpu]) -> str:
    if gpus and match_target(engine.targets, gpus[0].compute_capability) is not None:
        return "Update the driver, or rebuild the engine without --no-ptx"
    if gpus:
        return f"Rebuild it: {engine.rebuild_command} --target sm_{gpus[0].compute_capability}"
    if "host" in engine.targets:
        return "Give --device host to run it on the CPU"
    return f"To run it on the CPU, rebuild it: {engine.rebuild_command} --target host"
