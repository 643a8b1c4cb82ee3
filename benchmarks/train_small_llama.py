"""A small Llama trained for some minutes: a model for 4-bit comparisons whose weights never were 4-bit codes.

    python benchmarks/train_small_llama.py OUT --text FILE [FILE ...] --minutes 5

The weights of the SmolLM2 that this project can get were once quantized to Q4_1 in groups of 32, which
flatters 4-bit schemes with such groups. This writes a bf16 Hugging Face checkpoint with a tokenizer of its
own (byte-level BPE), trained from random numbers on the texts that are named; evaluate it on another text.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_WINDOW = 256
_BATCH = 16
_PEAK_RATE = 2e-3
_WARM_UP = 50


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="of CPU time, all threads together")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    text = "\n\n".join(file.read_text("utf-8") for file in given.text)
    tokenizer = train_tokenizer(text, given.vocabulary)
    ids = torch.from_numpy(np.asarray(tokenizer.encode(text).ids, np.int64))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=given.hidden,
            intermediate_size=given.hidden * 11 // 4,
            num_hidden_layers=given.layers,
            num_attention_heads=given.hidden // 64,
            num_key_value_heads=max(1, given.hidden // 128),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    train(model, ids, 60 * given.minutes)
    model.to(torch.bfloat16).save_pretrained(given.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(given.out)


def train_tokenizer(text: str, size: int) -> Any:
    """A byte-level BPE tokenizer of ``size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def train(model: Any, ids: torch.Tensor, seconds: float) -> None:
    """AdamW for ``seconds`` of CPU time; the learning rate warms up and falls to zero by a cosine."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=_PEAK_RATE,
        betas=(0.9, 0.95),
    )
    started, begun, step, spent = time.process_time(), time.perf_counter(), 0, 0.0
    while spent < seconds:
        rate = _PEAK_RATE * min(1.0, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * spent / seconds)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(ids) - _WINDOW, (_BATCH, 1))
        batch = ids[starts + torch.arange(_WINDOW)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent, step = time.process_time() - started, step + 1
        if step % 20 == 0:
            print(
                f"step {step}, {step * _BATCH * _WINDOW / 1e3:.0f} k tokens of {len(ids) / 1e3:.0f} k, loss "
                f"{loss.item():.3f}, {spent:.0f} s of CPU, {time.perf_counter() - begun:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
