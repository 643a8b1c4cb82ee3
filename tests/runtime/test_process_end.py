"""What happens to running requests when the process ends or forks; each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RUNS = """
import contextlib, os, signal, sys, threading
from castiron import ModelRunner
from castiron.errors import EngineError

runner = ModelRunner.from_dir(sys.argv[1], num_threads=1)
long = {"max_new_tokens": 90, "ignore_eos": True}


def busy():
    with contextlib.suppress(EngineError):  # it is closed under the thread's feet
        while True:
            runner.generate(input_ids=[[1, 2]] * 4, **long)

"""
_CASES = {
    "a stream left open": """
stream = runner.generate(input_ids=[1], streaming=True, **long)
next(stream)
sys.exit(3)
""",
    "a daemon thread in generate": "threading.Thread(target=busy, daemon=True).start(); sys.exit(3)",
    "daemon threads that come back from the core while the interpreter ends": """
core = runner.session.core
for _ in range(16):
    threading.Thread(target=lambda: [core.stats() for _ in iter(int, 1)], daemon=True).start()
sys.exit(3)
""",
    "an idle engine": "runner.generate(input_ids=[1], max_new_tokens=1); sys.exit(3)",
    "a forked child that uses it": """
if os.fork() == 0:
    signal.alarm(20)
    try:
        runner.generate(input_ids=[1], max_new_tokens=1)
    except EngineError as e:
        assert "forked" in str(e)
        sys.exit(5)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
assert runner.generate(input_ids=[1], max_new_tokens=2)[0].outputs[0].finish_reason == "length"
sys.exit(3)
""",
}


@pytest.mark.parametrize("case", _CASES)
def test_the_process_ends_with_its_own_exit_code_whatever_still_runs(engine_folder: Path, case: str) -> None:
    for _ in range(3):  # where the thread is at exit is chance
        done = subprocess.run(
            [sys.executable, "-c", _RUNS + _CASES[case], str(engine_folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (3, "")
