"""Capture: from a checkpoint's config to the ONNX graph, through all gates."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from torch import nn

from castiron.errors import CheckpointError, UnsupportedModelError

from ..checkpoint.quantized import CacheNumbers
from ..custom import ModuleTakeover
from ..export import Emitted, Resolve, StoredTensor, emit
from ..quant_plan import QuantPlan
from .attention import dispatch
from .fake import build_fake_model
from .gates import census, check_config, check_fields, check_layer_count, check_modules, check_version
from .layers import AttentionLayer, attention_layers
from .made import put_made
from .numeric import compare
from .trace import Traced, trace
from .twin import describe, is_small, structural_difference, twins

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

Progress = Callable[[str], None]

#: How many candidates are tried: each costs about a second.
_MAX_TWINS = 8
#: Largest twin that is run; wide models that cannot be narrowed need more than a small model.
_MAX_TWIN_PARAMETERS = 40_000_000
#: transformers' registries are global: one capture at a time.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class CaptureReport:
    """What capture did.

    ``replaced``   class or function of the model code -> the op it became, or why it was traced op by op
    ``notes``      choices and limits a user should know
    ``ignored``    stored tensors that the graph does not use, with the reason
    ``checked_on`` what the numeric check ran on: the model itself, or a twin; or why there was none
    ``max_error``  largest relative difference of logits found by it
    ``seconds``    duration
    """

    replaced: dict[str, str]
    notes: list[str]
    ignored: dict[str, str]
    checked_on: str
    max_error: float | None
    seconds: float


@dataclass(frozen=True)
class Capture:
    """The captured graph (docs/graph.md) with the configuration it came from."""

    model: onnx.ModelProto
    config: Any
    layers: tuple[AttentionLayer, ...]
    report: CaptureReport
    #: Of a quantized checkpoint: what its products round x to, and its cache's format and scales.
    quantization: QuantPlan = field(default_factory=QuantPlan)


@dataclass(frozen=True)
class _Declared:
    """A tensor that would be stored: what a configuration without a checkpoint refers to."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Graph:
    """One traced and translated model. ``stored_names``: parameter or buffer -> initializer."""

    emitted: Emitted
    traced: Traced
    parameters: int
    parameter_names: tuple[str, ...]
    stored_names: dict[str, str]


def capture(
    ck: Checkpoint,
    *,
    max_seq_len: int | None = None,
    progress: Progress | None = None,
    takeovers: Sequence[ModuleTakeover] = (),
) -> Capture:
    """Captures the graph of a checkpoint; no weight is read.

    ``max_seq_len`` (default: the model's limit) decides between rotary tables where a model has several.
    ``progress`` is told each phase in words. ``takeovers``: modules that become plugins' ops.

    Raises UnsupportedModelError naming module and reason, and CheckpointError where tensors and configuration
    disagree or a stored tensor has no place in the model.
    """
    check_fields(ck.config, ck.hf_config)
    check_layer_count(ck.hf_config, len(ck.tensors))
    captured, graph = _capture(ck.hf_config, ck.resolve, max_seq_len, progress, takeovers)
    used = graph.emitted.used
    idle = {}
    for name in graph.parameter_names:
        with contextlib.suppress(CheckpointError):
            stored = ck.resolve(name).name
            if stored not in used:
                idle[stored] = f"parameter {name} plays no part in the logits"
    account = ck.account(used, idle)
    captured.report.ignored.update(account.ignored)
    # Last: until here a parameter that is made of others is a tensor like any other, for every check.
    cache = ck.quantization.cache if ck.quantization else CacheNumbers()
    return replace(captured, quantization=put_made(captured.model, ck.made, cache, captured.layers))


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
    return _capture(config, resolve, max_seq_len, progress)[0]


def _capture(
    config: Any,
    resolve: Resolve | None,
    max_seq_len: int | None,
    progress: Progress | None,
    takeovers: Sequence[ModuleTakeover] = (),
) -> tuple[Capture, _Graph]:
    started = time.monotonic()
    tell = progress or (lambda _: None)
    check_version()
    check_config(config)
    if max_seq_len is None:
        max_seq_len = int(getattr(config, "max_position_embeddings", None) or 2048)
    with _LOCK, dispatch():
        tell("capturing the graph")
        graph = _trace_and_emit(config, resolve, max_seq_len, takeovers)
        layers = attention_layers(graph.emitted.model)
        census(config, layers)
        tell("comparing the graph with the source model")
        checked_on, error = _check_numbers(config, graph, max_seq_len, takeovers)
    report = CaptureReport(
        graph.traced.replaced, graph.traced.notes, {}, checked_on, error, time.monotonic() - started
    )
    return Capture(graph.emitted.model, config, layers, report), graph


def _trace_and_emit(
    config: Any,
    resolve: Resolve | None,
    max_seq_len: int,
    takeovers: Sequence[ModuleTakeover],
    most_parameters: float = math.inf,
) -> _Graph:
    model, mode = build_fake_model(config)
    check_modules(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > most_parameters:
        raise UnsupportedModelError(f"it has {size:,} parameters")
    find = resolve or _declared_parameters(model)
    stored_names: dict[str, str] = {}

    def resolve_and_note(name: str) -> StoredTensor:
        stored = find(name)
        stored_names[name] = stored.name
        return stored

    traced = trace(model, mode, max_seq_len, takeovers)
    emitted = emit(traced.program, resolve_and_note, str(config.model_type))
    names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    return _Graph(emitted, traced, size, names, stored_names)


def _check_numbers(
    config: Any, graph: _Graph, max_seq_len: int, takeovers: Sequence[ModuleTakeover]
) -> tuple[str, float | None]:
    custom = [takeover.op for takeover in takeovers]
    # A model with two rotary tables is compared past the border, where the source model chooses the long one.
    first = max_seq_len if any("long table" in note for note in graph.traced.notes) else 0
    if is_small(config, graph.parameters):
        return "the model", compare(config, graph.emitted.model, graph.stored_names, first, custom)
    reason = "its sizes are not understood"
    for candidate in itertools.islice(twins(config), _MAX_TWINS):
        try:
            twin = _trace_and_emit(candidate, None, max_seq_len, takeovers, _MAX_TWIN_PARAMETERS)
        except UnsupportedModelError as refusal:
            reason = f"{describe(candidate)}: {refusal}"
            continue
        difference = structural_difference(graph.emitted.model, twin.emitted.model)
        if difference is None:
            error = compare(candidate, twin.emitted.model, twin.stored_names, first, custom)
            return describe(candidate), error
        reason = f"{describe(candidate)} is built otherwise: {difference}"
    return f"nothing: no small model of this make was found ({reason[:400]})", None


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

    def find(name: str) -> StoredTensor:
        if name not in declared:
            raise CheckpointError(f"'{name}' is computed, not stored")
        return declared[name]

    return find
