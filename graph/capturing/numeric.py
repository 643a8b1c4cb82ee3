"""The numeric check: the captured graph against the source model, in prefill and in decoding after a prefix.

Prefill alone would pass a model whose state between steps is wrong; the decode steps would not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from castiron.errors import UnsupportedModelError

from ..custom import CustomOp
from ..evaluate import GraphEvaluator

#: Tokens of the check, and how many of them come first as one prefill.
_TOKENS, _PREFILL = 21, 13
#: Largest difference of logits, relative to the largest logit: two float32 computations of a few layers.
_TOLERANCE = 1e-4
_SEED = 7


def compare(
    config: Any,
    graph: onnx.ModelProto,
    stored_names: Mapping[str, str],
    first_position: int = 0,
    custom: Iterable[CustomOp] = (),
) -> float:
    """Largest relative difference between the graph's logits and eager transformers' on random weights.

    ``stored_names`` maps parameters of the model to initializers of the graph; ``custom``: the plugins' ops.
    Raises UnsupportedModelError if the difference is more than rounding.
    """
    source = _random_model(config)
    weights = {
        stored_names[name]: tensor.detach().numpy()
        for name, tensor in source.named_parameters(remove_duplicate=False)
        if name in stored_names
    }
    weights.update(
        (stored_names[name], tensor.numpy())
        for name, tensor in source.named_buffers()
        if name in stored_names
    )
    generator = np.random.default_rng(_SEED)
    tokens = generator.integers(3, max(4, config.vocab_size - 1), _TOKENS)
    positions = np.arange(first_position, first_position + _TOKENS)
    expected_prefill, expected_decode = _source_logits(source, torch.tensor(tokens), torch.tensor(positions))
    evaluator = GraphEvaluator(graph, weights, custom)
    try:
        prefill = evaluator.run(tokens, positions)
        evaluator.reset()
        pieces = [evaluator.run(tokens[:_PREFILL], positions[:_PREFILL])]
        pieces += [evaluator.run(tokens[i : i + 1], positions[i : i + 1]) for i in range(_PREFILL, _TOKENS)]
    except (ValueError, IndexError) as mismatch:  # numpy's words for shapes that do not fit
        raise UnsupportedModelError(
            f"the captured graph of '{config.model_type}' cannot be computed ({mismatch}): its model code "
            f"depends on something that changes from step to step and that capture does not see"
        ) from mismatch
    worst = 0.0
    for what, got, expected in (
        ("prefill", prefill, expected_prefill),
        ("decoding after a cached prefix", np.concatenate(pieces), expected_decode),
    ):
        error = float(np.abs(got - expected).max() / max(1.0, float(np.abs(expected).max())))
        if not error <= _TOLERANCE:
            raise UnsupportedModelError(
                f"the captured graph of '{config.model_type}' differs from the source model in {what}: "
                f"largest relative difference of logits {error:.2e}, allowed {_TOLERANCE:.0e} (random "
                f"weights, seed {_SEED}). The model code does something that capture does not see; please "
                f"report this model"
            )
        worst = max(worst, error)
    return worst


def _random_model(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    model: nn.Module = make(
        copy.deepcopy(config),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # torch's grouped product refuses widths that are no multiples of 4
    ).eval()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # Norm weights off one and biases off zero: a dropped one must show.
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.6 / math.sqrt(parameter.shape[-1]) * noise)
    return model


def _source_logits(model: Any, tokens: Tensor, positions: Tensor) -> tuple[Any, Any]:
    """Logits [T, vocab] of one prefill, and of a shorter prefill followed by single steps with the cache."""
    import inspect

    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(start: int, stop: int, **cache: Any) -> Any:
        if takes_positions:
            cache["position_ids"] = positions[None, start:stop]
        return model(input_ids=tokens[None, start:stop], return_dict=True, **cache)

    with torch.no_grad():
        prefill = forward(0, _TOKENS, use_cache=False).logits[0].numpy()
        step = forward(0, _PREFILL, use_cache=True)
        pieces = [step.logits[0].numpy()]
        for i in range(_PREFILL, _TOKENS):
            step = forward(i, i + 1, use_cache=True, cache=step.cache)
            pieces.append(step.logits[0].numpy())
    return prefill, np.concatenate(pieces)
