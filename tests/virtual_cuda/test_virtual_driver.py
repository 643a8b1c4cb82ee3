"""The stand-in driver itself, driven by bare driver calls as a runtime would."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from castiron.engines.program import Kernel, Limits, Program
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from virtual_driver import VirtualDriver
from virtual_interpreter import Interpreter
from virtual_process import ScenarioError, in_process

NO_BINARY, INVALID_IMAGE, UNSUPPORTED_PTX, INVALID_PTX = 209, 200, 222, 218
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT = 1, 2, 3, 201
NOT_READY, ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, LAUNCH_FAILED = 600, 700, 900, 719


@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside).to(tl.float32) + factor * tl.load(y + at, mask=inside)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


TYPES = {"x": "*bf16", "y": "*fp32", "out": "*bf16", "n": "i32", "factor": "fp32"}


def compiled(compute_capability: int, isa: int | None = None) -> Any:
    """The kernel above for an architecture."""
    source = ASTSource(scale_add, signature={**TYPES, "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})
    options = {"num_warps": 4, "enable_fp_fusion": True, **({"ptx_version": isa} if isa else {})}
    return triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)


@pytest.fixture(scope="module")
def images() -> dict[str, bytes]:
    """Cubins by architecture, and PTX of sm_80 at ISA 8.0."""
    made = {f"sm_{cc}": compiled(cc).asm["cubin"] for cc in (80, 90, 120)}
    return made | {"ptx": compiled(80, 80).asm["ptx"].encode()}


class Cuda:
    """Driver calls by name; ``call`` insists on success, ``code`` gives the CUresult."""

    def __init__(self, driver: VirtualDriver) -> None:
        self._library = driver.library
        self.call("cuInit", 0)
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def code(self, name: str, *args: Any) -> int:
        return int(getattr(self._library, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        code = self.code(name, *args)
        assert code == 0, f"{name} answered {code}"

    def allocate(self, size: int) -> c_uint64:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address

    def upload(self, array: np.ndarray[Any, Any]) -> c_uint64:
        address = self.allocate(array.nbytes)
        self.call("cuMemcpyHtoD_v2", address, c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        return address

    def download(self, address: c_uint64, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result = np.zeros_like(like)
        self.call("cuMemcpyDtoH_v2", c_void_p(result.ctypes.data), address, c_size_t(result.nbytes))
        return result

    def pinned(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A page-locked array of the same content."""
        memory = c_void_p()
        self.call("cuMemHostAlloc", byref(memory), c_size_t(array.nbytes), c_uint(0))
        assert memory.value is not None
        view = np.frombuffer((ctypes.c_char * array.nbytes).from_address(memory.value), array.dtype)
        view = view.reshape(array.shape)
        view[...] = array
        return view

    def stream(self) -> c_void_p:
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), c_uint(1))  # non-blocking
        return stream

    def load(self, image: bytes) -> tuple[int, c_void_p]:
        """(CUresult, module)."""
        module = c_void_p()
        return self.code("cuModuleLoadData", byref(module), image), module

    def function(self, image: bytes, name: str = "scale_add") -> c_void_p:
        code, module = self.load(image)
        assert code == 0
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        return function

    def launch(
        self, function: c_void_p, args: list[Any], *, blocks: int, stream: Any = None, threads: int = 128
    ) -> int:
        pointers = (c_void_p * (len(args) + 2))()
        hidden = [c_uint64(0), c_uint64(0)]
        for i, argument in enumerate([*args, *hidden]):
            pointers[i] = ctypes.cast(byref(argument), c_void_p)
        grid = (c_uint(blocks), c_uint(1), c_uint(1), c_uint(threads), c_uint(1), c_uint(1))
        return self.code("cuLaunchKernel", function, *grid, c_uint(0), stream, pointers, None)


def program(images: dict[str, bytes]) -> tuple[Program, dict[str, bytes]]:
    """A program of nothing but this kernel, as lowering describes it."""
    kernels = [
        Kernel(
            name=f"scale_add_{name}",
            function="scale_add",
            image=name if name != "ptx" else "",
            ptx=name if name == "ptx" else "",
            threads=128,
            params=["ptr", "ptr", "ptr", "i32", "f32"],
            types=list(TYPES.values()),
            hidden_pointers=2,
            source="test_virtual_driver:scale_add",
            constants={"BLOCK": 128},
        )
        for name in images
    ]
    limits = Limits(max_batch_size=1, max_num_tokens=1, max_logit_rows=1, max_seq_len=1)
    bare: dict[str, Any] = {key: [] for key in ("values", "weights", "steps", "sampling", "kv_layers")}
    return Program.model_construct(
        kernels=kernels, limits=limits, vocab_size=1, prefill_tile=16, **bare
    ), images


def started(cc: int, images: dict[str, bytes], **options: int) -> tuple[VirtualDriver, Cuda]:
    driver = VirtualDriver(cc, **options)
    Interpreter(driver).add_program(*program(images))
    return driver, Cuda(driver)


def bf16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bit patterns of the nearest bfloat16, ties to even."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numbers(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def launch_once(images: dict[str, bytes], name: str, cc: int) -> tuple[np.ndarray[Any, Any], Any]:
    _, cuda = started(cc, images)
    x, y = bf16(np.linspace(-3, 5, 300)), np.linspace(1, 9, 300, dtype=np.float32)
    out = cuda.upload(np.zeros(300, np.uint16))
    args = [cuda.upload(x), cuda.upload(y), out, c_int(300), c_float(0.5)]
    assert cuda.launch(cuda.function(images[name]), args, blocks=3) == 0
    return cuda.download(out, x), bf16(numbers(x) + np.float32(0.5) * y)


@pytest.mark.parametrize(("name", "cc"), [("sm_90", 90), ("sm_80", 86), ("ptx", 100)])
def test_a_triton_kernel_runs_from_cubin_and_ptx(images: dict[str, bytes], name: str, cc: int) -> None:
    found, expected = in_process(launch_once, images, name, cc)
    np.testing.assert_array_equal(found, expected)


def load_codes(images: dict[str, bytes]) -> dict[tuple[str, int, int], int]:
    driver = VirtualDriver(90)
    cuda = Cuda(driver)
    codes = {}
    for name in images:
        for cc in (75, 80, 86, 90, 100):
            for version in (12000, 12090, 13040):
                driver.library.vcuda_configure(b"compute_capability", cc)
                driver.library.vcuda_configure(b"driver_version", version)
                codes[name, cc, version], _ = cuda.load(images[name])
    driver.library.vcuda_configure(b"compute_capability", 80)
    codes["rubbish", 80, 13040], _ = cuda.load(b"rubbish\0")
    return codes


def test_images_load_where_a_real_driver_would_load_them(images: dict[str, bytes]) -> None:
    codes = in_process(load_codes, images)
    # sm_80 code runs on every 8.x device and no other; its cubin is of an ABI that 12.x drivers read.
    assert codes["sm_80", 80, 12000] == codes["sm_80", 86, 13040] == 0
    assert codes["sm_80", 75, 13040] == codes["sm_80", 90, 13040] == NO_BINARY
    # Triton's sm_90 code is sm_90a: that device alone, and a driver of the compiler's major.
    assert codes["sm_90", 90, 13040] == 0
    assert codes["sm_90", 90, 12090] == INVALID_IMAGE
    assert codes["sm_90", 100, 13040] == NO_BINARY
    # PTX runs on this and newer architectures, ISA 8.0 on drivers from 12.0 on.
    assert codes["ptx", 80, 12000] == codes["ptx", 100, 12090] == codes["ptx", 90, 13040] == 0
    assert codes["ptx", 75, 13040] == INVALID_PTX
    assert codes["rubbish", 80, 13040] == INVALID_IMAGE


def too_new_ptx(image: bytes) -> tuple[int, list[str]]:
    driver = VirtualDriver(90, driver_version=12000)
    code, _ = Cuda(driver).load(image)
    return code, driver.faults()


def test_ptx_of_a_newer_isa_is_refused_with_the_version_it_needs() -> None:
    code, faults = in_process(too_new_ptx, compiled(80, 84).asm["ptx"].encode())
    assert code == UNSUPPORTED_PTX
    assert "needs driver 12040, this one is 12000" in faults[0]


def bad_launches(images: dict[str, bytes]) -> dict[str, Any]:
    driver, cuda = started(90, images)
    function = cuda.function(images["sm_90"])
    x = cuda.upload(np.zeros(64, np.uint16))
    args = [x, x, x, c_int(4), c_float(1)]
    codes: dict[str, Any] = {
        "threads": cuda.launch(function, args, blocks=1, threads=64),
        "empty grid": cuda.launch(function, args, blocks=0),
        "opt-in too large": cuda.code("cuFuncSetAttribute", function, 8, 228 << 10),
        "opt-in": cuda.code("cuFuncSetAttribute", function, 8, 227 << 10),
        "missing function": cuda.code(
            "cuModuleGetFunction", byref(c_void_p()), cuda.load(images["sm_90"])[1], b"no"
        ),
    }
    grid = [c_uint(n) for n in (1, 1, 1, 128, 1, 1)]
    codes["no arguments"] = cuda.code("cuLaunchKernel", function, *grid, c_uint(0), None, None, None)
    other = cuda.function(images["sm_90"])
    codes["shared memory"] = cuda.code(
        "cuLaunchKernel", other, *grid, c_uint(50 << 10), None, (c_void_p * 7)(), None
    )
    codes["faults"] = driver.faults()
    return codes


def test_launches_that_a_device_cannot_run_are_refused(images: dict[str, bytes]) -> None:
    codes = in_process(bad_launches, images)
    refused = ("threads", "empty grid", "opt-in too large", "no arguments", "shared memory")
    assert {name: codes[name] for name in refused} == dict.fromkeys(refused, INVALID_VALUE)
    assert codes["opt-in"] == 0
    assert codes["missing function"] == 500
    assert any("compiled for 128,1,1" in text for text in codes["faults"])


def out_of_bounds(images: dict[str, bytes], case: str) -> tuple[int, int, list[str]]:
    driver, cuda = started(90, images)
    x, y = cuda.upload(np.zeros(100, np.uint16)), cuda.upload(np.zeros(100, np.float32))
    out = cuda.allocate(180 if case == "past the end" else 256)
    function = cuda.function(images["sm_90"])
    if case == "use after free":
        cuda.call("cuMemFree_v2", y)
    address = c_uint64(out.value + 1) if case == "misaligned" else out
    assert cuda.launch(function, [x, y, address, c_int(100), c_float(1)], blocks=1) == 0
    return cuda.code("cuCtxSynchronize"), cuda.code("cuStreamSynchronize", None), driver.faults()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("past the end", "bytes 180 to 182 of device allocation 3, which has 180 bytes (10 lanes)"),
        ("use after free", "of device allocation 2 (400 bytes), which was freed"),
        ("misaligned", "at misaligned"),
    ],
)
def test_a_kernel_outside_of_its_memory_loses_the_context_and_is_named(
    images: dict[str, bytes], case: str, text: str
) -> None:
    first, later, faults = in_process(out_of_bounds, images, case)
    assert (first, later) == (ILLEGAL_ADDRESS, ILLEGAL_ADDRESS)
    assert text in faults[0]
    assert "kernel scale_add_sm_90, block (0, 0, 0) of (1, 1, 1)" in faults[0]


def late_work(images: dict[str, bytes]) -> dict[str, Any]:
    _, cuda = started(90, images)
    stream = cuda.stream()
    x = cuda.pinned(bf16(np.ones(128)))
    y, out = cuda.upload(np.zeros(128, np.float32)), cuda.upload(np.zeros(128, np.uint16))
    device_x, result = cuda.allocate(256), cuda.pinned(np.zeros(128, np.uint16))
    cuda.call("cuMemcpyHtoDAsync_v2", device_x, c_void_p(x.ctypes.data), c_size_t(256), stream)
    args = [device_x, y, out, c_int(128), c_float(0)]
    assert cuda.launch(cuda.function(images["sm_90"]), args, blocks=1, stream=stream) == 0
    cuda.call("cuMemcpyDtoHAsync_v2", c_void_p(result.ctypes.data), out, c_size_t(256), stream)
    event = c_void_p()
    cuda.call("cuEventCreate", byref(event), c_uint(2))
    cuda.call("cuEventRecord", event, stream)
    before = result.copy()
    x[:] = bf16(np.full(128, 2.0))  # too early: the copy has not happened
    codes = [cuda.code("cuEventQuery", event), cuda.code("cuEventQuery", event)]
    return {"before": before, "after": numbers(result), "codes": codes}


def test_work_happens_as_late_as_allowed(images: dict[str, bytes]) -> None:
    seen = in_process(late_work, images)
    assert not seen["before"].any()
    assert seen["codes"] == [NOT_READY, 0]
    np.testing.assert_array_equal(seen["after"], 2)


def captured(images: dict[str, bytes]) -> dict[str, Any]:
    driver, cuda = started(90, images)
    stream, function = cuda.stream(), cuda.function(images["sm_90"])
    source, result = cuda.pinned(bf16(np.ones(200))), cuda.pinned(np.zeros(200, np.uint16))
    x, y, out = cuda.allocate(400), cuda.upload(np.ones(200, np.float32)), cuda.allocate(400)
    args = [x, y, out, c_int(200), c_float(3)]

    def step() -> None:
        cuda.call("cuMemcpyHtoDAsync_v2", x, c_void_p(source.ctypes.data), c_size_t(400), stream)
        assert cuda.launch(function, args, blocks=2, stream=stream) == 0
        cuda.call("cuMemcpyDtoHAsync_v2", c_void_p(result.ctypes.data), out, c_size_t(400), stream)

    graph, exec_graph = c_void_p(), c_void_p()
    cuda.call("cuStreamBeginCapture_v2", stream, c_int(1))
    step()
    args[4] = c_float(99)  # after the call: a graph holds values, not places
    inside = {"allocation": cuda.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(64))}
    cuda.call("cuStreamEndCapture", stream, byref(graph))
    cuda.call("cuGraphInstantiateWithFlags", byref(exec_graph), graph, c_uint64(0))
    cuda.call("cuGraphDestroy", graph)
    untouched = not result.any()
    replayed = []
    for value in (1.0, -2.0):
        source[:] = bf16(np.full(200, value))
        before = driver.counters()
        cuda.call("cuGraphLaunch", exec_graph, stream)
        cuda.call("cuStreamSynchronize", stream)
        after = driver.counters()
        replayed.append(numbers(result).tolist())
    calls = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    cuda.call("cuStreamBeginCapture_v2", stream, c_int(1))
    inside["wait"] = cuda.code("cuStreamSynchronize", stream)
    inside["end"] = cuda.code("cuStreamEndCapture", stream, byref(graph))
    return {"untouched": untouched, "replayed": replayed, "calls": calls, "inside": inside}


def test_a_captured_step_replays_with_one_call_and_reads_its_buffers_anew(images: dict[str, bytes]) -> None:
    seen = in_process(captured, images)
    assert seen["untouched"]
    assert seen["replayed"] == [[4.0] * 200, [1.0] * 200]
    driver_calls = {name: n for name, n in seen["calls"].items() if name.startswith("cu")}
    assert driver_calls == {"cuGraphLaunch": 1, "cuStreamSynchronize": 1}
    assert seen["calls"]["executed:kernels"] == 1
    assert seen["inside"] == {"allocation": CAPTURE_UNSUPPORTED, "wait": CAPTURE_UNSUPPORTED, "end": 901}


def memory_limits() -> dict[str, Any]:
    driver = VirtualDriver(90, memory=1 << 20)
    cuda = Cuda(driver)
    first = cuda.allocate(700 << 10)
    codes = {"too much": cuda.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(400 << 10))}
    fresh = cuda.download(first, np.zeros(16, np.float32))
    alive = driver.alive().device_allocations
    cuda.call("cuMemFree_v2", first)
    codes["freed twice"] = cuda.code("cuMemFree_v2", first)
    codes["after free"] = cuda.code("cuMemAlloc_v2", byref(c_uint64()), c_size_t(400 << 10))
    return {"codes": codes, "fresh": fresh, "alive": alive}


def test_memory_is_bounded_counted_and_not_a_number_at_first() -> None:
    seen = in_process(memory_limits)
    assert seen["codes"] == {"too much": OUT_OF_MEMORY, "freed twice": INVALID_VALUE, "after free": 0}
    assert np.isnan(seen["fresh"]).all()
    assert seen["alive"] == 1


def no_context() -> list[int]:
    library = VirtualDriver(90).library
    codes = [library.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t()))]
    library.cuInit(0)
    return [*codes, library.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t()))]


def test_calls_without_initialisation_or_context_are_refused() -> None:
    assert in_process(no_context) == [NOT_INITIALIZED, INVALID_CONTEXT]


def injected(images: dict[str, bytes]) -> list[int]:
    driver, cuda = started(90, images)
    driver.inject("cuStreamSynchronize", LAUNCH_FAILED, at_call=2)
    return [cuda.code("cuStreamSynchronize", None) for _ in range(3)]


def test_an_injected_failure_comes_at_its_call_and_stays_if_it_is_sticky(images: dict[str, bytes]) -> None:
    assert in_process(injected, images) == [0, LAUNCH_FAILED, LAUNCH_FAILED]


def host_access() -> None:
    address = Cuda(VirtualDriver(90)).allocate(64).value
    ctypes.string_at(address, 4)


def test_host_code_that_follows_a_device_pointer_crashes() -> None:
    with pytest.raises(ScenarioError, match=r"crashed with exit code -11"):
        in_process(host_access)


def test_the_library_is_built_once(tmp_path: Path) -> None:
    from virtual_library import driver_library

    assert driver_library() == driver_library()
