"""What a quantized engine is compared with, and the accuracy report of a build."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..engines.quantization import Accuracy
from ..graph.quant_plan import QuantPlan
from .progress import Phases
from .quantize import identity

if TYPE_CHECKING:
    from ..calibration import QuantizationOptions
    from ..calibration.texts import Windows
    from ..engines import Engine
    from ..engines.accuracy import Comparison
    from ..graph.checkpoint import Checkpoint
    from ..graph.reference import SourceModel

Floats = npt.NDArray[np.float32]


class Reference:
    """The source model of a build, loaded once when it is first asked for.

    ``model``: what the engine should compute: the source model under the plan, or, where nothing is
    quantized, the source model itself.
    """

    def __init__(self, checkpoint: Checkpoint, plan: QuantPlan, max_seq_len: int) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.max_seq_len = max_seq_len

    @cached_property
    def source(self) -> SourceModel:
        """The unquantized model."""
        from ..graph.reference import SourceModel

        return SourceModel(self.checkpoint, max_seq_len=self.max_seq_len)

    @cached_property
    def model(self) -> Any:
        """Has ``logits`` and ``decode`` of the model that the engine computes."""
        if not self.plan.linears and self.plan.kv_format == "auto":
            return self.source
        from ..calibration.reference import QuantizedModel

        keep = not self.source.streamed  # a model that fits in float32 fits twice
        return QuantizedModel(self.source, self.checkpoint, self.plan, keep=keep)


def measure(
    reference: Reference,
    engine: Engine | None,
    options: QuantizationOptions,
    num_threads: int | None,
    phases: Phases,
) -> Accuracy:
    """The engine beside the unquantized model on held-out text; without an engine, its reference."""
    from ..calibration.accuracy import compare, held_out_windows

    windows = held_out_windows(
        reference.checkpoint, options.eval_data, options.eval_tokens, reference.max_seq_len
    )
    everything = np.arange(windows.ids.shape[1])

    def source(ids: npt.NDArray[np.int64]) -> Floats:
        return reference.source.logits(ids, everything)

    with phases("accuracy", len(windows.ids)):
        if engine is None:
            comparison = compare(
                windows,
                lambda ids: reference.model.logits(ids, everything),
                source,
                phases.progress.advance,
            )
            return _accuracy(comparison, windows, "the reference of the engine's arithmetic")
        from ..runtime.evaluate import evaluate
        from ..runtime.options import RuntimeOptions

        comparison, device = evaluate(
            engine,
            windows.ids,
            source,
            options=RuntimeOptions(num_threads=num_threads, trust_plugins=True),
            progress=lambda *_: phases.progress.advance(1),
        )
        return _accuracy(comparison, windows, f"the engine on {device}")


def _accuracy(comparison: Comparison, windows: Windows, measured: str) -> Accuracy:
    """The report as the manifest keeps it."""
    return Accuracy(
        measured=measured,
        text=identity(windows),
        predictions=comparison.predictions,
        perplexity=comparison.perplexity,
        source_perplexity=comparison.source_perplexity,
        mean_kl=comparison.mean_kl,
        top1_agreement=comparison.top1_agreement,
    )
