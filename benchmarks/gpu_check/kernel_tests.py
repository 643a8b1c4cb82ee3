"""Pytest plugin: the kernel tests of tests/plugins/cuda with another way to make a launch.

Recording notes which kernels the tests launch, so that they can be compiled here. Launching makes the same
launches on a GPU, with what was compiled, and hands the memory back to the tests, which compare it with
their float64 references.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from castiron.plugins.launch import TritonKernel
from gpu_driver import SCRATCH_ALIGNMENT, Driver, KernelCode, Loaded

#: The tests that launch kernels; the others beside them look at machine code.
TESTS = (
    "test_attention.py",
    "test_generic.py",
    "test_linear.py",
    "test_lora_kernels.py",
    "test_norm_and_rows.py",
    "test_rope_and_kv.py",
    "test_sampling.py",
)
INDEX = "kernels.json"
#: Bytes behind each buffer that no kernel may touch.
_GUARD = 1024
_GUARD_BYTE = 0xA5


def specialised(kernel: TritonKernel, args: Mapping[str, Any]) -> TritonKernel:
    """The kernel with the alignment of its arguments, as lowering would find it."""

    def is_aligned(name: str, argument: Any) -> bool:
        if isinstance(argument, torch.Tensor):
            return argument.storage_offset() * argument.element_size() % 16 == 0
        # Strides are constants of a program; counts change from step to step.
        return "stride" in name and argument % 16 == 0

    found = {name for name, argument in args.items() if is_aligned(name, argument)}
    return replace(kernel, aligned=kernel.aligned | found)


def kernel_key(kernel: TritonKernel) -> str:
    """Equal for kernels that compile to the same code."""
    parts = (
        kernel.function.__module__,
        kernel.function.fn.__qualname__,
        tuple(kernel.types.items()),
        tuple((name, repr(value)) for name, value in kernel.constants.items()),
        sorted(kernel.aligned),
        kernel.num_warps,
        kernel.num_stages,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class _Plugin(ABC):
    """Puts ``self.launch`` in the place of the interpreter, in the tests' own helper module."""

    def pytest_collection_finish(self) -> None:
        importlib.import_module("interpret").run_launch = self.launch  # type: ignore[attr-defined]

    @abstractmethod
    def launch(self, kernel: TritonKernel, grid: Sequence[int], args: Mapping[str, Any]) -> None: ...


class Recorder(_Plugin):
    """Notes kernels and computes nothing; the tests' comparisons must be off."""

    def __init__(self) -> None:
        self.kernels: dict[str, TritonKernel] = {}

    def launch(self, kernel: TritonKernel, grid: Sequence[int], args: Mapping[str, Any]) -> None:
        found = specialised(kernel, args)
        self.kernels[kernel_key(found)] = found


class Launcher(_Plugin):
    """Launches on this process's GPU what ``compile_kernel_tests.py`` has compiled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[str, dict[str, Any]] = json.loads((folder / INDEX).read_text())
        self._loaded: dict[str, Loaded] = {}
        torch.zeros(1, device="cuda")
        self._driver = Driver()

    def launch(self, kernel: TritonKernel, grid: Sequence[int], args: Mapping[str, Any]) -> None:
        loaded = self._load(specialised(kernel, args))
        buffers: dict[int, _Buffer] = {}
        numbers: list[int | float] = []
        for argument in args.values():
            if not isinstance(argument, torch.Tensor):
                numbers.append(argument)
                continue
            storage = argument.untyped_storage()
            buffer = buffers.setdefault(storage.data_ptr(), _Buffer(argument))
            numbers.append(buffer.address + int(argument.storage_offset()) * argument.element_size())
        blocks = 1
        for size in grid:
            blocks *= size
        scratch = torch.zeros(blocks * loaded.code.scratch_bytes + SCRATCH_ALIGNMENT, dtype=torch.uint8)
        scratch = scratch.cuda()
        loaded.bind(grid, numbers, scratch.data_ptr())(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for buffer in buffers.values():
            buffer.fetch(loaded.code.name)

    def _load(self, kernel: TritonKernel) -> Loaded:
        key = kernel_key(kernel)
        if key not in self._loaded:
            if key not in self._index:
                raise KeyError(f"the kit holds no kernel for this launch of {kernel.function.__name__}")
            fields = dict(self._index[key])
            image = (self._folder / fields.pop("file")).read_bytes()
            self._loaded[key] = Loaded(self._driver, KernelCode(image=image, **fields))
        return self._loaded[key]


class _Buffer:
    """A tensor's whole storage on the device, with a guard behind it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        guard = torch.full((_GUARD,), _GUARD_BYTE, dtype=torch.uint8)
        self._device = torch.cat([self._host, guard]).cuda()

    @property
    def address(self) -> int:
        return self._device.data_ptr()

    def fetch(self, kernel: str) -> None:
        found = self._device.cpu()
        self._host.copy_(found[:-_GUARD])
        if not bool((found[-_GUARD:] == _GUARD_BYTE).all()):
            raise AssertionError(f"{kernel} wrote behind the end of a buffer")
