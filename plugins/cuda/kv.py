"""Stores into the paged cache, and what every tactic that touches it needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.errors import BuildError

from ...engines.program import ITEM_BYTES
from ..launch import Grid, KernelLaunch, Param, TritonKernel, row_stride, step_input, value
from ..reading import head_attrs
from ..tactic import Call, Context, Lowering, Op, Tactic, bandwidth_cost
from .kernels import kv as kernels
from .reference_cache import write_kv
from .types import next_power_of_two, pointer

#: Elements of a token that one program of two warps moves: loads of 16 bytes for each thread.
_ELEMENTS_PER_PROGRAM = 1024


def heads_per_program(heads: int, head_dim: int) -> int:
    """How many heads of a token one program takes, a power of two."""
    most = max(1, _ELEMENTS_PER_PROGRAM // next_power_of_two(head_dim))
    return min(most, next_power_of_two(heads))


@dataclass(frozen=True)
class CacheLayer:
    """One layer of the cache as a kernel addresses it. ``block_stride`` is in elements."""

    layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    block_stride: int

    @staticmethod
    def of(op: Op, context: Context) -> CacheLayer:
        """The layer that an op names. Raises BuildError where the context has no cache."""
        if context.kv is None:
            raise BuildError(f"{op.kind} needs a KV cache, and this program has none; declare its layers")
        return CacheLayer(
            layer=int(op.attrs["layer"]),
            kv_heads=int(op.attrs["kv_heads"]),
            head_dim=int(op.attrs["head_dim"]),
            v_head_dim=int(op.attrs["v_head_dim"]),
            dtype=context.half,
            block_stride=context.kv.block_stride // ITEM_BYTES[context.half],
        )

    @property
    def types(self) -> dict[str, str]:
        """Types of the two addresses."""
        return {"k_cache": pointer(self.dtype), "v_cache": pointer(self.dtype)}

    @property
    def args(self) -> tuple[Param, Param]:
        """The two addresses."""
        return Param("k_cache", self.layer), Param("v_cache", self.layer)


def _write_kv(op: Op, context: Context) -> Lowering:
    k, v = op.required(0), op.required(1)
    cache = CacheLayer.of(op, context)
    per_program = heads_per_program(cache.kv_heads, max(cache.head_dim, cache.v_head_dim))
    kernel = TritonKernel(
        kernels.write_kv,
        {
            "k": pointer(k.dtype),
            "v": pointer(v.dtype),
            **cache.types,
            "slots": "*i32",
            "k_stride": "i32",
            "v_stride": "i32",
        },
        {
            "KV_HEADS": cache.kv_heads,
            "HEADS_PER_PROGRAM": per_program,
            "HEAD_DIM": cache.head_dim,
            "V_HEAD_DIM": cache.v_head_dim,
            "BLOCK_STRIDE": cache.block_stride,
            "PADDED_DIM": next_power_of_two(cache.head_dim),
            "PADDED_V_DIM": next_power_of_two(cache.v_head_dim),
        },
        num_warps=2,
    )
    args = (
        value(k.name),
        value(v.name),
        *cache.args,
        step_input("slots"),
        row_stride(k.name),
        row_stride(v.name),
    )
    grid = (Grid("T"), Grid(times=-(-cache.kv_heads // per_program)))
    attrs = head_attrs(op, ("layer", "kv_heads", "head_dim", "v_head_dim"))
    call = Call(
        "write_kv", [k.name, v.name], [], (), attrs, (KernelLaunch(kernel, grid, args),), takes_views=True
    )
    return Lowering((call,))


TACTICS = (
    Tactic(
        "cuda.write_kv",
        "castiron.WriteKV",
        "cuda",
        lambda op, _: len(op.required(0).shape) == 2,
        _write_kv,
        bandwidth_cost,
        write_kv,
    ),
)
