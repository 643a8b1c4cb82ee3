"""Quantized GGUF files: blocks stay as they are, whatever the order of their rows."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from castiron.graph import capture
from castiron.graph.checkpoint import Checkpoint, MadeTensor
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.weights import WeightGraph
from gguf_files import Blocks, random_blocks, tiny_llama, write_gguf

from castiron.errors import CheckpointError

#: Every type, on all kinds of matrices; q and k have their rows in llama.cpp's order.
TYPES = {
    "model.embed_tokens": "Q6_K",
    "lm_head": "Q5_1",
    "self_attn.q_proj": "Q4_K",
    "self_attn.k_proj": "Q5_K",
    "self_attn.v_proj": "Q6_K",
    "self_attn.o_proj": "Q4_0",
    "mlp.gate_proj": "Q4_1",
    "mlp.up_proj": "Q5_0",
    "mlp.down_proj": "Q8_0",
}
CODES = {"Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parameter(module: str) -> str:
    return f"{'' if module in ('model.embed_tokens', 'lm_head') else 'model.layers.0.'}{module}.weight"


def test_a_quantized_file_keeps_its_blocks_and_has_the_logits_of_its_numbers(tmp_path: Path) -> None:
    model = tiny_llama(width=256, intermediate=512)
    state = model.state_dict()
    blocks = {}
    for seed, (module, kind) in enumerate(TYPES.items()):
        weight = state[parameter(module)]
        raw = random_blocks(kind, *weight.shape, seed)
        blocks[parameter(module)] = Blocks(kind, raw)
        numbers = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        weight.copy_(torch.from_numpy(numbers))
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", model, blocks=blocks))
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.description == "gguf Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0"
    captured = capture(checkpoint)
    graph = WeightGraph(captured.model)
    for module, kind in TYPES.items():
        name = parameter(module)
        assert isinstance(checkpoint.info(name), MadeTensor)
        wanted = state[name].numpy()
        # Types with an offset round it once more, at the size of the offset
        np.testing.assert_allclose(checkpoint.read(name), wanted, atol=1e-6 * np.abs(wanted).max())
        parts = graph.expr(name).parts()
        assert parts is not None
        assert parts.format == CODES.get(kind, "int8")
        assert parts.group == (16 if kind == "Q6_K" else 32)
    ids = np.arange(20)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    size = np.abs(expected).max()
    np.testing.assert_allclose(GraphEvaluator(captured.model).run(ids), expected, atol=2e-5 * size)


def test_a_file_that_went_away_is_missed_by_name(tmp_path: Path) -> None:
    model = tiny_llama()
    name = "model.layers.0.mlp.up_proj.weight"
    raw = gguf.quants.quantize(model.state_dict()[name].numpy(), gguf.GGMLQuantizationType.Q8_0)
    file = write_gguf(tmp_path / "m.gguf", model, blocks={name: Blocks("Q8_0", raw)})
    folder = Checkpoint.open(file).folder
    file.unlink()
    with pytest.raises(CheckpointError, match=r"m\.gguf: not found"):
        Checkpoint.open(folder)
