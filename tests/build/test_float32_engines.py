"""Float32 engines of checkpoints in bf16: half the bytes, the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.engines.reader import open_engine
from castiron.runtime import ModelRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

OPTIONS = BuildOptions(
    dtype="float32", max_batch_size=4, max_num_tokens=64, max_seq_len=96, max_logit_rows=64, verify="never"
)


def save_as(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The checkpoint with its weights rounded to bf16 and stored as ``dtype``."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.to(dtype).save_pretrained(folder)
    return folder


def product_dtypes(folder: Path) -> set[str]:
    """Of the weights that products read."""
    program = open_engine(folder).programs["host"]
    dtypes = {weight.name: weight.dtype for weight in program.weights}
    products = [step for step in program.steps if step.kernel in ("linear", "gated_linear")]
    assert {step.attrs["x_format"] for step in products} == {"float"}
    return {dtypes[step.weights[0]] for step in products}


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "gemma3_text"])
def test_weights_that_bf16_holds_are_stored_so_and_give_the_bits_of_float32(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(name, tmp_path / "model")
    logits = []
    for stored, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        source = save_as(tmp_path / "model", tmp_path / stored, dtype)
        engine = tmp_path / f"engine-{stored}"
        plan = build(source, engine, OPTIONS).plan
        assert product_dtypes(engine) == {stored}
        same = stored == "f32"
        assert plan.precision == ("float32" if same else "float32 (weights stored as bfloat16)")
        assert (plan.dtype, plan.stored_dtypes) == ("float32", ("float32" if same else "bfloat16",))
        with ModelRunner.from_dir(engine) as runner:
            # One row at a time and many: kernels that widen weights once for all rows, or as they come.
            prompts = [list(range(3, 3 + length)) for length in (1, 5, 40)]
            rows = [runner.context_logits(prompt) for prompt in prompts]
            answers = runner.generate(input_ids=prompts, max_new_tokens=8, ignore_eos=True)
            logits.append((rows, [answer.outputs[0].token_ids for answer in answers]))
    (narrow, narrow_tokens), (wide, wide_tokens) = logits
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(a, b)
    assert narrow_tokens == wide_tokens


def test_queries_keys_and_values_may_be_stored_in_several_dtypes(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model", dtype=torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        wider = {"k_proj": torch.float16, "v_proj": torch.float32}
        tensors[name] = tensor.to(next((d for part, d in wider.items() if part in name), tensor.dtype))
    file.unlink()  # its old bytes may still be mapped
    save_file(tensors, file, metadata={"format": "pt"})
    # Refused unless the engine's logits are those of the model.
    build(tmp_path / "model", tmp_path / "engine", replace(OPTIONS, verify="always"))
    assert product_dtypes(tmp_path / "engine") == {"bf16", "f32"}
