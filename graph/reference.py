"""The source model: what an engine's numbers are compared with.

The transformers model itself, eager, in float32. A checkpoint that is large in float32 is run with its
matrices on disk (``streamed.py``), so that the numeric check of a build needs no more memory than the build.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from castiron.errors import UnsupportedModelError

from .capturing.meta_parameters import put_parameters_on_meta
from .capturing.patches import Patches
from .capturing.rope import freeze_frequencies
from .checkpoint import Checkpoint
from .streamed import StreamedParameter, read_float32

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

#: Models below this size in float32 are loaded whole: faster, and small beside a build's other needs.
WHOLE_MODEL_BYTES: Final = 2 << 30
#: Parameters below this many elements are always loaded: norms, biases.
_SMALL: Final = 1 << 20


class SourceModel:
    """The model of a checkpoint, run by transformers in float32 with eager attention.

    ``model``: the transformers module, in evaluation mode; ``streamed``: its large matrices stay on disk.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        whole_model_bytes: int = WHOLE_MODEL_BYTES,
        *,
        max_seq_len: int | None = None,
    ) -> None:
        """Build the model; weights are loaded at once below ``whole_model_bytes``, else read when used.

        ``max_seq_len`` fixes the rotary table as capture does: without it a model with two tables (longrope)
        answers a short prompt with the short one, which an engine for long requests never uses.

        Raises ``CheckpointError`` when a parameter has no stored tensor or another shape, and
        ``UnsupportedModelError`` when transformers cannot build the model.
        """
        self.streamed = 4 * sum(tensor.size for tensor in checkpoint.tensors.values()) > whole_model_bytes
        self.model = _empty_model(checkpoint)
        if max_seq_len is not None:
            freeze_frequencies(self.model, max_seq_len)
        _fill(self.model, checkpoint, self.streamed)

    def logits(self, token_ids: Tokens, rows: Tokens) -> npt.NDArray[np.float32]:
        """Logits [len(rows), vocab] at positions ``rows`` of one sequence, without a cache."""
        kept = torch.from_numpy(np.asarray(rows, np.int64))
        with torch.no_grad():
            output = self.model(input_ids=_batch(token_ids), use_cache=False, logits_to_keep=kept)
        return _numpy(output.logits)

    def decode(self, prefix: Tokens, continuation: Tokens, cache: Any = None) -> npt.NDArray[np.float32]:
        """Logits [len(continuation), vocab] after each token of ``continuation``, fed one by one.

        ``prefix`` is processed at once and cached by transformers, as in generation, in ``cache`` if given.
        """
        rows = []
        with torch.no_grad():
            start = {} if cache is None else {"cache": cache}
            cache = self.model(input_ids=_batch(prefix), use_cache=True, logits_to_keep=1, **start).cache
            for token in continuation:
                output = self.model(input_ids=_batch([int(token)]), use_cache=True, cache=cache)
                cache = output.cache
                rows.append(_numpy(output.logits))
        return np.concatenate(rows)


def _batch(token_ids: Tokens) -> torch.Tensor:
    return torch.from_numpy(np.asarray(token_ids, np.int64)[None])


def _numpy(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.array(logits[0].float().numpy(), np.float32)


def _empty_model(checkpoint: Checkpoint) -> Any:
    """The transformers model with shapes for parameters and real, computed buffers."""
    with Patches() as patches:
        put_parameters_on_meta(patches)
        try:
            model = checkpoint.model_class._from_config(
                copy.deepcopy(checkpoint.hf_config),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{checkpoint.source}: transformers cannot build {checkpoint.model_class.__name__}: {error}"
            ) from error
    return model.eval()


def _fill(model: nn.Module, checkpoint: Checkpoint, streamed: bool) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    for name in model.state_dict().keys() - parameters.keys():  # persistent buffers: part of the checkpoint
        buffers[name].copy_(read_float32(checkpoint, checkpoint.resolve_like(name, buffers[name].shape)))
    loaded: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, empty in module._parameters.items():
            if empty is None:
                continue
            stored = checkpoint.resolve_like(f"{path}.{name}" if path else name, empty.shape)
            if stored.name not in loaded:  # a tied tensor is loaded once
                if streamed and empty.ndim in (2, 3) and empty.numel() >= _SMALL:
                    loaded[stored.name] = StreamedParameter.over(checkpoint, stored)
                else:
                    loaded[stored.name] = nn.Parameter(read_float32(checkpoint, stored), requires_grad=False)
            module._parameters[name] = loaded[stored.name]
