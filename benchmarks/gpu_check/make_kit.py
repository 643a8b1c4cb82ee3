"""Packs what a bare machine with a GPU needs for gpu_check.sh. Needs no GPU; run it in the build environment.

  python benchmarks/gpu_check/make_kit.py -o KIT --target sm_90

KIT/ then holds gpu_check.sh and kit.tar.xz: engines of tiny models of every family with their golden outputs,
large engines without weights, the kernels of the kernel tests, the source tree (HEAD, from which the runtime
is compiled there) and wheels of the Python packages that the machine may lack.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from castiron.plugins.targets import TARGETS
from kit_engines import FAMILIES, SHAPES, build_hollow, build_tiny

_REPOSITORY = Path(__file__).parents[2]
_HERE = Path(__file__).parent
#: What may be carried to the machine.
MOST_BYTES = 64 * 10**6
#: What the runtime, its compilation and the kernel tests import, with everything that these import; torch,
#: triton, numpy and transformers are the machine's own.
PACKAGES = (
    "annotated-types",
    "click",
    "iniconfig",
    "jinja2",
    "markdown-it-py",
    "markupsafe",
    "mdurl",
    "ml-dtypes",
    "nanobind",
    "packaging",
    "pathspec",
    "pluggy",
    "pydantic",
    "pydantic-core",
    "pygments",
    "pytest",
    "rich",
    "scikit-build-core",
    "tokenizers",
    "typing-extensions",
    "typing-inspection",
)
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")


def fetch_wheels(folder: Path, python: str) -> None:
    """Download wheels of PACKAGES for the machine's Python."""
    platforms = [option for name in _PLATFORMS for option in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, *platforms, "-d", str(folder), *PACKAGES]
    subprocess.run(command, check=True)


def archive_source(folder: Path) -> None:
    """The tracked files of the repository as they are at HEAD."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(_REPOSITORY), "archive", "HEAD"], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive.stdout)


def source_commit() -> str:
    """The commit that the kit is made from, marked where the working tree differs from it."""
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def pack(content: Path, output: Path) -> None:
    """One archive; files of one kind lie together, because machine code of different engines is alike."""
    files = sorted(
        (path for path in content.rglob("*") if path.is_file()), key=lambda p: (p.suffix, p.name, str(p))
    )
    with tarfile.open(output, "w:xz", preset=6) as archive:
        for path in files:
            archive.add(path, path.relative_to(content))


def largest_parts(content: Path) -> list[tuple[int, str]]:
    """Bytes of each part before compression, the largest first."""
    parts = [path for entry in content.iterdir() for path in (entry.iterdir() if entry.is_dir() else [entry])]
    sizes = []
    for part in parts:
        files = [part] if part.is_file() else [path for path in part.rglob("*") if path.is_file()]
        sizes.append((sum(file.stat().st_size for file in files), str(part.relative_to(content))))
    return sorted(sizes, reverse=True)


def make_kit(output: Path, target: str, families: list[str], shapes: list[str], python: str) -> None:
    """Write the kit; SystemExit when it would be larger than what may be carried."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="castiron-kit-") as name:
        content = Path(name)
        fetch_wheels(content / "wheels", python)
        commit = source_commit()
        if commit.endswith("-dirty"):
            print("the working tree differs from HEAD: kernels are compiled from it, the source is HEAD's")
        archive_source(content / "source")
        build_tiny(families, target, content / "engines")
        for shape in SHAPES:
            if shape.name in shapes:
                build_hollow(shape, target, content / "hollow" / shape.name)
        kernels = content / "kernel_tests"
        command = [sys.executable, str(_HERE / "compile_kernel_tests.py"), str(kernels)]
        subprocess.run([*command, "--target", target], check=True)
        about = {"target": target, "commit": commit, "python": python}
        (content / "kit.json").write_text(json.dumps(about))
        packed = output / "kit.tar.xz"
        pack(content, packed)
        size = packed.stat().st_size
        if size > MOST_BYTES:
            packed.unlink()
            largest = "\n".join(
                f"  {part / 1e6:8.1f} MB  {name}" for part, name in largest_parts(content)[:12]
            )
            raise SystemExit(
                f"the kit has {size / 1e6:.1f} MB, more than the {MOST_BYTES / 1e6:.0f} MB that may be "
                f"carried; leave families out by --families. Largest parts before compression:\n{largest}"
            )
    shutil.copy(_REPOSITORY / "benchmarks" / "gpu_check.sh", output)
    print(f"{output}: {size / 1e6:.1f} MB for {target}. There: bash {output.name}/gpu_check.sh {output.name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets = [name for name, target in TARGETS.items() if target.family == "cuda" and not target.ptx_only]
    names = [shape.name for shape in SHAPES]
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--target", default="sm_90", choices=targets)
    parser.add_argument(
        "--families", default=",".join(FAMILIES), help="comma-separated, of tests/graph/zoo.py"
    )
    parser.add_argument("--shapes", default=",".join(names), help="comma-separated: " + ", ".join(names))
    parser.add_argument("--python", default="3.12", help="Python version of the machine, for the wheels")
    options = parser.parse_args()
    families = [name for name in options.families.split(",") if name]
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families {', '.join(unknown)}; the zoo has {', '.join(FAMILIES)}")
    make_kit(options.output, options.target, families, options.shapes.split(","), options.python)


if __name__ == "__main__":
    main()
