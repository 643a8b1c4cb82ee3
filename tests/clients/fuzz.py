"""schemathesis on /openapi.json: whatever is sent, no answer is a 5xx but the two that are meant.

    python tests/clients/fuzz.py --venv .venv-clients [--max-examples 200]

The server runs in this process over the tests' twin of the core, with every optional endpoint but those that
read folders: requests are answered at once, and the context is short.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]

import live_server  # noqa: E402
import make_tokenizer  # noqa: E402
import tool_answers  # noqa: E402
from fake_core import FakeCore  # noqa: E402
from run import clients_python  # noqa: E402


class Core(FakeCore):
    """Takes grammars, and follows none."""

    def poll_masks(self, timeout: float) -> list[Any]:
        """No output ever asks for a mask."""
        time.sleep(timeout)
        return []


def main() -> int:
    """0 where no answer was a server's error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=HERE.parent.parent / ".venv-clients")
    parser.add_argument("--max-examples", type=int, default=100)
    given = parser.parse_args()
    program = clients_python(given.venv).with_name("schemathesis")
    logging.basicConfig(level=logging.ERROR)  # the server's log has the traces
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer.byte_level(Path(folder), chat_template=tool_answers.TEMPLATE)
        limits = {"eos_token_ids": (tool_answers.END,), "max_seq_len": 512}
        with live_server.serve(
            Core(), tokenizer_dir=tokenizer, config={"tokenizer_info": True}, max_queue_size=256, **limits
        ) as (url, service):
            command = [
                *(str(program), "run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
                *("--phases", "examples,coverage,fuzzing", "--max-examples", str(given.max_examples)),
                *("--workers", "2", "--request-timeout", "60", "--max-failures", "50", "--seed", "1"),
                *("--continue-on-failure", "--no-color"),
            ]
            made = subprocess.run(command, check=False, cwd=folder)
            refused = service.metrics.text().decode()
    counts = [line for line in refused.splitlines() if line.startswith("castiron:request_refused_total")]
    print("\n".join(counts))
    return made.returncode


if __name__ == "__main__":
    sys.exit(main())
