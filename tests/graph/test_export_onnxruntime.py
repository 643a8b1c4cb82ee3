"""ONNX Runtime as an independent oracle: it runs the standard-op form of captured graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo
from castiron.graph import capture
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.stdops import to_standard_ops

_TOKENS = np.random.default_rng(3).integers(3, 250, 29)


def _onnxruntime_logits(model: onnx.ModelProto, folder: Path, rows: list[int]) -> np.ndarray:
    # ONNX Runtime resolves references relative to the model file and refuses paths that leave its folder.
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = Path(entry.value).name
    path = folder / "standard.onnx"
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {
        "token_ids": _TOKENS,
        "positions": np.arange(len(_TOKENS)),
        "logit_rows": np.array(rows),
    }
    (logits,) = session.run(["logits"], feeds)
    return logits


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_biases", "qwen3", "gemma2", "mistral", "gpt2", "phi", "bloom", "glm4", "nemotron"],
)
def test_onnx_runtime_computes_the_logits_of_the_source_model(name: str, tmp_path: Path) -> None:
    source = zoo.make_checkpoint(name, tmp_path)
    rows = [28, 0, 17]
    with torch.no_grad():
        expected = source(input_ids=torch.tensor(_TOKENS)[None]).logits[0, rows].numpy()
    graph = to_standard_ops(capture(Checkpoint.open(tmp_path)).model)
    # Two float32 implementations of two layers with logits of a few units.
    np.testing.assert_allclose(_onnxruntime_logits(graph, tmp_path, rows), expected, atol=2e-5, rtol=0)


def test_onnx_runtime_reads_bfloat16_weights_in_place(tmp_path: Path) -> None:
    source = zoo.make_checkpoint("llama_tied", tmp_path, dtype=torch.bfloat16).float()
    with torch.no_grad():
        expected = source(input_ids=torch.tensor(_TOKENS)[None]).logits[0, [5]].numpy()
    graph = to_standard_ops(capture(Checkpoint.open(tmp_path)).model)
    np.testing.assert_allclose(_onnxruntime_logits(graph, tmp_path, [5]), expected, atol=2e-5, rtol=0)
