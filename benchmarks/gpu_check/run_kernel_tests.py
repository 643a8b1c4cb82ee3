"""The tests of tests/plugins/cuda with launches on this machine's GPU instead of the interpreter.

run_kernel_tests.py FOLDER      (what compile_kernel_tests.py wrote)
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernel_tests import TESTS, Launcher
from rows import Row

_SECTION = "kernel tests against float64"
_TEST_FOLDER = Path(__file__).parents[2] / "tests" / "plugins" / "cuda"


class _Collector:
    """Counts outcomes by test file."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.location[0]).name
        if report.failed:
            words = str(report.longrepr).strip().splitlines()
            self.failed.setdefault(file, []).append(f"{report.location[2]}: {words[-1] if words else ''}")
        elif report.when == "call" and report.passed:
            self.passed[file] += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    collector = _Collector()
    tests = [str(_TEST_FOLDER / name) for name in TESTS]
    status = pytest.main(
        ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", "/dev/null", *tests],
        plugins=[Launcher(options.folder), collector],
    )
    for name in TESTS:
        failed = collector.failed.get(name, [])
        count = collector.passed[name]
        note = f"{len(failed)} failed: {failed[0]}" if failed else ""
        passed = not failed and count > 0
        Row(_SECTION, name, passed=passed, value=count, unit="tests passed", note=note).emit()
    # Failures are rows already; anything else is a failure of this script.
    sys.exit(0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status))


if __name__ == "__main__":
    main()
