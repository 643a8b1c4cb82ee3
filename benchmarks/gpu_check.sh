#!/usr/bin/env bash
# Checks castiron on a bare machine with one NVIDIA GPU, and measures it there, in under ten minutes.
#
#   bash gpu_check.sh KIT [OUT [OPTION...]]
#
# KIT: the folder that benchmarks/gpu_check/make_kit.py wrote. OUT: where the results go, default KIT/results.
# OPTION: of gpu_check/run_checks.py, such as --skip-timing.
# The machine needs the driver, a C++20 compiler, CMake, Ninja, and a Python with torch, triton, numpy and
# transformers; no network. Last it prints one table and the path of the JSON file. Exit code 0: all checks of
# correctness passed.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1/kit.tar.xz" ]; then
  echo "usage: bash gpu_check.sh KIT [OUT [OPTION...]]   (KIT holds kit.tar.xz, made by benchmarks/gpu_check/make_kit.py)" >&2
  exit 2
fi
kit=$(realpath "$1")
mkdir -p "${2:-$kit/results}"
out=$(realpath "${2:-$kit/results}")
python=${PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/castiron-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
began=$SECONDS

"$python" - "$kit/kit.tar.xz" "$work" <<'PYTHON'
import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], filter="data")
PYTHON
"$python" -m venv --system-site-packages "$work/venv"
# A virtual environment sees the packages of the Python that it was made with, and not those of another virtual
# environment that Python may itself live in.
"$python" - "$work/venv" <<'PYTHON'
import glob, site, sys
folder, = glob.glob(sys.argv[1] + "/lib/python3.*/site-packages")
with open(folder + "/outer.pth", "w") as file:
    file.write("\n".join(site.getsitepackages()))
PYTHON
venv=$work/venv/bin/python

# Packages that the machine has already are left as they are.
wheels=$work/wheels
names=()
for wheel in "$wheels"/*.whl; do
  name=$(basename "$wheel")
  names+=("${name%%-*}")
done
"$venv" -m pip install --quiet --no-index --no-deps --find-links "$wheels" "${names[@]}"
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$venv" -m pip install --quiet --no-index --no-deps --no-build-isolation \
  "$work/source"
echo "installed in $((SECONDS - began)) s" >&2

status=0
"$venv" "$work/source/benchmarks/gpu_check/run_checks.py" "$work" --json "$out/gpu_check.json" \
  --seconds $((570 - SECONDS + began)) "${@:3}" 2> >(tee "$out/progress.log" >&2) |
  tee "$out/table.txt" || status=$?
echo "results in $out/gpu_check.json"
exit "$status"
