"""Quantized checkpoints of every format: numbers, logits, and what they say of activations and cache."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import quantizers
import torch
import zoo
from castiron.graph import Capture, capture, reference, streamed
from castiron.graph.capturing.made import put_made
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.quant_plan import CacheScales, QuantPlan
from castiron.graph.reference import SourceModel
from castiron.graph.weights import WeightGraph
from quantized_formats import FORMATS
from safetensors.torch import load_file, save_file

IDS = np.random.default_rng(0).integers(3, 250, 20)


def logits(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy()
    return found


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The graph of the model that every format here is made of; capture takes seconds, so it is made once."""
    folder = tmp_path_factory.mktemp("unquantized")
    zoo.make_checkpoint("llama", folder, **quantizers.SIZES)
    return capture(Checkpoint.open(folder))


def codes_of(name: str) -> str:
    """What a format's codes are, by its name here."""
    for pattern, format in (("fp4", "fp4"), ("fp8", "fp8"), ("w8|int8|8 bits", "int8")):
        if re.search(pattern, name):
            return format
    return "int4"


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_and_logits_are_those_of_the_dequantized_model(
    name: str, tmp_path: Path, unquantized: Capture
) -> None:
    model = quantizers.write(tmp_path, FORMATS[name])
    checkpoint = Checkpoint.open(tmp_path)
    for parameter, expected in model.named_parameters():
        stored = checkpoint.resolve_like(parameter, expected.shape)
        wanted = expected.detach().numpy()
        # One rounding of float32 a number; offsets add one of the size of the offset
        np.testing.assert_allclose(checkpoint.read(stored.name), wanted, atol=4e-7 * np.abs(wanted).max())
    checkpoint.account({checkpoint.resolve(parameter).name for parameter, _ in model.named_parameters()})

    graph = onnx.ModelProto()
    graph.CopyFrom(unquantized.model)
    assert checkpoint.quantization is not None
    put_made(graph, checkpoint.made, checkpoint.quantization.cache, unquantized.layers)
    # float32 against float32 in another order of summation, logits of size one
    np.testing.assert_allclose(GraphEvaluator(graph).run(IDS), logits(model), atol=2e-5)
    weights = WeightGraph(graph)
    for projection in ("self_attn.q_proj", "mlp.down_proj"):
        parts = weights.expr(f"model.layers.0.{projection}.weight").parts()
        assert parts is not None
        assert parts.format == codes_of(name)


def opened(folder: Path, form: quantizers.Format, **overrides: Any) -> Checkpoint:
    quantizers.write(folder, form, **overrides)
    return Checkpoint.open(folder)


def plan_of(checkpoint: Checkpoint, unquantized: Capture) -> tuple[onnx.ModelProto, QuantPlan]:
    graph = onnx.ModelProto()
    graph.CopyFrom(unquantized.model)
    assert checkpoint.quantization is not None
    return graph, put_made(graph, checkpoint.made, checkpoint.quantization.cache, unquantized.layers)


@pytest.mark.parametrize(
    ("name", "x_format", "x_group", "x_scale"),
    [
        ("ct w8a8", "int8", 0, 0.0),
        ("ct w8a8 static", "int8", 0, 0.05),
        ("ct fp8 channel", "fp8", 0, 0.0),
        ("ct fp8 tensor static", "fp8", 0, 0.02),
        ("ct fp8 block", "fp8", 40, 0.0),
        ("ct nvfp4", "nvfp4", 0, 1 / 900),
        ("fp8 block", "fp8", 40, 0.0),
        ("modelopt fp8", "fp8", 0, 0.01),
        ("modelopt int8 smoothed", "int8", 0, 0.03),
        ("modelopt w4a8 awq", "fp8", 0, 0.02),
        ("modelopt nvfp4", "nvfp4", 0, 0.002),
        ("modelopt mxfp8", "mxfp8", 0, 0.0),
    ],
)
def test_what_products_round_their_inputs_to_is_told_to_the_passes(
    name: str, x_format: str, x_group: int, x_scale: float, tmp_path: Path, unquantized: Capture
) -> None:
    _, plan = plan_of(opened(tmp_path, FORMATS[name]), unquantized)
    assert len(plan.linears) == 7
    for linear in plan.linears.values():
        assert (linear.format, linear.x_format, linear.x_group) == (None, x_format, x_group)
        assert linear.x_scale == pytest.approx(x_scale, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["awq", "gptq v1", "ct w4a16", "modelopt int4 awq", "modelopt nvfp4 weights"]
)
def test_weight_only_formats_leave_activations_alone(name: str, tmp_path: Path, unquantized: Capture) -> None:
    assert plan_of(opened(tmp_path, FORMATS[name]), unquantized)[1] == QuantPlan()


def test_projections_that_share_an_input_scale_share_its_multiplication(
    tmp_path: Path, unquantized: Capture
) -> None:
    graph, _ = plan_of(opened(tmp_path, FORMATS["modelopt int8 smoothed"]), unquantized)
    inputs: dict[str, set[str]] = {}
    for node in graph.graph.node:
        if node.op_type == "Linear" and "lm_head" not in node.input[1]:
            inputs.setdefault(node.input[0], set()).add(node.input[1].split(".")[-2])
    assert sorted(map(sorted, inputs.values())) == [
        ["down_proj"],
        ["gate_proj", "up_proj"],
        ["k_proj", "q_proj", "v_proj"],
        ["o_proj"],
    ]
    scaled = [node for node in graph.graph.node if node.op_type == "Mul" and node.output[0] in inputs]
    assert len(scaled) == 4


_FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"}


def cache_scales(module: str) -> dict[str, torch.Tensor]:
    base = f"model.layers.0.self_attn.{module}"
    return {
        base.format("k") + "k_scale": torch.tensor(0.5),
        base.format("v") + "v_scale": torch.tensor([2.0]),
    }


@pytest.mark.parametrize(
    "form",
    [
        replace(
            FORMATS["modelopt fp8"],
            config=quantizers.mo_config(
                "FP8", kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}
            ),
            extra=cache_scales("{}_proj."),
        ),
        replace(
            FORMATS["modelopt nvfp4"],
            config=quantizers.mo_file("NVFP4", group_size=16, kv_cache_quant_algo="FP8"),
            extra=cache_scales("{}_proj."),
        ),
        replace(
            FORMATS["ct w4a16"],
            config={**FORMATS["ct w4a16"].config, "kv_cache_scheme": _FP8_CACHE},
            extra=cache_scales(""),
        ),
    ],
    ids=["modelopt config.json", "modelopt hf_quant_config.json", "compressed-tensors"],
)
def test_scales_of_the_cache_are_kept_for_each_head(
    form: quantizers.Format, tmp_path: Path, unquantized: Capture
) -> None:
    _, plan = plan_of(opened(tmp_path, form), unquantized)
    assert plan.kv_format == "fp8"
    assert plan.kv_scales == {0: CacheScales((0.5, 0.5), (2.0, 2.0))}


def test_a_plain_checkpoint_has_no_quantization(tmp_path: Path) -> None:
    zoo.make_checkpoint("llama", tmp_path)
    assert Checkpoint.open(tmp_path).quantization is None


def test_rows_are_read_in_any_range_and_into_the_callers_memory(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, FORMATS["gptq desc_act"])
    name = "model.layers.0.self_attn.v_proj.weight"
    whole = checkpoint.read(name)
    buffer = np.zeros(whole.size, np.float32)
    for start, stop in checkpoint.row_chunks(name, 1000):
        np.testing.assert_array_equal(checkpoint.read(name, start, stop), whole[start:stop])
        np.testing.assert_array_equal(checkpoint.read(name, start, stop, out=buffer), whole[start:stop])
    with pytest.raises(ValueError, match="has 32 rows"):
        checkpoint.read(name, 0, 33)


def test_the_source_model_streams_dequantized_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SMALL", 1)
    monkeypatch.setattr(streamed, "_PIECE_BYTES", 3000)
    model = quantizers.write(tmp_path, FORMATS["awq"])
    source = SourceModel(Checkpoint.open(tmp_path), whole_model_bytes=0)
    assert source.streamed
    np.testing.assert_allclose(source.logits(IDS, range(len(IDS))), logits(model), atol=5e-6)


def test_the_fingerprint_sees_the_stored_tensors(tmp_path: Path) -> None:
    first = opened(tmp_path / "a", FORMATS["awq"]).fingerprint
    assert opened(tmp_path / "b", FORMATS["awq"]).fingerprint == first
    assert opened(tmp_path / "c", FORMATS["awq without zero points"]).fingerprint != first


@pytest.mark.parametrize(
    ("file", "form", "values"),
    [
        ("quantize_config.json", "gptq v1", quantizers.gptq_config(quant_method=None)),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_configs_in_the_tools_own_files_are_read(
    file: str, form: str, values: dict[str, Any], tmp_path: Path
) -> None:
    model = quantizers.write(tmp_path, replace(FORMATS[form], config=values, in_file=file))
    found = Checkpoint.open(tmp_path).read("model.layers.0.self_attn.q_proj.weight")
    wanted = model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_checkpoint_with_a_quantized_cache_alone_keeps_its_weights(
    tmp_path: Path, unquantized: Capture
) -> None:
    zoo.make_checkpoint("llama", tmp_path, **quantizers.SIZES)
    state = load_file(tmp_path / "model.safetensors") | cache_scales("{}_proj.")
    save_file(state, tmp_path / "model.safetensors")
    config = quantizers.mo_file(None, kv_cache_quant_algo="FP8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    graph, plan = plan_of(Checkpoint.open(tmp_path), unquantized)
    assert graph == unquantized.model
    assert plan == QuantPlan({}, "fp8", {0: CacheScales((0.5, 0.5), (2.0, 2.0))})


def test_projections_of_gpt2_are_transposed(tmp_path: Path) -> None:
    form = replace(FORMATS["gptq desc_act"], config=quantizers.gptq_config(desc_act=True))
    model = quantizers.write(tmp_path, form, "gpt2", n_layer=1)
    captured = capture(Checkpoint.open(tmp_path))
    np.testing.assert_allclose(GraphEvaluator(captured.model).run(IDS), logits(model), atol=2e-5)
    weights = WeightGraph(captured.model)
    products = [node for node in captured.model.graph.node if node.op_type == "Linear"]
    parts = [weights.expr(node.input[1]).parts() for node in products]
    assert [part is not None for part in parts] == [True] * 4 + [False]  # the head is the embedding


def test_what_the_numbers_are_stored_as_is_told_by_their_codes(tmp_path: Path) -> None:
    assert opened(tmp_path / "a", FORMATS["gptq v1"]).source_dtype == "int4"
    zoo.make_checkpoint("llama", tmp_path / "b", dtype=torch.bfloat16)
    assert Checkpoint.open(tmp_path / "b").source_dtype == "bfloat16"
