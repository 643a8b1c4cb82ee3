"""A mixture of experts beside Hugging Face transformers, in one run: tokens/s of one request and of a prompt.

The checkpoint has random weights (no small mixture is in a package registry): a Qwen3-MoE of 686 million
parameters, 32 experts of which a token takes 4, so that 157 million are read for a token. Decode: 32 tokens
behind a prompt of 32; prefill: 512 tokens. Medians of --repeat.

    python benchmarks/mixture.py --work DIR [--recipes int4-wo,int8-wo] [--dtypes bfloat16,float32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, NEW, LONG = 32, 32, 512


def make_checkpoint(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        vocab_size=49152,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure_transformers(folder: Path, dtype: str, threads: int, repeat: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(3, 40000, (1, LONG), generator=torch.Generator().manual_seed(1))

    def prefill() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    def decode() -> None:
        model.generate(
            ids[:, :PROMPT], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=2
        )

    with torch.no_grad():
        return {"prefill": LONG / _median(prefill, repeat), "decode": NEW / _median(decode, repeat)}


def measure_castiron(engine: Path, threads: int, repeat: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("castiron_row.py")), str(engine)]
    command += ["--repeat", str(repeat), "--threads", str(threads), "--batch", "8"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    row = json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))
    return {name: row["median"][name] for name in ("prefill", "decode", "x8")}


def _median(run: Any, repeat: int) -> float:
    run()
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the engines")
    parser.add_argument("--recipes", default="int4-wo")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    from castiron.build import BuildOptions, build
    from castiron.calibration import QuantizationOptions

    model = a.work / "model"
    if not (model / "config.json").is_file():
        make_checkpoint(model)
    rows: dict[str, dict[str, float]] = {}
    for recipe in ["", *filter(None, a.recipes.split(","))]:
        engine = a.work / f"engine-{recipe or 'bfloat16'}"
        if not engine.is_dir():
            wanted = QuantizationOptions(recipe=recipe or None, eval_tokens=0)
            build(model, engine, BuildOptions(quantization=wanted, max_seq_len=1024))
        rows[f"castiron {recipe or 'bfloat16'}"] = measure_castiron(engine, a.threads, a.repeat)
    for dtype in a.dtypes.split(","):
        rows[f"transformers {dtype}"] = measure_transformers(model, dtype, a.threads, a.repeat)
    for name, row in rows.items():
        print(f"{name:24}" + "".join(f"  {key} {value:7.1f}" for key, value in row.items()))
    print("RESULT " + json.dumps(rows))


if __name__ == "__main__":
    main()
