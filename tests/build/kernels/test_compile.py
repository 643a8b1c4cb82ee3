"""Kernels compiled for real, without a GPU: images, messages, cache. A handful of kernels, a second each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import samples
from castiron.build.kernels import compile as compiling
from castiron.build.kernels import sass
from castiron.build.kernels.cache import KernelCache
from castiron.build.kernels.compile import compile_requests
from castiron.build.kernels.job import Compiled, TritonJob
from castiron.build.kernels.pool import compile_all
from castiron.build.kernels.triton_compiler import TritonCompiler
from castiron.build.launches import KernelRequest
from castiron.plugins.launch import CudaKernel, TritonKernel
from castiron.plugins.targets import TARGETS
from triton.backends.nvidia.compiler import CUDABackend

from castiron.errors import BuildError

DOUBLE = TritonKernel(
    samples.double, {"x": "*fp32", "y": "*bf16", "count": "i32"}, {"BLOCK": 256}, frozenset(("x", "y"))
)
PRODUCT = TritonKernel(samples.product, dict.fromkeys("abc", "*fp16"), {"SIZE": 64}, hot=True)
SAXPY = CudaKernel(samples.CUDA_SOURCE, "saxpy", ("f32", "ptr", "ptr", "i32"), origin="saxpy.cu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


def compiled(kernel: TritonKernel | CudaKernel, target: str, cache: KernelCache) -> Compiled:
    return compile_requests([KernelRequest(kernel)], TARGETS[target], cache)[0]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the kernels that would be compiled."""
    asked: list[str] = []

    def refuse(jobs: Any, done: Any) -> None:
        if jobs:
            asked.extend(label for _, label in jobs)
            raise BuildError("no compiler here")

    monkeypatch.setattr(compiling, "compile_all", refuse)
    return asked


def test_a_triton_kernel_becomes_machine_code_of_its_target(cache: KernelCache) -> None:
    found = compiled(DOUBLE, "sm_90", cache)
    assert found.cubin.startswith(b"\x7fELF")
    assert found.ptx == b""
    assert (found.function, found.threads, found.shared_bytes) == ("double", 128, 0)
    # Triton appends the addresses of its scratch memories.
    assert found.hidden_pointers == 2
    assert found.resources["spills"] == 0
    assert found.resources["registers"] > 0


def test_machine_code_of_sm_80_and_the_ptx_for_later_ones_are_one_compilation(
    cache: KernelCache, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as compiler_back:
        compiler_back.setattr(compiling, "compile_all", compile_all)
        ahead = compiled(PRODUCT, "compute_80", cache)
    assert b".target sm_80" in ahead.ptx
    assert compiled(PRODUCT, "sm_80", cache) == ahead
    assert no_compiler == []


@pytest.mark.parametrize(("function", "lowered"), [(samples.product, 1), (samples.narrow, 2)])
def test_sm_89_takes_the_ptx_of_sm_86_unless_a_kernel_has_8_bit_floats(
    function: Any, lowered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out is what sm_89 gets on its own."""
    runs: list[int] = []
    lower = CUDABackend.make_llir
    monkeypatch.setattr(
        CUDABackend, "make_llir", lambda self, *rest: runs.append(0) or lower(self, *rest), raising=True
    )
    kernel = TritonKernel(function, dict.fromkeys("abc", "*fp16"), {"SIZE": 64}, frozenset("abc"))
    jobs = [compiling._job(kernel, TARGETS[name])[0] for name in ("sm_86", "sm_89")]
    assert all(isinstance(job, TritonJob) for job in jobs)
    assert jobs[0].relatives == jobs[1].relatives
    compiler = TritonCompiler()
    _, after = (compiler.compile(job) for job in jobs if isinstance(job, TritonJob))
    assert len(runs) == lowered
    alone = TritonCompiler().compile(jobs[1])  # type: ignore[arg-type]
    assert sass.code_of(after.cubin, after.function) == sass.code_of(alone.cubin, alone.function)
    assert after.resources == alone.resources


def test_ptx_is_of_an_isa_that_old_drivers_take(cache: KernelCache) -> None:
    for kernel in (DOUBLE, SAXPY):
        text = compiled(kernel, "compute_80", cache).ptx.decode()
        assert ".version 8.0" in text
        assert ".target sm_80" in text
        assert f".entry {'double' if kernel is DOUBLE else 'saxpy'}" in text


def test_a_cuda_kernel_is_compiled_by_nvrtc(cache: KernelCache) -> None:
    found = compiled(SAXPY, "sm_120", cache)
    assert found.cubin.startswith(b"\x7fELF")
    assert (found.threads, found.hidden_pointers) == (256, 0)
    assert found.resources["static_shared_bytes"] == 1024  # 256 floats; not what the driver keeps


@pytest.mark.parametrize(("target", "unit"), [("sm_80", "mma"), ("sm_90", "wgmma"), ("sm_100", "tcgen05")])
def test_products_run_on_the_matrix_unit_of_each_generation(
    target: str, unit: str, cache: KernelCache
) -> None:
    # 128 rows: what one tcgen05 instruction takes.
    resources = compiled(replace(PRODUCT, constants={"SIZE": 128}), target, cache).resources
    assert resources["matrix"] == unit
    assert resources["matrix_instructions"] > 0


def test_the_instruction_mix_is_what_cuobjdump_lists(cache: KernelCache, tmp_path: Path) -> None:
    """All kernels in one raw run of nvdisasm against NVIDIA's other tool, one by one."""
    from triton import knobs

    kernels = [compiled(kernel, "sm_90", cache) for kernel in (DOUBLE, PRODUCT, DOUBLE)]
    mixes = sass.instruction_mixes([(k.cubin, k.function) for k in kernels], 90)
    assert mixes[0] == mixes[2]
    for kernel, mix in zip(kernels, mixes, strict=True):
        file = tmp_path / "kernel.cubin"
        file.write_bytes(kernel.cubin)
        tool = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
        listing = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        lines = [line.split("*/", 1)[1] for line in listing.splitlines() if ";" in line and "*/" in line]
        words = [next(w for w in line.split() if not w.startswith("@")).rstrip(";") for line in lines]
        assert mix["instructions"] == sum(word != "NOP" for word in words)
        assert mix["matrix_instructions"] == sum("GMMA" in word.split(".")[0] for word in words)
        assert mix["global_loads"] == sum(word.split(".")[0] == "LDG" for word in words)


def test_what_does_not_compile_is_told_in_the_compilers_words(cache: KernelCache) -> None:
    broken = TritonKernel(samples.broken, {"x": "*fp32"}, {"SIZE": 8})
    with pytest.raises(BuildError, match=r"kernel 'broken' for sm_80 \(SIZE=8\) does not compile:\n(.|\n)*3"):
        compiled(broken, "sm_80", cache)
    wrong = replace(SAXPY, source=samples.CUDA_SOURCE.replace("int i =", "int j ="))
    with pytest.raises(BuildError, match=r'saxpy.cu\(\d+\): error: identifier "i" is undefined'):
        compiled(wrong, "sm_80", cache)
    with pytest.raises(BuildError, match="its parameters are x, y, count, BLOCK; the tactic gives x, BLOCK"):
        compiled(replace(DOUBLE, types={"x": "*fp32"}, aligned=frozenset()), "sm_80", cache)


def test_a_kernel_that_does_not_fit_the_target_is_refused_with_both_figures(cache: KernelCache) -> None:
    greedy = replace(SAXPY, shared_bytes=150_000)
    assert compiled(greedy, "sm_80", cache).shared_bytes == 150_000
    with pytest.raises(BuildError, match=r"'saxpy' for sm_86 needs 151,024 bytes.*at most 101,376"):
        compiled(greedy, "sm_86", cache)


def test_a_second_build_compiles_nothing(cache: KernelCache, no_compiler: list[str]) -> None:
    compiled(DOUBLE, "sm_90", cache)
    assert no_compiler == []


@pytest.mark.parametrize(
    "changed",
    [
        replace(DOUBLE, constants={"BLOCK": 512}),
        replace(DOUBLE, types={"x": "*bf16", "y": "*bf16", "count": "i32"}),
        replace(DOUBLE, aligned=frozenset(("x",))),
        replace(DOUBLE, num_warps=8),
        replace(SAXPY, options=("--use_fast_math",)),
        replace(SAXPY, source=samples.CUDA_SOURCE + "\n"),
    ],
)
def test_whatever_decides_the_code_is_part_of_the_key(
    changed: TritonKernel | CudaKernel, cache: KernelCache, no_compiler: list[str]
) -> None:
    with pytest.raises(BuildError, match="no compiler here"):
        compiled(changed, "sm_90", cache)


def loaded_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module in a file, as a plugin is loaded: no process can import it by name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_function_that_the_kernel_calls_is_part_of_the_key(
    cache: KernelCache, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same kernel, whose helper multiplies by another number."""
    file = tmp_path / "tripled.py"
    file.write_text(Path(samples.__file__).read_text().replace("x * 2.0", "x * 3.0"))
    with pytest.raises(BuildError, match="no compiler here"):
        compiled(replace(DOUBLE, function=loaded_from(file, monkeypatch).double), "sm_90", cache)


def test_a_plugins_kernel_is_loaded_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a_plugin.py"
    file.write_text(Path(samples.__file__).read_text())
    kernel = replace(DOUBLE, function=loaded_from(file, monkeypatch).double)
    assert compiled(kernel, "sm_80", KernelCache(tmp_path / "cache")).function == "double"


def test_a_damaged_cache_entry_is_compiled_again(tmp_path: Path, no_compiler: list[str]) -> None:
    cache = KernelCache(tmp_path)
    kernel = Compiled("f", b"\x7fELF", b"", 32, 0, 2, 0, False, {"registers": 1})
    cache.put("ab" * 32, kernel)
    assert cache.get("ab" * 32) == kernel
    (entry,) = tmp_path.glob("*/*")
    content = entry.read_bytes()
    for damaged in (content[:-1], content[:40], b"", content[:50] + b"x" + content[51:]):
        entry.write_bytes(damaged)
        assert cache.get("ab" * 32) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "below")
    cache.put("ab" * 32, Compiled("f", b"", b"", 32, 0, 0, 0, False))
    assert cache.get("ab" * 32) is None
