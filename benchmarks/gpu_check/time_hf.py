"""Hugging Face transformers with torch.compile on the sizes of the 8B engine, random bf16 weights.

  time_hf.py CONFIG

``generate`` with a static cache, which compiles the decode step (reduce-overhead: CUDA graphs); prompts are
not compiled by it, so a compiled forward pass is timed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import Row
from transformers import AutoConfig, AutoModelForCausalLM

_SECTION = "transformers and torch.compile, the same sizes"
_PROMPT = 128
_NEW_TOKENS = 64


def _seconds(work: Callable[[], object], repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode(model: Any, batch: int) -> Row:
    """Seconds of a decode step: of 65 new tokens less those of one."""
    ids = torch.randint(0, model.config.vocab_size, (batch, _PROMPT), device="cuda")

    def generate(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )

    generate(_NEW_TOKENS + 1)  # compiles
    generate(_NEW_TOKENS + 1)
    long, short = _seconds(lambda: generate(_NEW_TOKENS + 1)), _seconds(lambda: generate(1))
    seconds = (long - short) / _NEW_TOKENS
    note = f"{batch / seconds:,.0f} tokens/s"
    return Row(_SECTION, f"decode, batch {batch}", value=1e3 * seconds, unit="ms/step", note=note)


def prefill(model: Any, prompt: int, compiled: bool) -> Row:
    """A forward pass over a prompt that gives the last token's logits."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt), device="cuda")

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    run = torch.compile(forward, dynamic=False) if compiled else forward
    with torch.inference_mode():
        run(ids)
        seconds = _seconds(lambda: run(ids))
    name = f"prompt of {prompt}, {'compiled' if compiled else 'eager'}"
    note = f"{prompt / seconds:,.0f} tokens/s"
    return Row(_SECTION, name, value=1e3 * seconds, unit="ms", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="JSON: fields of the Llama configuration")
    options = parser.parse_args()
    config = AutoConfig.for_model("llama", **json.loads(options.config.read_text()))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval()
    prefill(model, 1000, compiled=False).emit()
    decode(model, 1).emit()
    decode(model, 8).emit()
    prefill(model, 1000, compiled=True).emit()


if __name__ == "__main__":
    main()
