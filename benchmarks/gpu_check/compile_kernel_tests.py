"""Compiles, without a GPU, every kernel that the tests of tests/plugins/cuda launch.

python -O compile_kernel_tests.py FOLDER --target sm_90
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.build.kernels.compile import compile_requests
from castiron.build.launches import KernelRequest, param_types
from castiron.plugins.launch import TritonKernel
from castiron.plugins.targets import TARGETS, Target
from kernel_tests import INDEX, TESTS, Recorder

from castiron.errors import BuildError

_TEST_FOLDER = Path(__file__).parents[2] / "tests" / "plugins" / "cuda"


class _Loader(SourceFileLoader):
    """Imports a test module whose assertions are evaluated, for the launches inside them, but cannot fail."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = _AssertionsAsExpressions().visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """None: neither is the tests' cached bytecode used, nor is this written there."""
        raise OSError(path)


class _AssertionsAsExpressions(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.Expr(node.test)


class _Finder:
    """Finds the modules of the tests' folder before Python does."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = _TEST_FOLDER / f"{name}.py"
        if not file.is_file():
            return None
        return spec_from_file_location(name, file, loader=_Loader(name, str(file)))


def record() -> dict[str, TritonKernel]:
    """The kernels that the tests launch, by key."""

    def no_comparison(*_: Any, **__: Any) -> None:
        """Nothing was computed, so there is nothing to compare."""

    np.testing.assert_allclose = no_comparison
    np.testing.assert_array_equal = no_comparison
    sys.meta_path.insert(0, _Finder)
    recorder = Recorder()
    tests = [str(_TEST_FOLDER / name) for name in TESTS]
    pytest.main(
        ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-c", "/dev/null", *tests],
        plugins=[recorder],
    )
    return recorder.kernels


def compile_for(kernels: dict[str, TritonKernel], target: Target, folder: Path) -> list[str]:
    """Write the machine code and its index. Returns what does not compile for the target."""
    index: dict[str, dict[str, Any]] = {}
    failed = []
    folder.mkdir(parents=True, exist_ok=True)
    for (key, kernel), outcome in zip(kernels.items(), _compile(list(kernels.values()), target), strict=True):
        if isinstance(outcome, BuildError):
            failed.append(str(outcome).splitlines()[0])
            continue
        (folder / f"{key}.cubin").write_bytes(outcome.cubin)
        index[key] = {
            "name": kernel.function.__name__,
            "function": outcome.function,
            "file": f"{key}.cubin",
            "threads": outcome.threads,
            "shared_bytes": outcome.shared_bytes,
            "params": list(param_types(kernel)),
            "hidden_pointers": outcome.hidden_pointers,
            "scratch_bytes": outcome.scratch_bytes,
        }
    (folder / INDEX).write_text(json.dumps(index))
    return failed


def _compile(kernels: list[TritonKernel], target: Target) -> list[Any]:
    requests = [KernelRequest(kernel) for kernel in kernels]
    try:
        return list(compile_requests(requests, target))
    except BuildError:
        # Some tests name their own architecture, whose kernels another may not take: one by one then.
        return [_compile_one(request, target) for request in requests]


def _compile_one(request: KernelRequest, target: Target) -> Any:
    try:
        return compile_requests([request], target)[0]
    except BuildError as error:
        return error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90")
    options = parser.parse_args()
    kernels = record()
    failed = compile_for(kernels, TARGETS[options.target], options.folder)
    print(f"{len(kernels) - len(failed)} kernels of the tests compiled for {options.target}")
    for line in failed:
        print(f"not for {options.target}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
