"""Every family of the zoo: the captured graph computes the logits of eager Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import zoo
from castiron.graph import capture
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.evaluate import GraphEvaluator

#: Five windows of 8 long. Scaled rotary frequencies differ at every position, so a few dozen show them.
_TOKENS = np.random.default_rng(11).integers(3, 250, 40)
_PREFIX = 33
#: Two float32 computations of two layers, logits of up to five.
_TOLERANCE = 1e-4


def _source_logits(model: Any, first_position: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of one prefill, and of decoding the last tokens one by one after a cached prefix."""
    positions = torch.arange(first_position, first_position + len(_TOKENS))[None]
    ids = torch.tensor(_TOKENS)[None]
    # Families without rotary or learned positions take no position_ids.
    extra = {"position_ids": positions} if first_position else {}
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False, **extra).logits[0].numpy()
        step = model(
            input_ids=ids[:, :_PREFIX], use_cache=True, **{k: v[:, :_PREFIX] for k, v in extra.items()}
        )
        rows = [step.logits[0].numpy()]
        for i in range(_PREFIX, len(_TOKENS)):
            step = model(
                input_ids=ids[:, i : i + 1],
                use_cache=True,
                cache=step.cache,
                **{k: v[:, i : i + 1] for k, v in extra.items()},
            )
            rows.append(step.logits[0].numpy())
    return whole, np.concatenate(rows)


def _check(source: Any, model: onnx.ModelProto, first_position: int = 0) -> None:
    prefill, decode = _source_logits(source, first_position)
    positions = np.arange(first_position, first_position + len(_TOKENS))
    evaluator = GraphEvaluator(model)
    np.testing.assert_allclose(evaluator.run(_TOKENS, positions), prefill, atol=_TOLERANCE, rtol=0)
    evaluator.reset()
    pieces = [(0, 20), (20, _PREFIX), *((i, i + 1) for i in range(_PREFIX, len(_TOKENS)))]
    rows = [evaluator.run(_TOKENS[a:b], positions[a:b]) for a, b in pieces]
    np.testing.assert_allclose(np.concatenate(rows), decode, atol=_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in zoo.CONFIGS if name != "phi3_longrope"])
def test_graph_computes_the_logits_of_the_source_model(name: str, tmp_path: Path) -> None:
    source = zoo.make_checkpoint(name, tmp_path)
    captured = capture(Checkpoint.open(tmp_path))
    assert captured.report.checked_on == "the model"
    assert not [k for k, v in captured.report.replaced.items() if "no rotation of the vocabulary" in v]
    _check(source, captured.model)


@pytest.mark.parametrize(
    ("max_seq_len", "first_position", "table"), [(128, 0, "short"), (512, 400, "long"), (129, 89, "long")]
)
def test_longrope_table_is_chosen_by_the_longest_sequence_an_engine_allows(
    max_seq_len: int, first_position: int, table: str, tmp_path: Path
) -> None:
    # The table changes past original_max_position_embeddings = 128; 128 itself is still short. The source
    # model picks by its longest position, so it is run where both choices agree.
    source = zoo.make_checkpoint("phi3_longrope", tmp_path)
    captured = capture(Checkpoint.open(tmp_path), max_seq_len=max_seq_len)
    assert f"{table} table" in captured.report.notes[0]
    evaluator = GraphEvaluator(captured.model)
    positions = np.arange(first_position, first_position + len(_TOKENS))
    with torch.no_grad():
        expected = source(
            input_ids=torch.tensor(_TOKENS)[None], position_ids=torch.tensor(positions)[None], use_cache=False
        ).logits[0]
    np.testing.assert_allclose(evaluator.run(_TOKENS, positions), expected.numpy(), atol=_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_bfloat16_checkpoints_are_captured_in_float32(name: str, tmp_path: Path) -> None:
    source = zoo.make_checkpoint(name, tmp_path, dtype=torch.bfloat16).float()
    _check(source, capture(Checkpoint.open(tmp_path)).model)


def test_every_value_has_a_shape_and_every_weight_is_a_reference(tmp_path: Path) -> None:
    zoo.make_checkpoint("llama_tied", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = capture(checkpoint).model
    onnx.checker.check_model(_without_locations(model))
    shaped = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    assert all(output in shaped for node in model.graph.node for output in node.output)
    external = {t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert external == set(checkpoint.tensors)
    assert sum(len(t.raw_data) for t in model.graph.initializer) < 1000
    # One tensor serves the embedding and the head.
    readers = [n.op_type for n in model.graph.node if "model.embed_tokens.weight" in n.input]
    assert readers == ["Gather", "Linear"]


def _without_locations(model: onnx.ModelProto) -> onnx.ModelProto:
    """The checker refuses absolute paths; nothing else about the model changes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = bytes(4 * int(np.prod(tensor.dims)))
    return copy


def test_node_names_carry_the_module_path(tmp_path: Path) -> None:
    zoo.make_checkpoint("llama", tmp_path)
    names = {node.name for node in capture(Checkpoint.open(tmp_path)).model.graph.node}
    assert "model/layers.1/self_attn/q_proj/Linear" in names
    assert "model/layers.0/mlp/act_fn/Activation" in names
