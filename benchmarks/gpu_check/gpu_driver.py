"""Loads machine code and launches it through the CUDA driver, in the context that torch uses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_C_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
#: Scratch of a block is addressed in units of this many bytes.
SCRATCH_ALIGNMENT = 128


class DriverError(Exception):
    """A call of the driver failed."""


@dataclass(frozen=True)
class KernelCode:
    """What a launch needs to know of a kernel, as in ``Program.kernels``."""

    name: str
    function: str
    image: bytes
    threads: int
    shared_bytes: int
    params: Sequence[str]
    hidden_pointers: int
    scratch_bytes: int


class Launch(Protocol):
    """A launch with its arguments in place, which can be made any number of times."""

    code: KernelCode

    def __call__(self, stream: int) -> None:
        """Launch on a stream, given by its handle."""


class Kernel(Protocol):
    """Code that can be launched."""

    code: KernelCode

    def bind(self, grid: Sequence[int], numbers: Sequence[int | float], scratch: int = 0) -> Launch:
        """A launch with its arguments in place; ``scratch``: address of the blocks' scratch."""


class Loaded:
    """A kernel on the device. Its memory lives as long as the process."""

    def __init__(self, driver: Driver, code: KernelCode) -> None:
        self.code = code
        self._driver = driver
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadDataEx", ctypes.byref(module), code.image, 0, None, None)
        name = code.function.encode()
        driver.call("cuModuleGetFunction", ctypes.byref(self._function), module, name)
        if code.shared_bytes > 48 << 10:
            size = ctypes.c_int(code.shared_bytes)
            driver.call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, size)

    def bind(self, grid: Sequence[int], numbers: Sequence[int | float], scratch: int = 0) -> Launch:
        """As ``Kernel.bind``."""
        if len(numbers) != len(self.code.params):
            raise DriverError(
                f"{self.code.name} has {len(self.code.params)} parameters; {len(numbers)} arguments are given"
            )
        hidden = [scratch] * self.code.hidden_pointers if self.code.scratch_bytes else []
        hidden = (hidden[:1] + [0] * self.code.hidden_pointers)[: self.code.hidden_pointers]
        kinds = [*self.code.params, *["ptr"] * len(hidden)]
        cells: list[Any] = [
            _C_TYPES[kind](number) for kind, number in zip(kinds, [*numbers, *hidden], strict=True)
        ]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        return _DriverLaunch(self._driver, self.code, self._function, (*grid, 1, 1)[:3], cells, pointers)


@dataclass
class _DriverLaunch:
    """A launch by cuLaunchKernel."""

    driver: Driver
    code: KernelCode
    function: Any
    grid: tuple[int, ...]
    #: Keeps what ``pointers`` points to.
    cells: list[Any]
    pointers: Any

    def __call__(self, stream: int) -> None:
        """As ``Launch``."""
        self.driver.call(
            "cuLaunchKernel",
            self.function,
            *map(ctypes.c_uint, self.grid),
            *map(ctypes.c_uint, (self.code.threads, 1, 1)),
            ctypes.c_uint(self.code.shared_bytes),
            ctypes.c_void_p(stream),
            self.pointers,
            None,
        )


class Driver:
    """``libcuda.so.1``. A context must be current: torch makes one with its first tensor on the device."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *args: Any) -> None:
        """Call a driver function; raises DriverError with the driver's words."""
        result = getattr(self._library, name)(*args)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            words = text.value.decode() if text.value else "unknown error"
            raise DriverError(f"{name}: {words} (error {result})")
