"""Capture: from a checkpoint's config to the ONNX graph, through all gates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from torch import nn

from ..export import Resolve, StoredTensor, emit
from .attention import dispatch
from .fake import build_fake_model
from .trace import trace

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

Progress = Callable[[str], None]

#: transformers' registries are global: one capture at a time.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class CaptureReport:
    """What capture did.

    ``replaced``  class or function of the model code -> the op it became, or why it was traced op by op
    ``notes``     choices and limits a user should know
    ``seconds``   duration
    """

    replaced: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of the captured graph. ``window`` and ``chunk`` in tokens, 0: unlimited."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    chunk: int


@dataclass(frozen=True)
class Capture:
    """The captured graph (docs/graph.md) with the configuration it came from."""

    model: onnx.ModelProto
    config: Any
    layers: tuple[AttentionLayer, ...]
    report: CaptureReport


@dataclass(frozen=True)
class _Declared:
    """A tensor that would be stored: what a configuration without a checkpoint refers to."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def capture(ck: Checkpoint, *, max_seq_len: int | None = None, progress: Progress | None = None) -> Capture:
    """Captures the graph of a checkpoint; no weight is read.

    ``max_seq_len`` (default: the model's limit) decides between rotary tables where a model has several.
    Raises UnsupportedModelError naming module and reason, and CheckpointError where tensors and config disagree.
    """
    return capture_config(ck.hf_config, ck.resolve, max_seq_len=max_seq_len, progress=progress)


def capture_config(
    config: Any,
    resolve: Resolve | None = None,
    *,
    max_seq_len: int | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Captures the graph of a transformers configuration.

    ``resolve`` maps a parameter's name to its stored tensor; without it the graph refers to a float32 file
    ``model.safetensors`` that holds the parameters one after the other, under the names of the model code.
    """
    started = time.monotonic()
    tell = progress or (lambda _: None)
    if max_seq_len is None:
        max_seq_len = int(getattr(config, "max_position_embeddings", None) or 2048)
    with _LOCK, dispatch():
        tell("building the model without weights")
        model, mode = build_fake_model(config)
        tell("tracing")
        traced = trace(model, mode, max_seq_len)
        tell("writing the graph")
        emitted = emit(traced.program, resolve or _declared_parameters(model), str(config.model_type))
    layers = attention_layers(emitted.model)
    report = CaptureReport(traced.replaced, traced.notes, time.monotonic() - started)
    return Capture(emitted.model, config, layers, report)


def attention_layers(model: onnx.ModelProto) -> tuple[AttentionLayer, ...]:
    """The attention ops of a captured graph, in the order of the cache layers they use."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.value_info
    }
    layers = []
    for node in model.graph.node:
        if node.op_type != "Attention":
            continue
        attributes = {
            attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        q, k, v = (shapes[name] for name in node.input[:3])
        layers.append(
            AttentionLayer(
                attributes["layer"], q[1], k[1], k[3], v[3], attributes["window"], attributes["chunk"]
            )
        )
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _declared_parameters(model: nn.Module) -> Resolve:
    declared: dict[str, StoredTensor] = {}
    owners: dict[int, StoredTensor] = {}
    offset = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in owners:
            nbytes = parameter.numel() * 4
            file = Path("model.safetensors")
            owners[id(parameter)] = _Declared(
                name, file, np.dtype(np.float32), tuple(parameter.shape), offset, nbytes
            )
            offset += nbytes
        declared[name] = owners[id(parameter)]
    return declared.__getitem__
