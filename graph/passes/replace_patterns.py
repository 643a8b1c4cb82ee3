"""Plugins' patterns: onnxscript finds the subgraphs and writes what takes their place."""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]

from castiron.errors import BuildError

from ..custom import Pattern
from .rewriter import PassContext, Rewriter


def replace_patterns(rewriter: Rewriter, ctx: PassContext) -> int:
    """Replace every match of the plugins' patterns; returns how many there were.

    It runs on packed rows of standard ops, before castiron's own fusions hide them. Raises BuildError for a
    pattern that fails, and for one that matches nothing: its author believes that it does.
    """
    if not ctx.patterns:
        return 0
    model = rewriter.export()
    applied = 0
    for pattern in ctx.patterns:
        model, count = _replace(model, pattern)
        if not count:
            raise BuildError(
                f"the plugin pattern {pattern.name!r} matches nothing in this model; see the graph that it "
                "is matched against: castiron build --dump-graph DIR, the file before replace_patterns"
            )
        applied += count
    rewriter.adopt(gs.import_onnx(model))
    rewriter.tidy()
    return applied


def _replace(model: onnx.ModelProto, pattern: Pattern) -> tuple[onnx.ModelProto, int]:
    import onnx_ir
    from onnxscript.rewriter import pattern as onnxscript_pattern

    graph = onnx_ir.serde.deserialize_model(model)
    try:
        rule = onnxscript_pattern.RewriteRule(
            pattern.match, pattern.replace, pattern.check, name=pattern.name
        )
        count = int(rule.apply_to_model(graph))
    except Exception as error:
        raise BuildError(
            f"the plugin pattern {pattern.name!r} failed: {type(error).__name__}: {error}"
        ) from error
    return onnx_ir.serde.serialize_model(graph), count
