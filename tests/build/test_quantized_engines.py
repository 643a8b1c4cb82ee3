"""Quantized checkpoints from their folder to logits of the C++ runtime, against the dequantized model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.build.weight_table import WeightPool, WeightTable
from castiron.graph.weights import WeightGraph
from castiron.plugins import WeightUse
from castiron.runtime import ModelRunner
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
import quantizers
from quantized_formats import FORMATS

IDS = np.random.default_rng(0).integers(3, 250, 45)
LIMITS = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 96, "max_logit_rows": 16}


def difference(folder: Path, name: str, dtype: str) -> float:
    """Largest difference of logits between the engine of a format and the dequantized float32 model."""
    model = quantizers.write(folder / "model", FORMATS[name], num_hidden_layers=2)
    build(folder / "model", folder / "engine", BuildOptions(dtype=dtype, verify="never", **LIMITS))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy()
    with ModelRunner.from_dir(folder / "engine") as runner:
        return float(np.abs(runner.context_logits(IDS.tolist()) - wanted).max())


# One of each family, and what differs most in how codes reach a kernel: offsets, an order of inputs, an input
# scale, float codes in blocks.
@pytest.mark.parametrize(
    "name", ["awq", "gptq desc_act", "ct w8a8", "ct nvfp4", "fp8 block", "modelopt int8 smoothed"]
)
def test_a_float32_engine_has_the_logits_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    # float32 against float32 in another order of summation, logits up to 2.6
    assert difference(tmp_path, name, "float32") <= 1e-4


@pytest.mark.parametrize("name", ["gptq desc_act", "ct w4a16"])
def test_a_bfloat16_engine_multiplies_by_the_codes(name: str, tmp_path: Path) -> None:
    # Half a code of int8 activations and the steps of bfloat16 (2^-8 of a hidden state) through two layers
    assert difference(tmp_path, name, "bfloat16") <= 0.1


def test_scales_and_offsets_of_panels_have_one_type() -> None:
    # Scales are stored in float16, offsets follow from them in float32: host's kernels read them together.
    rows, inputs, groups = 16, 32, 1
    nodes = [
        helper.make_node("Cast", ["s16"], ["s"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "z"], ["o"]),
        helper.make_node("Dequantize", ["q", "s", "o"], ["w"], domain="castiron", format="int4", group=32),
        helper.make_node("Dequantize", ["q", "s"], ["v"], domain="castiron", format="int4", group=32),
    ]
    tensors = {
        "q": np.ones((rows, inputs), np.int8),
        "s16": np.full((rows, groups), 0.5, np.float16),
        "z": np.float32(3).reshape(()),
    }
    initializers = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [], [], initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("castiron", 1)]
    weights = WeightGraph(helper.make_model(graph, opset_imports=opsets))
    table = WeightTable(WeightPool(weights), "bf16", "host")
    uses = [WeightUse(("w",), "scales"), WeightUse(("w",), "offsets"), WeightUse(("v",), "scales")]
    for use in uses:
        table.use(use)
    stored = table.finish()
    assert [stored[table.name_of(use)].dtype for use in uses] == ["f32", "f32", "f16"]
