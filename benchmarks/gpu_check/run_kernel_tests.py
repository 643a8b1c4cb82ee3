"""The tests of tests/plugins/cuda with launches on this machine's GPU instead of the interpreter.

run_kernel_tests.py FOLDER      (what compile_kernel_tests.py wrote)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from kernel_tests import TESTS, Launcher
from rows import Row

_SECTION = "kernel tests against float64"
_TEST_FOLDER = Path(__file__).parents[2] / "tests" / "plugins" / "cuda"


class _Collector:
    """Counts the outcomes of one test file."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            words = str(report.longrepr).strip().splitlines()
            self.failed.append(f"{report.location[2]}: {words[-1] if words else ''}")
        elif report.when == "call" and report.passed:
            self.passed += 1


def run_file(name: str, launcher: Launcher) -> Row:
    """One test file; a row for each, so that those before a time limit are kept."""
    collector = _Collector()
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", "/dev/null", str(_TEST_FOLDER / name)]
    status = pytest.main(arguments, plugins=[launcher, collector])
    note = ""
    if collector.failed:
        note = f"{len(collector.failed)} failed: {collector.failed[0]}"
    elif status != pytest.ExitCode.OK:
        note = f"pytest ended with {status!r}"
    return Row(_SECTION, name, passed=not note, value=collector.passed, unit="tests passed", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    launcher = Launcher(options.folder)
    for name in TESTS:
        run_file(name, launcher).emit()


if __name__ == "__main__":
    main()
