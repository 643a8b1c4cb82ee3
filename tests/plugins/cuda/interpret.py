"""Runs what CUDA tactics ask for on this machine: launches become loops of the Triton interpreter.

``run_call`` resolves a Call's launches on torch tensors, as the device resolves them on its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from castiron.build.trials.triton_on_cpu import interpret, interpreting, rewritten
from castiron.plugins import Call
from castiron.plugins.launch import Param, TritonKernel

#: Of the device that launches are counted for.
_MULTIPROCESSORS = 4
TORCH = {
    "f32": torch.float32,
    "i32": torch.int32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "f8e4m3": torch.float8_e4m3fn,
}


def run_call(
    call: Call,
    values: Mapping[str, torch.Tensor],
    weights: Sequence[torch.Tensor] = (),
    counts: Mapping[str, int] | None = None,
    step: Mapping[str, torch.Tensor] | None = None,
    caches: Mapping[tuple[str, int], torch.Tensor] | None = None,
    slots: torch.Tensor | None = None,
) -> list[str]:
    """Run the launches whose condition holds. Returns the names of their functions.

    values: by name; a column view is a strided tensor. weights: as call.weights. counts: of the symbols.
    step: arrays of the step's input block. caches: ("k_cache" | "v_cache", layer) to memory. slots: memory of
    adapters, of elements of two bytes.
    """
    counts, step, caches = counts or {}, step or {}, caches or {}

    def resolve(param: Param) -> Any:
        match param.kind:
            case "value":
                name = str(param.of)
                return values[name] if name in values else step[name]
            case "row_stride":
                tensor = values[str(param.of)]
                return tensor.stride(0)
            case "weight":
                return weights[int(param.of)]
            case "input":
                return step[str(param.of)]
            case "adapter":
                assert slots is not None
                return slots[int(param.of) // 2 :]
            case "k_cache" | "v_cache":
                return caches[param.kind, int(param.of)]
            case "size":
                return counts[str(param.of)]
            case _:
                return param.of

    ran = []
    for launch in call.launches:
        when = launch.when
        if when is not None and not when.low <= counts[when.of] <= when.high:
            continue
        kernel = launch.kernel
        assert isinstance(kernel, TritonKernel), "only Triton kernels can be interpreted"
        names = list(kernel.types)
        assert len(names) == len(launch.args), f"{len(names)} parameters, {len(launch.args)} arguments"
        args = dict(zip(names, map(resolve, launch.args), strict=True))
        for name, argument in args.items():
            # Words of codes are bytes to some kernels.
            if kernel.types[name] == "*u8" and argument.dtype == torch.uint32:
                args[name] = argument.view(torch.uint8)
        for name, argument in args.items():
            _check_type(kernel, name, argument)
        grid = [dimension.blocks(counts, _MULTIPROCESSORS) for dimension in launch.grid]
        if 0 not in grid:
            run_launch(kernel, grid, args)
            ran.append(kernel.function.__name__)
    return ran


def run_launch(kernel: TritonKernel, grid: Sequence[int], args: Mapping[str, Any]) -> None:
    """Make one launch; benchmarks/gpu_check puts one on a GPU in its place."""
    interpret(kernel.function, grid, args, kernel.constants)


def _check_type(kernel: TritonKernel, name: str, argument: Any) -> None:
    """A kernel compiled for one element type must not be given another."""
    declared = kernel.types[name]
    if isinstance(argument, torch.Tensor):
        found = "*" + triton.runtime.jit.mangle_type(argument).lstrip("*")
        assert found == declared, f"{kernel.function.__name__}: {name} is {found}, compiled for {declared}"
    else:
        assert declared in ("i32", "i64", "fp32"), f"{name} is a number, compiled for {declared}"


__all__ = ["TORCH", "interpret", "interpreting", "rewritten", "run_call", "run_launch"]
