"""The stand-in driver in this process: configuration, faults, counters. One per process, loaded once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from virtual_library import driver_library

#: Most shared memory of one block by compute capability (CUDA C++ programming guide).
_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719


class LaunchRecord(ctypes.Structure):
    """A launch as the driver hands it to the executor; the struct of the same name in driver/state.h."""

    _fields_ = (
        ("function", ctypes.c_char_p),
        ("image_hash", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("param_count", ctypes.c_uint32),
        ("param_offsets", ctypes.POINTER(ctypes.c_uint32)),
        ("param_sizes", ctypes.POINTER(ctypes.c_uint32)),
        ("params", ctypes.POINTER(ctypes.c_uint8)),
    )


@dataclass(frozen=True)
class Launch:
    """A kernel launch: ``params`` are the raw bytes of each argument."""

    function: str
    image_hash: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: tuple[bytes, ...]


@dataclass(frozen=True)
class Alive:
    """Driver objects that exist."""

    device_allocations: int
    pinned_allocations: int
    modules: int
    streams: int
    events: int
    graphs: int


_EXECUTOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchRecord))


class VirtualDriver:
    """The one virtual device of this process.

    Args:
        compute_capability: 90 for sm_90.
        options: devices, driver_version (13000 for 13.0), multiprocessors, and in bytes memory, shared_optin.
    """

    def __init__(self, compute_capability: int = 90, **options: int) -> None:
        # RTLD_GLOBAL and the soname: a later dlopen("libcuda.so.1") of anybody finds this library.
        self.library = ctypes.CDLL(str(driver_library()), mode=ctypes.RTLD_GLOBAL)
        self.library.vcuda_configure.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self.library.vcuda_inject.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
        self.library.vcuda_report.argtypes = [ctypes.c_char_p]
        self.library.vcuda_ranges.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.vcuda_ranges.restype = ctypes.c_size_t
        self.library.vcuda_memory_version.restype = ctypes.c_uint64
        for name in ("vcuda_counters", "vcuda_faults", "vcuda_explain"):
            getattr(self.library, name).restype = ctypes.c_size_t
        self.library.vcuda_explain.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_char_p,
            ctypes.c_size_t,
        ]
        self._callback: Any = None
        self._ranges: tuple[int, np.ndarray[Any, Any]] = (-1, np.zeros((0, 2), np.uint64))
        options.setdefault("shared_optin", _SHARED[compute_capability])
        for key, value in {"compute_capability": compute_capability, **options}.items():
            if not self.library.vcuda_configure(key.encode(), value):
                raise ValueError(f"the virtual device has no option {key!r}")

    def execute_with(self, execute: Callable[[Launch], None]) -> None:
        """Run kernels by ``execute``; its IndexError is an illegal address, others are a failed launch."""

        def callback(pointer: Any) -> int:
            record = pointer.contents
            params = tuple(
                bytes(
                    record.params[record.param_offsets[i] : record.param_offsets[i] + record.param_sizes[i]]
                )
                for i in range(record.param_count)
            )
            launch = Launch(
                record.function.decode(),
                record.image_hash,
                tuple(record.grid),
                tuple(record.block),
                record.shared_bytes,
                params,
            )
            try:
                execute(launch)
            except IndexError as error:
                self.library.vcuda_report(str(error).encode())
                return ILLEGAL_ADDRESS
            except Exception as error:
                self.library.vcuda_report(f"{launch.function}: {type(error).__name__}: {error}".encode())
                return LAUNCH_FAILED
            return 0

        self._callback = _EXECUTOR(callback)  # kept alive: the driver holds the bare pointer
        self.library.vcuda_set_executor(self._callback)

    def inject(self, function: str, code: int, at_call: int = 1) -> None:
        """The ``at_call``-th call of a driver function from now on answers ``code``."""
        self.library.vcuda_inject(function.encode(), at_call, code)

    def counters(self) -> dict[str, int]:
        """Calls by driver function so far ("cuLaunchKernel"), and what was executed ("executed:kernels")."""
        lines = self._text(self.library.vcuda_counters).splitlines()
        return {name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)}

    def faults(self) -> list[str]:
        """What the driver refused or found wrong, in order."""
        return self._text(self.library.vcuda_faults).splitlines()

    def clear_faults(self) -> None:
        self.library.vcuda_clear_faults()

    def alive(self) -> Alive:
        """Objects that were made and not destroyed."""
        numbers = (ctypes.c_uint64 * 6)()
        self.library.vcuda_alive(numbers)
        return Alive(*numbers)

    def live_ranges(self) -> np.ndarray[Any, Any]:
        """[n, 2] first and one-past-last address of every live allocation, ascending."""
        version = self.library.vcuda_memory_version()
        if version != self._ranges[0]:
            pairs = self.library.vcuda_ranges(None, 0)
            ranges = np.zeros((pairs, 2), np.uint64)
            self.library.vcuda_ranges(ranges.ctypes.data, pairs)
            self._ranges = (version, ranges)
        return self._ranges[1]

    def explain(self, address: int, size: int) -> str:
        """What is wrong with an access to [address, address + size); empty if nothing is."""
        buffer = ctypes.create_string_buffer(512)
        self.library.vcuda_explain(address, size, buffer, len(buffer))
        return buffer.value.decode()

    def _text(self, function: Any) -> str:
        buffer = ctypes.create_string_buffer(function(None, 0) + 4096)
        function(buffer, ctypes.c_size_t(len(buffer)))
        return buffer.value.decode()


def image_hash(image: bytes) -> int:
    """FNV-1a 64, as the driver computes it over a module's image."""
    value = 0xCBF29CE484222325
    for byte in image:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value
