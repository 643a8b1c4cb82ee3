"""The manifest's ``quantization``: what was quantized to what, and what it cost in accuracy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import Schema, Sha256, Text

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]


class WeightShare(Schema):
    """Matrices of one storage format. ``group``: inputs that share a scale, 0: a row, or none."""

    format: Literal["int8", "int4", "fp8", "fp4", "float32", "bfloat16", "float16"]
    group: Annotated[int, Field(ge=0, le=1 << 20)]
    activations: Text
    tensors: Count
    elements: Count
    #: With scales and offsets.
    bits_per_weight: Positive


class LayerError(Schema):
    """How much one product's output changed on calibration activations: rms of the change over rms."""

    name: Text
    format: Text
    error: Positive


class TextIdentity(Schema):
    """Which text, and how it was cut: ``windows`` of ``window_tokens``."""

    name: Text
    sha256: Sha256
    windows: Count
    window_tokens: Count


class Accuracy(Schema):
    """The engine beside the unquantized model on held-out text; definitions in docs/quantization.md."""

    #: What computed the quantized side: the engine on a device, or the reference of its arithmetic.
    measured: Text
    text: TextIdentity
    predictions: Annotated[int, Field(ge=1)]
    perplexity: Positive
    source_perplexity: Positive
    mean_kl: float
    top1_agreement: Fraction

    @property
    def increase(self) -> float:
        """Relative increase of the perplexity; 0.01 is one percent."""
        return self.perplexity / self.source_perplexity - 1


class Quantization(Schema):
    """The whole section."""

    #: A recipe's name, or the quantization tool of a checkpoint that was quantized before.
    recipe: Text
    origin: Literal["recipe", "checkpoint"]
    weights: Annotated[list[WeightShare], Field(max_length=256)]
    #: Over all matrices, those that were left alone included.
    bits_per_weight: Positive
    kv_cache_dtype: Text
    excluded: Annotated[list[Text], Field(max_length=65536)] = Field(default_factory=list)
    calibration: TextIdentity | None = None
    accuracy: Accuracy | None = None
    #: Products by falling error; empty where no calibration ran.
    worst_layers: Annotated[list[LayerError], Field(max_length=4096)] = Field(default_factory=list)
    suggestion: Text = ""

    @property
    def activations(self) -> frozenset[str]:
        """Formats that inputs of products are rounded to."""
        return frozenset(share.activations.partition(",")[0] for share in self.weights) - {""}
