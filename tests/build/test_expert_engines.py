"""Mixtures of experts from their folder to logits of the C++ runtime: quantized checkpoints and recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.calibration import QuantizationOptions
from castiron.engines import open_engine
from castiron.engines.precision import stored_dtypes
from castiron.graph.checkpoint import Checkpoint
from castiron.runtime import ModelRunner
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from castiron.errors import BuildError, CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
import quantizers
from quantized_formats import FORMATS, MXFP4_EXPERTS
from zoo import logits_of, make_checkpoint, source_model

IDS = np.random.default_rng(0).integers(3, 250, 45).tolist()
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 96, "max_logit_rows": 16}


def kernels(engine: Path) -> list[str]:
    return [step.kernel for step in open_engine(engine).programs["host"].steps]


def logits(engine: Path) -> np.ndarray[Any, Any]:
    with ModelRunner.from_dir(engine) as runner:
        return np.asarray(runner.context_logits(IDS))


# Experts that are stored one by one, each with codes and scales of its own.
@pytest.mark.parametrize("name", ["awq", "gptq v1", "ct w4a16", "ct w8a8", "ct nvfp4", "fp8 block"])
def test_quantized_experts_stay_in_their_codes(name: str, tmp_path: Path) -> None:
    model = quantizers.write(tmp_path / "model", FORMATS[name], "qwen3_moe")
    build(tmp_path / "model", tmp_path / "engine", BuildOptions(dtype="float32", verify="never", **LIMITS))
    # float32 against float32 in another order of summation
    assert np.abs(logits(tmp_path / "engine") - logits_of(model, IDS)).max() <= 1e-4
    used = kernels(tmp_path / "engine")
    assert used.count("quantized_expert_gated_linear") == used.count("quantized_expert_linear") == 2


def test_gpt_oss_checkpoints_that_lack_something_say_what(tmp_path: Path) -> None:
    quantizers.write(tmp_path / "model", MXFP4_EXPERTS, "gpt_oss")
    file = tmp_path / "model" / "model.safetensors"
    whole = load_file(file)

    def fails(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            build(tmp_path / "model", tmp_path / "engine", BuildOptions(dtype="float32", **LIMITS))

    scales = "model.layers.1.mlp.experts.gate_up_proj_scales"
    save_file({**whole, scales: torch.full_like(whole[scales], 254)}, file, {"format": "pt"})
    fails(BuildError, "the source model itself computes logits that are infinite or NaN")
    save_file({k: v for k, v in whole.items() if k != scales}, file, {"format": "pt"})
    fails(CheckpointError, "is quantized, but .*_scales is not stored")
    save_file(whole, file, {"format": "pt"})
    quantizers.edit_config(tmp_path / "model", quantization_config=None)
    fails(CheckpointError, 'found .*_blocks.*; blocks and scales of MXFP4 want "quantization_config"')


def test_static_scales_of_experts_become_the_largest(tmp_path: Path) -> None:
    quantizers.write(tmp_path / "model", FORMATS["ct fp8 tensor static"], "qwen3_moe")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    tensors[name] = tensors[name] * 3
    save_file(tensors, file, {"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path / "model")
    made = checkpoint.made["model.layers.0.mlp.experts.gate_up_proj"]
    assert made.rounding.x_scale == pytest.approx(float(tensors[name]))
    assert made.rounding.x_format == "fp8"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_gpt_oss_keeps_its_experts_in_mxfp4(dtype: str, tolerance: float, tmp_path: Path) -> None:
    model = quantizers.write(tmp_path / "model", MXFP4_EXPERTS, "gpt_oss")
    build(tmp_path / "model", tmp_path / "engine", BuildOptions(dtype=dtype, **LIMITS))
    assert np.abs(logits(tmp_path / "engine") - logits_of(model, IDS)).max() <= tolerance
    assert kernels(tmp_path / "engine").count("quantized_expert_linear") == 6  # gate, up and down, two layers
    (share, *_) = open_engine(tmp_path / "engine").manifest.quantization.weights
    assert (share.format, share.group, share.tensors, share.bits_per_weight) == ("fp4", 32, 6, 4 + 32 / 32)


def test_the_encoder_of_mxfp4_means_what_transformers_reads(tmp_path: Path) -> None:
    stored, numbers = quantizers.mxfp4_stack(
        np.random.default_rng(1).normal(size=(3, 64, 10)).astype(np.float32)
    )
    decoded = convert_moe_packed_tensors(stored["blocks"], stored["scales"], dtype=torch.float32)
    np.testing.assert_array_equal(decoded.numpy(), numbers)


@pytest.mark.parametrize("recipe", ["int8-wo", "int4-awq", "fp8", "nvfp4"])
def test_recipes_quantize_experts_too(recipe: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model")
    wanted = QuantizationOptions(recipe=recipe, calib_size=2, calib_seq_len=32, eval_tokens=512)
    report = build(
        tmp_path / "model", tmp_path / "engine", BuildOptions(dtype="float32", quantization=wanted, **LIMITS)
    )
    # The build has compared the engine with its quantized reference, logit by logit.
    assert report.verification is not None
    quantization = open_engine(tmp_path / "engine").manifest.quantization
    assert quantization is not None
    # The routers stay as they are.
    assert [share.tensors for share in quantization.weights if share.format == "float32"] == [2]
    assert kernels(tmp_path / "engine").count("quantized_expert_gated_linear") == 2
    plain = logits_of(source_model(tmp_path / "model"), IDS)
    # In the mean: a token near the border between two experts may go to the other one.
    change = np.abs(logits(tmp_path / "engine") - plain).mean()
    assert 0 < change < {"int8-wo": 0.01, "fp8": 0.06}.get(recipe, 0.3), change


@pytest.mark.parametrize(("name", "seed"), [("mixtral", 0), ("deepseek_v3", 0)])
def test_a_token_that_goes_to_another_expert_does_not_fail_a_build(
    name: str, seed: int, tmp_path: Path
) -> None:
    make_checkpoint(name, tmp_path / "model", dtype=torch.bfloat16, seed=seed)
    limits = {**LIMITS, "max_num_tokens": 64, "max_seq_len": 256}
    report = build(tmp_path / "model", tmp_path / "engine", BuildOptions(dtype="bfloat16", **limits))
    assert report.verification is not None
    assert report.verification.passed
    # Which rows that are depends on how this CPU rounds: on AVX2 the worst is off by 0.9, elsewhere there may
    # be none (test_golden_comparison.py has some for sure). The mean over all that count is that of rounding.
    assert report.verification.mean_kl < 1e-5


def test_experts_can_be_left_out_and_budgets_are_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path / "model")

    def built(**options: Any) -> Path:
        wanted = QuantizationOptions(calib_size=2, calib_seq_len=32, eval_tokens=0, **options)
        engine = tmp_path / str(options["recipe"])
        build(tmp_path / "model", engine, BuildOptions(dtype="float32", quantization=wanted, **LIMITS))
        return engine

    used = kernels(built(recipe="int8-wo", exclude=("*.experts.gate_up_proj",)))
    assert (used.count("expert_gated_linear"), used.count("quantized_expert_linear")) == (2, 2)
    with pytest.raises(BuildError, match="auto-quantize does not know what experts cost"):
        built(recipe="int4-wo", auto_bits=6.0)


def test_incomplete_and_unequal_experts_are_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    whole = load_file(file)
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert lost in whole

    def fails(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            build(tmp_path / "model", tmp_path / "engine", BuildOptions(**LIMITS))

    fails(
        {k: v for k, v in whole.items() if k != lost},
        r"expert 2 of 4 lacks its matrix '.experts.\*.w3.weight'",
    )
    fails({**whole, lost: whole[lost][:, :-1].contiguous()}, "expert 2 of .* has matrices of shapes")
    extra = lost.replace("experts.2", "experts.4")
    fails({**whole, extra: whole[lost].clone()}, "expert 4 of 5 lacks its matrix")


def test_what_experts_are_stored_as_counts(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    build(tmp_path / "model", tmp_path / "engine", BuildOptions(dtype="float32", verify="never", **LIMITS))
    program = open_engine(tmp_path / "engine").programs["host"]
    experts = [step for step in program.steps if step.kernel.startswith("expert_")]
    assert len(experts) == 4
    assert stored_dtypes([program.model_copy(update={"steps": experts})]) == ["bfloat16"]
