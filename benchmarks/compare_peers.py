"""castiron beside its peers, in one run on one machine.

  compare_peers.py --engine ENGINE [--engine ENGINE ...] --peers-dir DIR [--peers PATH/peers.py] [--repeat 5]
                   [--only REGEX | --no-peers] [--json FILE]

The peers are measured by ``peers.py`` in the venvs below --peers-dir (its setup script makes them); castiron
by ``castiron_row.py``, with the same definitions. Each row runs in a process of its own. Printed are the
rows, the ratio of each engine to the best peer of its precision, and what part of the memory bandwidth
(read through 2 MiB pages, measured in the same run) decoding one request reaches.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bandwidth import read_bandwidth

HERE = Path(__file__).resolve().parent
#: The peers' rows by the precision that an engine is held against.
PRECISIONS = {
    "bfloat16": r"^(llama\.cpp BF16|openvino bf16|hf-torch bf16|vllm-cpu bf16)$",
    "float32": r"^(llama\.cpp F32|openvino f32|ort-genai fp32|ctranslate2 float32|(hf-torch|vllm-cpu) fp32)$",
    "int8": r"^(llama\.cpp Q8_0|openvino int8/(f32|bf16)|ort-genai int8|ctranslate2 int8|vllm-cpu w8a8)$",
    "int4": r"^(llama\.cpp Q4_0|openvino int4/(f32|bf16)|ort-genai int4|vllm-cpu w4a16)$",
}
Row = dict[str, Any]


def engine_row(engine: str, a: argparse.Namespace) -> Row:
    """Measure one engine in a fresh process, and the time to its first token in several more."""
    command = [sys.executable, str(HERE / "castiron_row.py"), engine]
    command += ["--threads", str(a.threads), "--repeat", str(a.repeat), "--budget", str(a.budget)]
    command += ["--batch", ",".join(map(str, a.batch))]
    reference = a.peers_dir and Path(a.peers_dir, "models", "ref.json")
    if reference and reference.is_file():
        command += ["--reference", str(reference)]
    row: Row = json.loads(_result(command))
    starts = [float(_result([sys.executable, str(HERE / "first_token.py"), engine])) for _ in range(a.repeat)]
    row |= {"first_token_s": statistics.median(starts), "dtype": _dtype(engine)}
    return row


def peer_rows(a: argparse.Namespace, only: str) -> dict[str, Row]:
    """Run peers.py on the rows that match."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, a.peers, "--peers-dir", a.peers_dir, "--only", only, "--json", file.name]
        command += ["--repeat", str(a.repeat), "--threads", str(a.threads), "--budget", str(a.budget)]
        command += ["--batch", ",".join(map(str, a.batch))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text = Path(file.name).read_text()
    if not text:
        raise SystemExit(f"--only {only!r} matches no row of {a.peers}; --no-peers leaves them out")
    rows: dict[str, Row] = json.loads(text)["rows"]
    return rows


def llama_bench(rows: dict[str, Row]) -> dict[str, Row]:
    """llama.cpp's own benchmark programs (no HTTP, static batch) as rows of their own."""
    return {f"{name} (llama-bench)": row["bench"] for name, row in rows.items() if "bench" in row}


def ratios(row: Row, peers: dict[str, Row], columns: list[str]) -> dict[str, tuple[float, str] | None]:
    """For each column: how many times the best peer of the engine's precision, and which that is."""
    wanted = re.compile(PRECISIONS.get(row["dtype"], "$^"))
    fit = {
        n: r for n, r in peers.items() if wanted.match(n.removesuffix(" (llama-bench)")) and "error" not in r
    }
    found: dict[str, tuple[float, str] | None] = {}
    for column in columns:
        best = max(((r[column], n) for n, r in fit.items() if r.get(column)), default=None)
        found[column] = None if best is None else (row[column] / best[0], best[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", required=True, help="an engine folder; may be repeated")
    parser.add_argument("--peers-dir", help="where setup_peers.sh installed the peers")
    parser.add_argument("--peers", default=str(HERE.parent.parent / "shared" / "peers" / "peers.py"))
    parser.add_argument("--only", help="regex of peers' rows [default: those of the engines' precisions]")
    parser.add_argument("--no-peers", action="store_true", help="measure the engines and the bandwidth alone")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=lambda s: [int(x) for x in s.split(",")], default=[8, 32])
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds a figure to wait for an idle machine"
    )
    parser.add_argument("--json", help="write everything to this file")
    a = parser.parse_args()
    if not a.no_peers and not a.peers_dir:
        parser.error("give --peers-dir, or --no-peers")

    bandwidth = read_bandwidth(a.threads)
    engines = {f"castiron {Path(engine).name}": engine_row(engine, a) for engine in a.engine}
    peers: dict[str, Row] = {}
    if not a.no_peers:
        patterns = {PRECISIONS[r["dtype"]] for r in engines.values() if r["dtype"] in PRECISIONS}
        only = a.only or "|".join(sorted(patterns))
        peers = peer_rows(a, only)
        peers |= llama_bench(peers)
    columns = ["decode", "prefill", *(f"x{n}" for n in a.batch)]
    report = {
        "threads": a.threads,
        "repeat": a.repeat,
        "read_bandwidth_GBs": bandwidth,
        "rows": engines | peers,
        "ratios": {name: ratios(row, peers, columns) for name, row in engines.items()},
        "roofline": {n: r["decode"] * r["decode_bytes"] / (bandwidth * 1e9) for n, r in engines.items()},
    }
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))
    print_report(report, columns)


def print_report(report: dict[str, Any], columns: list[str]) -> None:
    shown = [*columns, "load", "rss", "same", "other"]
    print("| row | " + " | ".join(shown) + " |\n|---" + "|---:" * len(shown) + "|")
    for name, row in report["rows"].items():
        if "error" in row:
            print(f"| {name} | failed: {row['error'].strip().splitlines()[-1][:100]} |")
            continue
        cells = ("" if c not in row else f"{row[c]:.{2 if c in ('load', 'other') else 0}f}" for c in shown)
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, found in report["ratios"].items():
        for column, ratio in found.items():
            if ratio is not None:
                print(f"{name}: {column} {ratio[0]:.2f}x the best peer ({ratio[1]})")
    print(f"memory: {report['read_bandwidth_GBs']:.1f} GB/s read by {report['threads']} threads, 2 MiB pages")
    for name, part in report["roofline"].items():
        row = report["rows"][name]
        print(
            f"{name}: decoding reads {100 * part:.0f} % of that ({row['decode_bytes'] / 1e6:.0f} MB a token)"
        )
        print(f"{name}: {row['first_token_s']:.2f} s from import to first token")


def _dtype(engine: str) -> str:
    """The engine's precision: the format of most of its weights."""
    config = json.loads(Path(engine, "config.json").read_text())
    shares = (config.get("quantization") or {}).get("weights", [])
    if not shares:
        return str(config["model"]["dtype"])
    return str(max(shares, key=lambda share: int(share["elements"]))["format"])


def _result(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}{done.stdout[-500:]}")
    return match[1]


if __name__ == "__main__":
    main()
