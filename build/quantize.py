"""Quantization in a build: the plan before the passes, the manifest's section and the report after them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import onnx

from castiron.errors import BuildError

from ..engines.quantization import (
    LayerError,
    Quantization,
    TextIdentity,
    WeightShare,
)
from ..graph import ops
from ..graph.quant_plan import CODE_BITS, QuantPlan
from ..graph.weights import WeightGraph
from .progress import Phases

if TYPE_CHECKING:
    from ..calibration import Calibration, QuantizationOptions
    from ..calibration.texts import Windows
    from ..graph import Capture
    from ..graph.checkpoint import Checkpoint

_FLOAT_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16}
#: Products that the report names; all are measured.
_WORST: Final = 20


@dataclass(frozen=True)
class Quantized:
    """What is quantized in a build: ``plan`` for the passes, and the calibration if one ran."""

    plan: QuantPlan
    calibration: Calibration | None
    tool: str | None

    @property
    def any(self) -> bool:
        """Whether the engine will hold anything quantized."""
        plan = self.plan
        return self.tool is not None or bool(plan.linears) or plan.kv_format != "auto"


def quantize(
    checkpoint: Checkpoint,
    captured: Capture,
    options: QuantizationOptions,
    max_seq_len: int,
    dtype: str,
    phases: Phases,
) -> Quantized:
    """The plan: of the options, else what a quantized checkpoint says of itself.

    An engine of dtype float32 leaves activations alone: it shows what the weights alone cost. Raises
    BuildError for a recipe over a checkpoint that is quantized already.
    """
    own = captured.quantization
    tool = None if checkpoint.quantization is None else checkpoint.quantization.description
    if not options.wanted:
        return Quantized(_for_dtype(own, dtype), None, tool)
    if tool is not None and options.recipe is not None:
        raise BuildError(
            f"{checkpoint.source} is quantized already ({tool}) and is built as it is; leave out --quantize "
            f"{options.recipe}, or give the unquantized checkpoint"
        )
    from ..calibration import calibrate

    with phases("calibrate"):
        found = calibrate(
            checkpoint,
            options,
            max_seq_len=max_seq_len,
            start=phases.progress.start,
            advance=phases.progress.advance,
        )
    if found.resumed:
        phases.progress.note("calibration results of an earlier build of this checkpoint were used again")
    linears = {**own.linears, **found.plan.linears}
    kv = found.plan if options.kv_cache != "auto" else own
    return Quantized(_for_dtype(QuantPlan(linears, kv.kv_format, kv.kv_scales), dtype), found, tool)


def _for_dtype(plan: QuantPlan, dtype: str) -> QuantPlan:
    if dtype != "float32":
        return plan
    linears = {
        name: replace(linear, x_format="", x_group=0, x_scale=0.0) for name, linear in plan.linears.items()
    }
    return replace(plan, linears=linears)


def section(
    quantized: Quantized, model: onnx.ModelProto, graph: WeightGraph, dtype: str
) -> Quantization | None:
    """The manifest's section, without the accuracy report; None where nothing is quantized."""
    if not quantized.any:
        return None
    shares = weight_shares(model, graph, dtype)
    elements = sum(share.elements for share in shares)
    bits = sum(share.elements * share.bits_per_weight for share in shares) / max(1, elements)
    calibration = quantized.calibration
    recipe = "none" if calibration is None or calibration.recipe is None else calibration.recipe.name
    worst: list[LayerError] = []
    excluded: tuple[str, ...] = ()
    text = None
    if calibration is not None:
        excluded, text = calibration.excluded, calibration.text
        ranked = sorted(calibration.errors.items(), key=lambda item: -item[1])
        worst = [
            LayerError(name=name, format=calibration.schemes[name].weight, error=error)
            for name, error in ranked[:_WORST]
        ]
    return Quantization(
        recipe=quantized.tool or recipe,
        origin="recipe" if quantized.tool is None else "checkpoint",
        weights=shares,
        bits_per_weight=bits,
        kv_cache_dtype=dtype if quantized.plan.kv_format == "auto" else quantized.plan.kv_format,
        excluded=list(excluded),
        calibration=None if text is None else identity(text),
        worst_layers=worst,
        suggestion="" if calibration is None else _suggestion(calibration.errors),
    )


def weight_shares(model: onnx.ModelProto, graph: WeightGraph, dtype: str) -> list[WeightShare]:
    """The matrices of the rewritten graph by how they are stored."""
    counts: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for node in model.graph.node:
        if node.domain != ops.DOMAIN or node.op_type not in ops.MATRICES:
            continue
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        for name in node.input[ops.MATRICES[node.op_type]]:
            expr = graph.expr(name)
            parts, size = expr.parts(), expr.size
            if parts is None:
                key, bits = (dtype, 0, _activations(attrs)), float(_FLOAT_BITS[dtype])
            else:
                scale = parts.scale.without_upcast()
                extra = scale.size * scale.dtype.itemsize * 8
                if parts.offset is not None:
                    extra *= 2
                key = (parts.format, parts.group, _activations(attrs))
                bits = CODE_BITS[parts.format] + extra / max(1, size)
            found = counts[key]
            found[0] += 1
            found[1] += size
            found[2] += bits * size
    return [
        WeightShare(
            format=key[0],  # type: ignore[arg-type]  # a key of the tables above
            group=key[1],
            activations=key[2],
            tensors=int(tensors),
            elements=int(elements),
            bits_per_weight=bits / max(1, elements),
        )
        for key, (tensors, elements, bits) in sorted(counts.items(), key=lambda item: -item[1][1])
    ]


def identity(windows: Windows) -> TextIdentity:
    """Which text, and how it was cut."""
    count, length = windows.ids.shape
    return TextIdentity(name=windows.data, sha256=windows.sha256, windows=count, window_tokens=length)


def decisions(found: Quantization) -> tuple[dict[str, str], ...]:
    """Rows for the table of decisions."""
    rows = []
    for share in found.weights:
        quantized = share.format in CODE_BITS
        group = f", groups of {share.group}" if share.group else ", a scale a row" if quantized else ""
        inputs = f"; inputs {share.activations}" if share.activations else ""
        rows.append(
            {
                "what": f"{share.tensors} matrices, {share.elements / 1e6:,.1f} M weights",
                "choice": f"{share.format}{group}{inputs}",
                "why": f"{found.origin} {found.recipe}" if quantized else _why_not(found),
            }
        )
    if found.kv_cache_dtype in ("fp8", "int8"):
        rows.append({"what": "KV cache", "choice": found.kv_cache_dtype, "why": "asked for"})
    return tuple(rows)


def _why_not(found: Quantization) -> str:
    if found.excluded:
        return f"excluded: {', '.join(found.excluded[:3])}{' ...' if len(found.excluded) > 3 else ''}"
    return f"the {found.origin} leaves them"


def _activations(attrs: Mapping[str, Any]) -> str:
    raw = attrs.get("x_format", b"")
    x_format = raw.decode() if isinstance(raw, bytes) else str(raw)
    if x_format in ("", "nvfp4", "mxfp4", "mxfp8"):
        return x_format
    if attrs.get("x_scale", 0.0):
        return f"{x_format}, static scale"
    group = attrs.get("x_group", 0)
    return f"{x_format}, a scale for {group} inputs" if group else f"{x_format}, a scale a token"


def _suggestion(errors: Mapping[str, float]) -> str:
    """What may help, from the ranking of relative output errors."""
    if len(errors) < 4:
        return ""
    ranked = sorted(errors.items(), key=lambda item: -item[1])
    middle = ranked[len(ranked) // 2][1]
    outliers = [name for name, error in ranked if error > 3 * middle][:3]
    if not outliers:
        return "no product stands out; if the accuracy is too low, choose a recipe with more bits"
    options = " ".join(f"--exclude '{name}'" for name in outliers)
    return f"{', '.join(outliers)} lose over three times as much as most; try {options}"
