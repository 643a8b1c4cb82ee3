"""Steps over a paged cache for tests: packed sequences, step inputs, a pool that is NaN but for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from castiron.engines.cuda_layout import kv_layout
from castiron.engines.program import KvLayer, Limits
from castiron.plugins import Call, Context, Op, Tactic
from castiron.plugins.cuda.reference_cache import PagedStep
from castiron.plugins.targets import TARGETS
from interpret import TORCH, run_call

MAX_SEQ_LEN = 512
TILE = 64


@dataclass(frozen=True)
class Case:
    """A step of sequences, each (rows, tokens before them); layer 1 of two is used."""

    sequences: Sequence[tuple[int, int]]
    kv_heads: int
    head_dim: int
    v_head_dim: int
    half: str = "bf16"
    target: str = "sm_90"
    padding: int = 2
    seed: int = 0
    filled: bool = True  # the cache holds every sequence's tokens already
    cache: str = ""  # "i8" or "f8e4m3": codes under scales of heads; else numbers in `half`

    def build(self) -> Step:
        return Step(self)


class Step:
    """Buffers and arrays of a Case. ``reference`` sees the same pool in float64."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        order = np.random.default_rng(case.seed)
        pool_blocks = sum(-(-(rows + before) // 32) for rows, before in case.sequences) + 2
        free = list(order.permutation(pool_blocks))
        table = np.zeros((len(case.sequences) + case.padding, MAX_SEQ_LEN // 32), np.int32)
        starts, lengths, slots, positions = [0], [], [], []
        decodes, tiles, tile_rows = [], [], []
        for index, (rows, before) in enumerate(case.sequences):
            length = rows + before
            blocks = [free.pop() for _ in range(-(-length // 32))]
            table[index, : len(blocks)] = blocks
            starts.append(starts[-1] + rows)
            lengths.append(length)
            positions += range(before, length)
            slots += [blocks[p // 32] * 32 + p % 32 for p in range(before, length)]
            if rows == 1:
                decodes.append(index)
            else:
                tiles += [index] * -(-rows // TILE)
                tile_rows += range(0, rows, TILE)
        pad = case.padding
        arrays = {
            "slots": slots + [-1] * pad,
            "positions": positions + [0] * pad,
            "query_start": starts + starts[-1:] * pad,
            "kv_len": lengths + [0] * pad,
            "decode_seq": decodes + [-1] * pad,
            "tile_seq": tiles + [-1] * pad,
            "tile_row": tile_rows + [0] * pad,
        }
        self.inputs = {name: torch.tensor(array, dtype=torch.int32) for name, array in arrays.items()}
        self.inputs["block_table"] = torch.from_numpy(table)
        self.tokens = len(slots)
        self.counts = {
            "T": self.tokens + pad,
            "S": len(table),
            "D": len(decodes) + pad,
            "P": len(tiles) + pad,
        }
        self._reserve_cache(pool_blocks)

    def _reserve_cache(self, pool_blocks: int) -> None:
        case = self.case
        shape = {"kv_heads": case.kv_heads, "head_dim": case.head_dim, "v_head_dim": case.v_head_dim}
        stored = case.cache or case.half
        #: As of the ops that store.
        self.rounding: dict[str, Any] = {}
        if case.cache:
            # Codes of normal numbers then reach a few hundredths of the largest, and some saturate.
            low, high = (0.02, 0.03) if case.cache == "i8" else (0.005, 0.01)
            scales = torch.rand(2, case.kv_heads, generator=self.random) * (high - low) + low
            self.rounding = {
                "kv_format": "int8" if case.cache == "i8" else "fp8",
                "k_scale": scales[0].tolist(),
                "v_scale": scales[1].tolist(),
            }
        scale = {name: self.rounding[name] for name in ("k_scale", "v_scale") if self.rounding}
        layers = [KvLayer.model_validate({**shape, "dtype": stored, **scale})] * 2
        layout = kv_layout(layers)
        limits = Limits(max_batch_size=8, max_num_tokens=256, max_logit_rows=8, max_seq_len=MAX_SEQ_LEN)
        self.context = Context(TARGETS[case.target], case.half, limits, layout, TILE)  # type: ignore[arg-type]
        dtype = TORCH[stored]
        stride = layout.block_stride // dtype.itemsize
        # Where nothing was stored: NaN, or the int8 code that no rounding gives.
        nowhere = -128.0 if stored == "i8" else float("nan")
        pool = torch.full((pool_blocks * stride,), nowhere, dtype=torch.float32).to(dtype)
        as_bytes = stored == "f8e4m3" and self.context.target.compute_capability < 89
        self.caches, self.views = {}, {}
        for name, offsets, width in (
            ("k_cache", layout.k_offsets, case.head_dim),
            ("v_cache", layout.v_offsets, case.v_head_dim),
        ):
            part = pool[offsets[1] // dtype.itemsize :]
            self.caches[name, 1] = part.view(torch.uint8) if as_bytes else part
            shape, strides = (pool_blocks, case.kv_heads, 32, width), (stride, 32 * width, width, 1)
            self.views[name] = torch.as_strided(part, shape, strides, part.storage_offset())
            if case.filled:
                self._fill(self.views[name])

    def _fill(self, view: torch.Tensor) -> None:
        table = self.inputs["block_table"]
        for index, (rows, before) in enumerate(self.case.sequences):
            for position in range(rows + before):
                heads = self.normal(view.shape[1], view.shape[3])
                if self.case.cache:  # codes of any size
                    heads = (heads * 40).clamp(-127, 127)
                view[table[index, position // 32], :, position % 32] = heads.to(view.dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def rows(self, width: int, dtype: str, *, margin: int = 0) -> torch.Tensor:
        """Random rows for the step; with a margin, a column view of wider ones."""
        wide = self.normal(self.counts["T"], width + 2 * margin).to(TORCH[dtype])
        return wide[:, margin : margin + width]

    def reference(self) -> PagedStep:
        arrays = {name: tensor.numpy() for name, tensor in self.inputs.items()}
        return PagedStep(
            slots=arrays["slots"],
            query_start=arrays["query_start"],
            kv_len=arrays["kv_len"],
            block_table=arrays["block_table"],
            k=self.views["k_cache"].double().numpy(),
            v=self.views["v_cache"].double().numpy(),
        )

    def run(
        self,
        tactic: Tactic,
        op: Op,
        values: dict[str, torch.Tensor],
        weights: Sequence[torch.Tensor] = (),
        counts: dict[str, int] | None = None,
    ) -> list[str]:
        """Lower the op and run its launches. Returns the names of the kernels that ran."""
        assert tactic.accepts(op, self.context)
        lowering = tactic.lower(op, self.context)
        for temporary in lowering.temporaries:
            shape = [self.counts[dim] if isinstance(dim, str) else dim for dim in temporary.shape]
            values[temporary.name] = torch.full(shape, float("nan"), dtype=TORCH[temporary.dtype])
        ran = []
        for call in lowering.actions:
            assert isinstance(call, Call)
            given = iter(weights)
            own = [torch.tensor(use.values) if use.values else next(given) for use in call.weights]
            ran += run_call(call, values, own, {**self.counts, **(counts or {})}, self.inputs, self.caches)
        return ran
