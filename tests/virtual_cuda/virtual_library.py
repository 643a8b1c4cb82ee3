"""Builds the stand-in driver from driver/*.cc, once for each state of the sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent / "driver"
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wconversion",
    "-Werror",
)


def driver_library() -> Path:
    """Path of the stand-in ``libcuda.so.1``; compiles it where the cache lacks it.

    The ABI comes from the real ``cuda.h`` in Triton's wheel, so that a runtime with a wrong declaration of a
    driver function fails here. Raises RuntimeError with the compiler's text.
    """
    sources = sorted(_SOURCES.glob("*.cc"))
    content = hashlib.sha256(repr(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        content.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"castiron-virtual-cuda-{os.getuid()}" / content.hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        include = ("-isystem", str(_cuda_include()))
        commands = [
            ["g++", *_FLAGS, *include, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        built = Path(scratch) / library.name
        _run(["g++", "-shared", f"-Wl,-soname,{library.name}", "-o", str(built), *map(str, objects)])
        built.replace(library)  # atomic: another process may be building the same
    return library


def _cuda_include() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the virtual CUDA device needs cuda.h of the triton wheel: pip install castiron[build]"
        )
    return Path(spec.origin).parent / "backends" / "nvidia" / "include"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
