"""Runs the checks and the measurements of an unpacked kit, one after the other, each with a time limit.

  run_checks.py KIT_FOLDER --json FILE [--seconds 480] [--device cuda] [--skip-timing]

Prints one table and writes JSON. Exits with 0 only if every check of correctness passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rows import Row, format_table, parse_rows

_HERE = Path(__file__).parent
#: Engines that are checked side by side: each is a process that mostly starts and loads.
_WORKERS = 4
_ENGINE_SECONDS = 90
_LAST_WORDS = 300


class Checks:
    """Runs scripts until the time is over and keeps their rows."""

    def __init__(self, kit: Path, seconds: float, device: str) -> None:
        self.kit, self.device = kit, device
        self.end = time.monotonic() + seconds
        self.rows: list[Row] = []

    def run(self, script: str, *args: str, limit: float, check: bool, name: str = "") -> None:
        """Run a script of this folder. Its failure is a row: failed where ``check``, else a note."""
        self.rows += self.run_command(
            [sys.executable, str(_HERE / script), *args], limit, check, name or script
        )

    def run_command(self, command: Sequence[str], limit: float, check: bool, name: str) -> list[Row]:
        """The rows that a command printed, with one more if it fails or takes more than ``limit`` seconds."""
        limit = min(limit, self.end - time.monotonic())
        if limit <= 1:
            return [Row("not run", name, passed=False if check else None, note="no time was left for it")]
        start = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        problem = ""
        try:
            output, _ = process.communicate(timeout=limit)
            if process.returncode:
                problem = f"ended with {process.returncode}: {output.strip()[-_LAST_WORDS:]}"
        except subprocess.TimeoutExpired:
            # The whole group: compilers of torch and workers of ours must not outlive their step.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            problem = f"ended after its limit of {limit:.0f} s"
        rows = parse_rows(output)
        if problem:
            rows.append(Row("not finished", name, passed=False if check else None, note=problem))
        print(f"{name}: {time.monotonic() - start:.0f} s {problem[:100]}", file=sys.stderr, flush=True)
        return rows

    def engines(self) -> None:
        """Every tiny engine, each in a process of its own: a kernel that faults takes its process along."""

        def check(engine: Path) -> list[Row]:
            command = [sys.executable, str(_HERE / "check_engine.py"), str(engine), "--device", self.device]
            return self.run_command(command, _ENGINE_SECONDS, True, f"engine {engine.name}")

        with ThreadPoolExecutor(_WORKERS) as pool:
            for rows in pool.map(check, sorted((self.kit / "engines").iterdir())):
                self.rows += rows
        self.rows.sort(key=lambda row: row.section)

    def kernels(self) -> None:
        """The kernel tests, as pytest runs them."""
        self.run("run_kernel_tests.py", str(self.kit / "kernel_tests"), limit=120, check=True)

    def timing(self) -> None:
        """What the GPU reaches, single ops, whole engines, and transformers beside them."""
        peaks = str(self.kit / "peaks.json")
        self.run("peaks.py", peaks, limit=40, check=False)
        if not Path(peaks).is_file():
            self.rows.append(Row("not run", "timing", note="the GPU's own bandwidth was not measured"))
            return
        for name, options in (
            ("135m", ["--decode", "1,8,64", "--prefill", "1000", "--requests", "0"]),
            ("8b", ["--decode", "1,8,64,256", "--prefill", "1000,8000", "--requests", "256"]),
        ):
            folder = self.kit / "hollow" / name
            if not folder.is_dir():
                continue
            self.run("fill_weights.py", str(folder), limit=100, check=False, name=f"weights of {name}")
            engine = [str(folder), "--peaks", peaks]
            device = ["--device", self.device]
            self.run(
                "time_engine.py", *engine, *device, *options, limit=120, check=False, name=f"engine {name}"
            )
            if name == "8b":
                self.run("time_kernels.py", *engine, limit=60, check=False)
                self.run("time_hf.py", str(folder / "model.json"), limit=170, check=False)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        facts |= {"memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ]
        facts["driver_clock_power"] = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        facts["driver_clock_power"] = f"unknown ({type(error).__name__})"
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-timing", action="store_true", help="correctness alone")
    options = parser.parse_args()
    checks = Checks(options.kit, options.seconds, options.device)
    checks.engines()
    checks.kernels()
    if not options.skip_timing:
        checks.timing()
    failed = [row for row in checks.rows if row.passed is False]
    passed = [row for row in checks.rows if row.passed]
    print(format_table(checks.rows))
    about = {**json.loads((options.kit / "kit.json").read_text()), **machine()}
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{len(passed)} checks passed, {len(failed)} failed")
    options.json.write_text(
        json.dumps({"machine": about, "rows": [asdict(row) for row in checks.rows]}, indent=1)
    )
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
