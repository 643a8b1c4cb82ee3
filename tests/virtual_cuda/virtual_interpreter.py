"""Runs the launches of a CUDA program on the virtual device's own memory: Triton kernels in its interpreter,
those in CUDA C++ compiled for the CPU (``virtual_cpp``).
"""

from __future__ import annotations

import importlib
import inspect
import struct
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from castiron.build.trials.emulate import EmulatedKernel
from castiron.build.trials.triton_on_cpu import argument, interpreting, rewritten
from castiron.engines.program import Kernel, Program
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder
from virtual_cpp import run_emulated
from virtual_driver import Launch, VirtualDriver, image_hash
from virtual_memory import AccessChecker, checking
from virtual_operands import Operands, Region

_FORMATS = {"ptr": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
_SIZES = {"ptr": 8, "i32": 4, "i64": 8, "f32": 4}


@dataclass(frozen=True)
class _Triton:
    """The Python function behind a kernel and the names of its run-time parameters."""

    function: Any
    names: tuple[str, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class _Known:
    """A kernel of a program, its number there, and what runs it."""

    kernel: Kernel
    index: int
    operands: Operands
    code: _Triton | EmulatedKernel


class Interpreter:
    """Executes launches for a ``VirtualDriver``; knows the kernels of the programs that were added.

    From then on Triton's language means the interpreter in this process.

    Attributes:
        launches: how often each kernel (by ``Kernel.name``) ran.
        turn: every launch takes it; who holds it keeps all requests where they are.
    """

    def __init__(self, driver: VirtualDriver) -> None:
        self._driver = driver
        self._known: dict[tuple[int, str], _Known] = {}
        self.launches: Counter[str] = Counter()
        self.turn = threading.Lock()
        # For good: patching the language around each launch takes longer than the kernels of a tiny model.
        self._patches = ExitStack()
        self._patches.enter_context(interpreting())
        # 32-bit offsets cannot overflow in tiny models, and looking for it takes a third of the time.
        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
        driver.execute_with(self.run)

    def add_program(
        self,
        program: Program,
        images: Mapping[str, bytes],
        emulated: Mapping[int, EmulatedKernel] | None = None,
    ) -> None:
        """Learn the kernels of a program; ``images`` as of ``Engine.kernel_images``.

        ``emulated``: those in CUDA C++, by number.
        """
        operands = Operands(program)
        for index, kernel in enumerate(program.kernels):
            code = (emulated or {}).get(index) or _find(kernel)
            known = _Known(kernel, index, operands, code)
            for entry in (kernel.image, kernel.ptx):
                if entry:
                    self._known[image_hash(images[entry]), kernel.function] = known

    def run(self, launch: Launch) -> None:
        """Execute one launch. Raises IndexError for an access outside of live memory."""
        known = self._known.get((launch.image_hash, launch.function))
        if known is None:
            raise LookupError(f"no program that was added has kernel {launch.function} with this image")
        _check(known.kernel, launch)
        with self.turn:
            self.launches[known.kernel.name] += 1
            given = zip(known.kernel.params, launch.params, strict=False)
            numbers = [struct.unpack(_FORMATS[kind], raw)[0] for kind, raw in given]
            regions = known.operands.regions(known.index, numbers)
            if isinstance(known.code, EmulatedKernel):
                run_emulated(known.code, known.kernel, launch, regions or ())
            else:
                _run_grid(self._driver, known.kernel, known.code, launch, numbers, regions)


def _find(kernel: Kernel) -> _Triton:
    module, _, name = kernel.source.partition(":")
    function = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(function.fn).parameters
    constants = {
        key: tuple(value) if isinstance(value, list) else value for key, value in kernel.constants.items()
    }
    names = tuple(parameter for parameter in parameters if parameter not in constants)
    if not len(names) == len(kernel.types) == len(kernel.params):
        raise ValueError(
            f"kernel {kernel.name}: {len(kernel.params)} params, {len(kernel.types)} types, and "
            f"{kernel.source} has {len(names)} run-time parameters: {', '.join(names)}"
        )
    return _Triton(function, names, constants)


def _check(kernel: Kernel, launch: Launch) -> None:
    """The engine's description of the kernel, the image's parameter layout and the launch must agree."""
    expected = [_SIZES[kind] for kind in kernel.params] + [8] * kernel.hidden_pointers
    found = [len(raw) for raw in launch.params]
    if found != expected:
        raise ValueError(
            f"kernel {kernel.name}: the image's parameters have {found} bytes, the program's {expected}"
        )
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads != kernel.threads or launch.shared_bytes != kernel.shared_bytes:
        raise ValueError(
            f"kernel {kernel.name}: launched with {threads} threads and {launch.shared_bytes} bytes of "
            f"shared memory; the program says {kernel.threads} and {kernel.shared_bytes}"
        )
    hidden = [any(raw) for raw in launch.params[len(kernel.params) :]]
    if hidden != [bool(kernel.scratch_bytes) and index == 0 for index in range(len(hidden))]:
        raise ValueError(
            f"kernel {kernel.name}: only the first hidden pointer may be set, and only with scratch memory"
        )


def _run_grid(
    driver: VirtualDriver,
    kernel: Kernel,
    code: _Triton,
    launch: Launch,
    numbers: Sequence[int | float],
    regions: Sequence[Region] | None,
) -> None:
    args = {
        name: argument(type_name, number)
        for name, type_name, number in zip(code.names, kernel.types, numbers, strict=True)
    }
    given = zip(code.names, kernel.params, numbers, strict=True)
    pointers = {name: int(number) for name, kind, number in given if kind == "ptr"}
    block = (0, 0, 0)

    def describe(address: int) -> str:
        below = [(base, name) for name, base in pointers.items() if base <= address]
        where = "below every pointer argument"
        if below:
            base, name = max(below)
            where = f"byte {address - base} of argument {name}"
        return f"kernel {kernel.name}, block {block} of {launch.grid}: {where}"

    function = rewritten(code.function).rewrite()
    call = inspect.getcallargs(code.function.fn, **args, **code.constants)
    with np.errstate(all="ignore"), checking(AccessChecker(driver, describe, regions)):
        interpreter_builder.set_grid_dim(*launch.grid)
        # Backwards: a kernel must not depend on the order of its blocks, and GPUs start with the first.
        for block in product(*(range(size - 1, -1, -1) for size in launch.grid)):
            interpreter_builder.set_grid_idx(*block)
            function(**call)
