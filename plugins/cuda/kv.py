"""Stores into the paged cache, and what every tactic that touches it needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.errors import BuildError

from ...engines.program import ITEM_BYTES, StepInput
from ..launch import Grid, KernelLaunch, Param, TritonKernel, row_stride, step_input, value, weight
from ..reading import head_attrs
from ..tactic import Call, Context, Lowering, Op, Tactic, WeightUse, bandwidth_cost
from .kernels import kv as kernels
from .reference_cache import write_kv
from .types import next_power_of_two, pointer

#: Elements of a token that one program of two warps moves: loads of 16 bytes for each thread.
_ELEMENTS_PER_PROGRAM = 1024
_FORMATS = {"i8": "int8", "f8e4m3": "fp8"}


def heads_per_program(heads: int, head_dim: int) -> int:
    """How many heads of a token one program takes, a power of two."""
    most = max(1, _ELEMENTS_PER_PROGRAM // next_power_of_two(head_dim))
    return min(most, next_power_of_two(heads))


@dataclass(frozen=True)
class CacheLayer:
    """One layer of the cache as a kernel addresses it.

    ``block_stride`` is in elements. ``slots`` and ``table`` name the inputs that say where its blocks are:
    where a row is stored, and the blocks of each sequence.
    """

    layer: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    block_stride: int
    compute_capability: int
    slots: StepInput
    table: StepInput
    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]

    @staticmethod
    def of(op: Op, context: Context) -> CacheLayer:
        """The layer that an op names. Raises BuildError where the context has no cache."""
        if context.kv is None:
            raise BuildError(f"{op.kind} needs a KV cache, and this program has none; declare its layers")
        index = int(op.attrs["layer"])
        layer = context.kv.layers[index]
        ones = (1.0,) * layer.kv_heads
        apart = layer.window > 0
        return CacheLayer(
            layer=index,
            kv_heads=int(op.attrs["kv_heads"]),
            head_dim=int(op.attrs["head_dim"]),
            v_head_dim=int(op.attrs["v_head_dim"]),
            dtype=layer.dtype,
            block_stride=context.kv.stride_of(index) // ITEM_BYTES[layer.dtype],
            compute_capability=context.target.compute_capability,
            slots="window_slots" if apart else "slots",
            table="window_table" if apart else "block_table",
            k_scale=tuple(layer.k_scale) or ones,
            v_scale=tuple(layer.v_scale) or ones,
        )

    @property
    def format(self) -> str:
        """What the numbers are rounded to: "int8", "fp8", or "" where they only lose precision."""
        return _FORMATS.get(self.dtype, "")

    @property
    def types(self) -> dict[str, str]:
        """Types of the two addresses, and of those of the scales."""
        # Before sm_89 there are no conversions of float8: kernels take the bytes.
        is_bytes = self.dtype == "f8e4m3" and self.compute_capability < 89
        kind = pointer("u8" if is_bytes else self.dtype)
        scales = "*fp32" if self.format else kind
        return {"k_cache": kind, "v_cache": kind, "k_scales": scales, "v_scales": scales}

    @property
    def scales(self) -> tuple[WeightUse, ...]:
        """The scales of keys and of values by head, as weights of a call; none where there is no format."""
        if not self.format:
            return ()
        return WeightUse((), "vector", self.k_scale), WeightUse((), "vector", self.v_scale)

    def args(self, first_weight: int) -> tuple[Param, ...]:
        """The addresses; ``first_weight``: the place of ``scales`` among the weights of the call.

        Without scales their places hold addresses that the kernel does not read.
        """
        caches = Param("k_cache", self.layer), Param("v_cache", self.layer)
        return (*caches, *((weight(first_weight), weight(first_weight + 1)) if self.format else caches))


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
            "FORMAT": cache.format,
        },
        num_warps=2,
    )
    args = (
        value(k.name),
        value(v.name),
        *cache.args(0),
        step_input(cache.slots),
        row_stride(k.name),
        row_stride(v.name),
    )
    grid = (Grid("T"), Grid(times=-(-cache.kv_heads // per_program)))
    attrs = head_attrs(op, ("layer", "kv_heads", "head_dim", "v_head_dim"))
    call = Call(
        "write_kv",
        [k.name, v.name],
        [],
        cache.scales,
        attrs,
        (KernelLaunch(kernel, grid, args),),
        takes_views=True,
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
