"""Ctrl-C: at every time one line, exit code 130, and what is at work tidies up."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

#: Runs ``castiron inspect`` with a body of the test's own in its place.
SCRIPT = """
import sys, types, signal, os, time, atexit
from castiron import interrupts
interrupts.at_start()
import click

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def body():
{body}

sys.modules["castiron.commands.inspect"] = types.SimpleNamespace(command=click.command()(body))
from castiron.cli import main
main(["inspect"])
"""
ENDED = (130, "interrupted\n")


def started(body: str, **options) -> subprocess.Popen:
    script = SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], text=True, **pipes, **options)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def cpu_time(process: subprocess.Popen) -> int:
    """Of user and system, in ticks."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("times", [1, 2, 5])
def test_ctrl_c_tidies_up_however_often_it_is_pressed(tmp_path, times):
    process = started(
        f"""
        import tempfile
        with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}) as folder:
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                time.sleep(0.3)
        """
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert ended(process) == ENDED
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("exec('interrupt(); time.sleep(60)', globals())", id="in code made by exec"),
        pytest.param(
            """
            class Dying:
                def __del__(self):
                    interrupt()
                    time.sleep(60)
            Dying()
            time.sleep(60)
            """,
            id="in a destructor",
        ),
        pytest.param(
            """
            try:
                interrupt()
                time.sleep(60)
            except KeyboardInterrupt:
                raise ValueError("an error of C code's own")
            """,
            id="where it becomes another error",
        ),
        pytest.param(
            """
            try:
                interrupt()
                time.sleep(60)
            except BaseException:
                pass
            """,
            id="where it is swallowed",
        ),
        pytest.param("atexit.register(interrupt); interrupt(); time.sleep(60)", id="again at the exit"),
    ],
)
def test_ctrl_c_ends_the_process_wherever_it_comes(body):
    assert ended(started(body)) == ENDED


def test_ctrl_c_while_a_module_is_imported_comes_right_after_it(tmp_path):
    """Modules in C++ that are left by an exception in the midst of it end the process (triton did)."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(0.1)\n"
        f"open({str(tmp_path / 'done')!r}, 'w').close()\n"
    )
    body = f"sys.path.insert(0, {str(tmp_path)!r})\nimport slow\ntime.sleep(60)"
    assert ended(started(body)) == ENDED
    assert (tmp_path / "done").exists()


def test_ctrl_c_before_a_command_runs_and_one_more_while_tidying_takes_long():
    script = "from castiron.interrupts import at_start; at_start(); import os; os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ENDED
    process = started(
        """
        interrupts.PATIENCE = 0.1
        try:
            interrupt()
            time.sleep(60)
        finally:
            print("tidying", flush=True)
            time.sleep(60)
        """
    )
    assert process.stdout.readline() == "tidying\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert ended(process) == ENDED


def test_ctrl_c_stays_ignored_where_a_shell_ignores_it():
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    script = ignore + "from castiron.interrupts import at_start, raised; at_start()\nwith raised(): "
    script += "signal.raise_signal(signal.SIGINT); print('alive')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"


def test_the_command_line_takes_ctrl_c_over():
    process = subprocess.Popen(
        [sys.executable, "-m", "castiron", "run", "no-such-engine"],
        stdin=subprocess.PIPE,  # it waits for a prompt
        stderr=subprocess.PIPE,
        text=True,
    )
    before, now = -1, 0
    while before != now or not now:  # until it does nothing but wait
        time.sleep(0.5)
        before, now = now, cpu_time(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read() == "interrupted\n"
