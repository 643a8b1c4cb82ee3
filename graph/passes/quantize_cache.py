"""The cache's number format goes to the ops that write it."""

from __future__ import annotations

from castiron.errors import BuildError

from ..quant_plan import CacheScales
from .rewriter import CASTIRON, PassContext, Rewriter


def quantize_cache(rewriter: Rewriter, ctx: PassContext) -> int:
    """Give WriteKV and RopeWriteKV the plan's format and scales; returns how many layers."""
    plan = ctx.quantization
    if plan.kv_format == "auto":
        return 0
    applied = 0
    for node in rewriter.graph.nodes:
        if node.domain != CASTIRON or node.op not in ("WriteKV", "RopeWriteKV"):
            continue
        heads, layer = int(node.attrs["kv_heads"]), int(node.attrs["layer"])
        ones = (1.0,) * heads
        scales = plan.kv_scales.get(layer, CacheScales(ones, ones))
        if len(scales.k) != heads or len(scales.v) != heads:
            raise BuildError(
                f"cache layer {layer} has {heads} heads; found {len(scales.k)} scales of its keys and "
                f"{len(scales.v)} of its values"
            )
        node.attrs.update(kv_format=plan.kv_format, k_scale=list(scales.k), v_scale=list(scales.v))
        applied += 1
    return applied
