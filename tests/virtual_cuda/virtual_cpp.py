"""Kernels in CUDA C++ on the virtual device: compiled for the CPU as ``castiron plugin test`` does it."""

from __future__ import annotations

import ctypes
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
from castiron.build.lower import lower
from castiron.build.trials.emulate import EmulatedKernel, emulated_library
from castiron.build.trials.guarded import GuardedBuffer
from castiron.engines.program import Kernel
from castiron.engines.reader import Engine
from castiron.plugins import default_registry
from castiron.plugins.launch import CudaKernel
from castiron.plugins.sdk import Plugin, register
from virtual_driver import Launch
from virtual_operands import Region


def cuda_kernels(engine: Engine, target: str, plugins: Sequence[Plugin]) -> dict[int, EmulatedKernel]:
    """The kernels of a program that plugins give in CUDA C++, by their numbers.

    An engine holds their machine code alone: the source is what the plugins make of the engine's graph.
    """
    graph, program = engine.graph(), engine.program(target)
    assert graph is not None
    registry = default_registry((target,))
    register(plugins, registry)
    model, dtype = onnx.load_from_string(graph), engine.manifest.model.dtype
    requests = lower(model, target, program.limits, dtype, registry).requests
    assert len(requests) == len(program.kernels), "the engine was built with other plugins"
    found: dict[int, EmulatedKernel] = {}
    with tempfile.TemporaryDirectory(prefix="castiron-virtual-") as folder:
        for number, (request, kernel) in enumerate(zip(requests, program.kernels, strict=True)):
            if isinstance(request.kernel, CudaKernel):
                assert (kernel.function, kernel.source) == (request.kernel.function, request.kernel.origin)
                file = Path(folder, f"{number}.so")
                file.write_bytes(emulated_library(request.kernel))
                found[number] = EmulatedKernel(file)
    return found


def run_emulated(emulated: EmulatedKernel, kernel: Kernel, launch: Launch, regions: Sequence[Region]) -> None:
    """Run a launch on copies of its operands that lie between forbidden pages, and copy the results back.

    ``regions``: what it may touch; the KV cache, which comes in pieces, is used where it is. Raises
    IndexError for an access outside of them.
    """
    places = _merged(regions)
    buffers = [GuardedBuffer(ctypes.string_at(begin, size), read_only=False) for begin, size in places]

    def moved(raw: bytes) -> bytes:
        (address,) = struct.unpack("<Q", raw)
        for (begin, size), buffer in zip(places, buffers, strict=True):
            if begin <= address < begin + size:
                return struct.pack("<Q", address - begin + buffer.address)
        return raw

    given = zip(kernel.params, launch.params, strict=True)
    params = [moved(raw) if kind == "ptr" else raw for kind, raw in given]
    fault = emulated.launch(launch.grid, launch.block, launch.shared_bytes, params)
    if fault is not None:
        around = [text for buffer in buffers if (text := buffer.where(fault.address))]
        place = f"{around[0]} of an operand" if around else f"0x{fault.address:x}, far from every operand"
        raise IndexError(
            f"kernel {kernel.name}, thread {fault.thread} of block {fault.block}: access outside of the "
            f"launch's operands: {place}"
        )
    if not all(buffer.intact() for buffer in buffers):
        raise IndexError(f"kernel {kernel.name}: wrote right before or behind an operand")
    for (begin, size), buffer in zip(places, buffers, strict=True):
        ctypes.memmove(begin, buffer.address, size)


def _merged(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """(begin, bytes) of the regions that are whole; views of a value, and values in one place, are one."""
    places: list[tuple[int, int]] = []
    for region in sorted((r for r in regions if not r.stride), key=lambda region: region.begin):
        begin, end = region.begin, region.begin + region.size
        if places and begin < sum(places[-1]):
            begin, end = places[-1][0], max(sum(places[-1]), end)
            places.pop()
        places.append((begin, end - begin))
    return places
