"""Quantized products for tests: random codes packed as builds pack them, and what they mean in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from castiron.build.packed import Packed
from castiron.build.packing_quantized import (
    BlockScaleSource,
    CodeSource,
    ColumnSource,
    RowScaleSource,
    ScaleSource,
)
from castiron.engines.program import Limits
from castiron.engines.weights_file import stored_shape
from castiron.graph.fake_quant import fake_quantize
from castiron.graph.weights import QuantizedParts
from castiron.graph.weights.exprs import Constant
from castiron.graph.weights.formats import values
from castiron.plugins import Call, Context, Op, Operand, Quant, Tactic, WeightUse
from castiron.plugins.cuda import quantized_linear
from castiron.plugins.targets import TARGETS
from interpret import TORCH, run_call

LIMITS = Limits(max_batch_size=8, max_num_tokens=512, max_logit_rows=8, max_seq_len=64)
LINEAR, GATED = quantized_linear.TACTICS
_RANGES = {"int8": (-127, 128), "int4": (-8, 8), "fp4": (0, 16)}


@dataclass(frozen=True)
class Weights:
    """A random quantized matrix [n, k]."""

    parts: QuantizedParts
    quant: Quant

    @staticmethod
    def random(
        rng: np.random.Generator,
        n: int,
        k: int,
        format: Any,
        group: int,
        *,
        offset: bool = False,
        columns: bool = False,
        f16: bool = False,
    ) -> Weights:
        if format == "fp8":
            codes = rng.standard_normal((n, k)).astype(np.float32)
            codes = torch.from_numpy(codes * 60).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        else:
            codes = rng.integers(*_RANGES[format], (n, k)).astype(np.uint8 if format == "fp4" else np.int8)
        groups = -(-k // group) if group else 1
        scales = rng.uniform(0.5, 2.0, (n, groups)).astype(np.float32) / _size(format)
        if format == "fp4" and group == 16:
            bits = rng.integers(40, 0x7F, (n, groups)).astype(np.uint8)
            scales = values(bits, "fp8") * rng.uniform(1e-3, 2e-3, (n, 1)).astype(np.float32)
        elif format == "fp4" and group == 32:
            scales = np.ldexp(np.float32(1), rng.integers(-6, 2, (n, groups))).astype(np.float32)
        if f16:
            scales = scales.astype(np.float16)
        offsets = rng.standard_normal((n, groups)).astype(np.float32) if offset else None
        order = rng.permutation(k).astype(np.int32) if columns else None
        parts = QuantizedParts(
            format,
            group,
            Constant("codes", codes),
            Constant("scale", scales),
            None if offsets is None else Constant("offset", offsets),
            order,
        )
        dtype: Any = "f16" if f16 else "f32"
        quant = Quant(format, group, dtype, offset, None if order is None else tuple(map(int, order)))
        return Weights(parts, quant)

    def numbers(self) -> np.ndarray[Any, Any]:
        """float64 [n, k], columns in the order of x."""
        codes = values(self.parts.codes.whole(), self.parts.format).astype(np.float64)
        k = codes.shape[1]
        group = self.parts.group or k

        def spread(expr: Any) -> np.ndarray[Any, Any]:
            return np.repeat(np.asarray(expr.whole(), np.float64), group, axis=1)[:, :k]

        w = codes * spread(self.parts.scale)
        if self.parts.offset is not None:
            w += spread(self.parts.offset)
        if self.parts.columns is not None:
            ordered = np.empty_like(w)
            ordered[:, self.parts.columns] = w
            w = ordered
        return w


def _size(format: str) -> float:
    """A scale of 1 over it makes weights of about one."""
    return {"int8": 75.0, "int4": 4.5, "fp8": 60.0, "fp4": 3.0}[format]


def stored(role: str, parts: list[QuantizedParts], target: str) -> torch.Tensor:
    """What the packer stores for a role, in the type that kernels are compiled for."""
    source: Packed
    if role == "codes":
        source = CodeSource("w", parts, panels=False)
    elif role == "scales":
        source = ScaleSource("w", [part.scale for part in parts], panels=False)
    elif role == "offsets":
        source = ScaleSource(
            "w", [part.offset for part in parts if part.offset is not None], panels=False, wide=True
        )
    elif role == "columns":
        columns = parts[0].columns
        assert columns is not None
        source = ColumnSource("w", columns)
    else:
        source = BlockScaleSource("w", parts) if role == "block_scales" else RowScaleSource("w", parts)
    data = torch.frombuffer(bytearray(b"".join(source.chunks())), dtype=torch.uint8)
    size = {"f32": 4, "i32": 4, "f16": 2}.get(source.dtype, 1)
    data = data[: int(np.prod(stored_shape(source.weight))) * size]
    if source.dtype in ("i4", "f4e2m1"):
        return data.view(torch.uint32)
    if source.dtype == "f8e4m3" and TARGETS[target].compute_capability < 89:
        return data
    return data.view(TORCH[source.dtype])


@dataclass
class Outcome:
    """Results, what they should be, and the kernels that ran."""

    y: torch.Tensor
    expected: np.ndarray[Any, Any]
    ran: list[str]


def run(
    rows: int,
    n: int,
    k: int,
    format: str,
    group: int,
    *,
    target: str = "sm_90",
    half: Any = "bf16",
    x_dtype: str | None = None,
    x_format: str = "",
    x_group: int = 0,
    x_scale: float = 0.0,
    gated: bool = False,
    bias: bool = False,
    residual: bool = False,
    activation: str = "none",
    alpha: float = 1.0,
    offset: bool = False,
    columns: bool = False,
    f16: bool = False,
    seed: int = 0,
) -> Outcome:
    """Lower one product, run its calls in the interpreter, and compute it in float64 from rounded inputs."""
    rng = np.random.default_rng(seed)
    tactic: Tactic = GATED if gated else LINEAR
    weights = [
        Weights.random(rng, n, k, format, group, offset=offset, columns=columns, f16=f16)
        for _ in range(2 if gated else 1)
    ]
    if gated and columns:
        weights[1] = Weights(
            QuantizedParts(
                weights[1].parts.format,
                group,
                weights[1].parts.codes,
                weights[1].parts.scale,
                weights[1].parts.offset,
                weights[0].parts.columns,
            ),
            weights[0].quant,
        )
    biases = [rng.standard_normal(n).astype(np.float32) for _ in weights] if bias else []
    names = ("gate", "up") if gated else ("w",)
    constants = [
        Operand(name, (n, k), constant=True, quant=w.quant) for name, w in zip(names, weights, strict=True)
    ]
    bias_operands = [Operand(f"{name}.b", (n,), constant=True) if bias else None for name in names]
    residual_operand = [Operand("r", ("T", n))] if residual else []
    x_dtype = x_dtype or half
    op = Op(
        tactic.kind,
        (Operand("x", ("T", k), x_dtype), *constants, *bias_operands, *residual_operand),  # type: ignore[arg-type]
        (Operand("y", ("T", n)),),
        {
            "activation": activation,
            "alpha": alpha,
            "x_format": x_format,
            "x_group": x_group,
            "x_scale": x_scale,
        },
    )
    x = torch.from_numpy(rng.standard_normal((rows, k))).to(TORCH[x_dtype])
    tensors: dict[str, torch.Tensor] = {"x": x, "y": torch.full((rows, n), torch.nan)}
    if residual:
        tensors["r"] = torch.from_numpy(rng.standard_normal((rows, n))).float()

    rounded = fake_quantize(x.float().numpy(), x_format, x_group, x_scale).astype(np.float64)
    sums = [rounded @ w.numbers().T for w in weights]
    sums = [s + b for s, b in zip(sums, biases, strict=True)] if bias else sums
    torch_curve = {"none": lambda v: v, "silu": torch.nn.functional.silu}[activation]
    expected = torch_curve(torch.from_numpy(sums[0])).numpy() * (sums[1] if gated else 1.0) * alpha
    if residual:
        expected = expected + tensors["r"].double().numpy()

    ran = run_op(tactic, op, tensors, weights, biases, {"T": rows, "N": rows}, target, half)
    return Outcome(tensors["y"], expected, ran)


def run_op(
    tactic: Tactic,
    op: Op,
    tensors: dict[str, torch.Tensor],
    weights: list[Weights],
    biases: list[np.ndarray[Any, Any]],
    counts: Mapping[str, int],
    target: str,
    half: Any,
) -> list[str]:
    """Run the calls of an op; results are left in ``tensors``."""
    context = Context(TARGETS[target], half, LIMITS)
    assert tactic.accepts(op, context)
    assert tactic.cost(op, context, 8) > 0
    lowering = tactic.lower(op, context)
    for temporary in lowering.temporaries:
        shape = [counts[dim] if isinstance(dim, str) else dim for dim in temporary.shape]
        dtype = TORCH[temporary.dtype]
        fill = torch.nan if dtype.is_floating_point else 99
        tensors[temporary.name] = torch.full(shape, fill, dtype=torch.float32).to(dtype)
    parts = [w.parts for w in weights]

    def weight(use: WeightUse) -> torch.Tensor:
        if use.role == "vector":
            return torch.from_numpy(np.concatenate(biases))
        return stored(use.role, parts, target)

    ran = []
    for call in lowering.actions:
        assert isinstance(call, Call)
        ran += run_call(call, tensors, [weight(use) for use in call.weights], counts)
    return ran
