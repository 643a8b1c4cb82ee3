"""Popular clients against the server on an engine.

    python tests/clients/run.py ENGINE --venv .venv-clients [--reference HF_FOLDER]

The server runs in this environment, the clients in one of their own. With ``--reference`` (needs the extra
``build``) the perplexity that lm-eval measures is compared with transformers' on the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    """Exit code of the checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-clients")
    parser.add_argument("--reference", type=Path, help="the engine's checkpoint, to compare perplexities")
    given = parser.parse_args()
    python = clients_python(given.venv)
    texts = documents()
    perplexity = None if given.reference is None else word_perplexity(given.reference, texts)
    file = given.venv / "texts.json"
    file.write_text(json.dumps({"texts": texts, "perplexity": perplexity}), "utf-8")
    # A chat template that knows no tools still shows what clients make of the calls that a grammar enforces.
    command = [
        *(sys.executable, "-m", "castiron", "serve-engine", str(given.engine), "--port", "0"),
        *("--served-model-name", "model", "--enable-tokenizer-info-endpoint", "--tool-call-parser", "hermes"),
        *("--log-level", "warning"),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url, context = started(server)
        check = [str(python), str(HERE / "checks.py"), url, "model", str(context), str(file)]
        return subprocess.run(check, check=False).returncode
    finally:
        server.terminate()
        server.wait(60)


def clients_python(folder: Path) -> Path:
    """The interpreter of the clients' environment, made at the first use and when the requirements change."""
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = HERE / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(wanted)], check=True)
        stamp.write_text(wanted.read_text())
    return python


def documents() -> list[str]:
    """Plain prose of a few hundred words each: pages of the documentation, without tables and code."""
    texts = []
    for name in ("architecture", "batching", "quantization", "passes"):
        page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        prose = [line for line in page.splitlines() if re.match(r"[A-Z]", line)]
        texts.append(" ".join("\n".join(prose).split(" ")[:300]))
    return texts


def word_perplexity(checkpoint: Path, texts: list[str]) -> float:
    """Of whole documents, as lm-eval defines it; float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    # lm-eval begins documents with the token that begins texts, or else with the one that ends them.
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    total, words = 0.0, 0
    for text in texts:
        ids = [first, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        scores = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
        total += float(scores.sum())
        words += len(re.split(r"\s+", text))
    return math.exp(-total / words)


def started(server: subprocess.Popen[str]) -> tuple[str, int]:
    """Base URL and context length that the server prints."""
    context = 0
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if found := re.search(r"(\d+) tokens a request", line):
            context = int(found[1])
        if found := re.search(r"serving .* on (http\S+)/v1", line):
            return found[1], context
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
