"""Supported families on the virtual device: prefill in two chunks, then decode, against transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.engines import open_engine
from castiron.runtime.loading import load_core
from castiron.runtime.options import RuntimeOptions
from test_virtual_experts import CASES, SWEEP
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from core_engine import finish, params, prompt
from zoo import CONFIGS, make_checkpoint, source_model

#: Set for every family of the zoo, which takes about ten minutes. Mixtures: test_virtual_experts.py.
ALL = "CASTIRON_ALL_FAMILIES"
MIXTURES = {family for family, _, _ in (*CASES, *SWEEP)}
#: Between them these have every op, every kind of attention and position, and shapes off powers of two.
COVERING = (
    "bloom_six_heads",
    "cohere2",
    "falcon",
    "gemma2",
    "gpt2",
    "gptj",
    "llama",
    "mistral",
    "mpt",
    "nemotron",
    "opt_projected",
    "phi",
    "qwen3",
    "stablelm_qk_norm",
)
#: Chunks of 16 tokens: the prompt lies in two, beyond the zoo's sliding windows of 8.
OPTIONS = BuildOptions(
    targets=("sm_90",),
    ptx=False,
    max_batch_size=2,
    max_num_tokens=16,
    max_seq_len=96,
    max_logit_rows=16,
    verify="never",
)
PROMPT_TOKENS, NEW_TOKENS = 19, 3
#: Weights and activations rounded to bfloat16 (2⁻⁹ relative, each) through two layers; relative to the
#: largest logit.
TOLERANCE = 0.03


def generate(engine_dir: Path, tokens: list[int]) -> dict[str, Any]:
    gpu = VirtualGpu(engine_dir, 90)
    options = RuntimeOptions(device="cuda", kv_cache_blocks=6)
    core = load_core(open_engine(engine_dir), options).core
    asked = params(max_tokens=NEW_TOKENS, logprobs=0, context_logits=True)
    number = core.submit(prompt(tokens), asked)
    outcome = finish(core, [number], seconds=200)[number]
    stats = core.stats()
    core.shutdown()
    return {
        "error": "\n".join([outcome.error, *gpu.driver.faults()]).strip(),
        "logits": outcome.context_logits,
        "tokens": outcome.token_ids,
        "logprobs": [entry.logprob for entry in outcome.logprobs],
        "graph_steps": stats["graph_steps"],
    }


@pytest.mark.parametrize("name", sorted({*CONFIGS} - MIXTURES) if ALL in os.environ else COVERING)
def test_a_family_answers_on_the_virtual_device_as_in_transformers(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "model")
    with without_compiler():
        build(tmp_path / "model", tmp_path / "engine", OPTIONS)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 200, (PROMPT_TOKENS,), generator=generator).tolist()
    found = in_process(generate, tmp_path / "engine", tokens, timeout=300)
    assert not found["error"], found["error"]
    assert found["graph_steps"] == NEW_TOKENS - 1
    source = source_model(tmp_path / "model")
    with torch.no_grad():
        whole = source(torch.tensor([tokens + found["tokens"]]), use_cache=False).logits[0]
    scale = float(whole.abs().max())
    error = np.abs(found["logits"] - whole[:PROMPT_TOKENS].numpy()).max()
    assert error <= TOLERANCE * scale
    answers = whole[PROMPT_TOKENS - 1 : -1]
    drawn = torch.tensor(found["tokens"])
    wanted = torch.log_softmax(answers, -1)[torch.arange(NEW_TOKENS), drawn]
    assert np.abs(np.array(found["logprobs"]) - wanted.numpy()).max() <= 2 * TOLERANCE * scale
    # Greedy: each token is the source's best, or a tie of rounding with it.
    assert (answers.max(-1).values - answers[torch.arange(NEW_TOKENS), drawn]).max() <= 2 * TOLERANCE * scale
