"""The order of the passes, and the loop that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]

from ..ops import check_vocabulary
from .canonicalize import canonicalize
from .clean_up import clean_up
from .cut_expert_rows import cut_expert_rows
from .drop_batch import drop_batch
from .fold_input_scale import fold_input_scale
from .fold_partial_rope import fold_partial_rope
from .fuse_activation import fuse_activation
from .fuse_embedding import fuse_embedding
from .fuse_gate_up import fuse_gate_up
from .fuse_qkv import fuse_qkv
from .fuse_residual import fuse_residual
from .fuse_residual_norm import fuse_residual_norm
from .fuse_scale import fuse_scale
from .gather_last_tokens import gather_last_tokens
from .pack_attention import pack_attention
from .quantize_cache import quantize_cache
from .quantize_linears import quantize_linears
from .replace_patterns import replace_patterns
from .rewriter import PassContext, Rewriter
from .tabulate_positions import tabulate_positions

Pass: TypeAlias = Callable[[Rewriter, PassContext], int]

#: In order. clean_up runs again where a pass leaves Reshapes that cancel or tables that fold.
PASSES: tuple[Pass, ...] = (
    clean_up,
    canonicalize,
    quantize_linears,
    tabulate_positions,
    clean_up,
    fold_partial_rope,
    clean_up,
    pack_attention,
    quantize_cache,
    clean_up,
    drop_batch,
    clean_up,
    replace_patterns,
    fuse_embedding,
    fuse_qkv,
    cut_expert_rows,
    fuse_gate_up,
    fuse_activation,
    fuse_scale,
    fuse_residual,
    gather_last_tokens,
    fold_input_scale,
    fuse_residual_norm,
    clean_up,
)


@dataclass(frozen=True)
class PassReport:
    """How often a pass applied and what it took."""

    name: str
    applied: int
    seconds: float


def run_passes(
    model: onnx.ModelProto,
    ctx: PassContext,
    dump_dir: Path | None = None,
    passes: Sequence[Pass] = PASSES,
) -> tuple[onnx.ModelProto, list[PassReport]]:
    """Apply the passes in order; returns the rewritten model and a report per pass.

    ``dump_dir``: writes ``NN_name.onnx`` there after every pass (weights stay references to the checkpoint).
    External initializers are neither loaded nor copied. ``model`` itself is not changed.
    """
    graph = gs.import_onnx(model)
    rewriter = Rewriter(graph)
    reports: list[PassReport] = []
    if dump_dir is not None:
        dump_dir.mkdir(parents=True, exist_ok=True)
        (dump_dir / "00_captured.onnx").write_bytes(model.SerializeToString())
    for number, rewrite in enumerate(passes, start=1):
        started = time.perf_counter()
        applied = rewrite(rewriter, ctx)
        reports.append(PassReport(rewrite.__name__, applied, time.perf_counter() - started))
        if dump_dir is not None:
            path = dump_dir / f"{number:02d}_{rewrite.__name__}.onnx"
            path.write_bytes(rewriter.export().SerializeToString())
    rewritten = rewriter.export()
    check_vocabulary(rewritten)
    return rewritten, reports
