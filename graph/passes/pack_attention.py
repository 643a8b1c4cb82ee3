"""Attention over [1, H, T, D] tensors becomes a KV write and paged attention over packed rows [T, H·D]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]

from castiron.errors import BuildError

from .linear_columns import rows_of_linear
from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    is_inline,
    optional_input,
    produced_by,
    scalar_of,
    shape_of,
    weight_nodes,
)

_UNARY_ON_ROWS = ("Tanh", "Sigmoid", "Neg", "Exp", "Clip")


@dataclass(frozen=True)
class _Rotation:
    """A Rope taken off q or k: what the paged kernels need to apply it to rows."""

    cos: Tensor
    sin: Tensor
    attrs: dict[str, Any]

    def same_as(self, other: _Rotation | None) -> bool:
        return (
            other is not None
            and self.cos.name == other.cos.name
            and self.sin.name == other.sin.name
            and self.attrs == other.attrs
        )


def pack_attention(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite every Attention; returns how many.

    Layers that attend to the same keys and values (KV sharing, seen as the same tensors feeding several
    Attention nodes) share one cache layer, which is written once. Cache layers are numbered from 0 in order.
    """
    packer = _Packer(rewriter)
    nodes = [node for node in rewriter.graph.nodes if node.op == "Attention" and node.domain == CASTIRON]
    readers: dict[tuple[str, str], int] = {}
    for node in nodes:
        key = (node.inputs[1].name, node.inputs[2].name)
        readers[key] = readers.get(key, 0) + 1
    for node in nodes:
        packer.pack(node, shared=readers[node.inputs[1].name, node.inputs[2].name] > 1)
    rewriter.tidy()
    for node in list(rewriter.graph.nodes):
        if node.op == "Rope" and node.domain == CASTIRON:
            packer.unfold_rope(node)
    rewriter.tidy()
    return len(nodes)


class _Packer:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.positions = next(t for t in rewriter.graph.inputs if t.name == "positions")
        self._written: dict[tuple[str, str], tuple[int, Tensor]] = {}
        self._layers = 0
        self._tables: dict[tuple[str, str], Tensor] = {}

    def pack(self, node: Node, *, shared: bool) -> None:
        rewriter = self.rewriter
        q, k, v = node.inputs[:3]
        q_heads, head_dim = _heads(q)
        kv_heads, _ = _heads(k)
        v_head_dim = _heads(v)[1]
        dims = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        q_rotation, q_source = self._take_rope(q, head_dim)
        q_rows = self.rows(q_source)
        written = self._written.get((k.name, v.name))
        if written is not None:
            layer, order = written
            q_rows = self._rotate(q_rows, q_rotation, q_heads, head_dim)
        else:
            layer, order = self._layers, None
            self._layers += 1
            k_rotation, k_source = self._take_rope(k, head_dim)
            k_rows, v_rows = self.rows(k_source), self.rows(v)
            if q_rotation is not None and q_rotation.same_as(k_rotation) and not shared:
                q_rows = rewriter.op(
                    "RopeWriteKV",
                    [q_rows, k_rows, v_rows, self.positions, q_rotation.cos, q_rotation.sin],
                    ["T", q_heads * head_dim],
                    attrs={"layer": layer, **dims, **q_rotation.attrs},
                    domain=CASTIRON,
                    hint=f"layers.{layer}.q_rotated",
                )
            else:
                q_rows = self._rotate(q_rows, q_rotation, q_heads, head_dim)
                k_rows = self._rotate(k_rows, k_rotation, kv_heads, head_dim)
                order = rewriter.op(
                    "WriteKV",
                    [k_rows, v_rows],
                    [0],
                    attrs={
                        "layer": layer,
                        "kv_heads": kv_heads,
                        "head_dim": head_dim,
                        "v_head_dim": v_head_dim,
                    },
                    domain=CASTIRON,
                    hint=f"layers.{layer}.kv_written",
                )
                self._written[k.name, v.name] = (layer, order)
        mask = {
            name: node.attrs[name] for name in ("scale", "window", "chunk", "softcap") if name in node.attrs
        }
        attended = rewriter.op(
            "PagedAttention",
            [q_rows, optional_input(node, 3), optional_input(node, 4), order],
            ["T", q_heads * v_head_dim],
            attrs={"layer": layer, **dims, **mask},
            domain=CASTIRON,
            hint=f"layers.{layer}.attended",
        )
        output = node.outputs[0]
        rewriter.replace(output, rewriter.reshape(attended, shape_of(output), f"{output.name}.heads"))

    def _take_rope(self, tensor: Tensor, head_dim: int) -> tuple[_Rotation | None, Tensor]:
        rope = produced_by(tensor, "Rope")
        if rope is None:
            return None, tensor
        return self._rotation(rope), rope.inputs[0]

    def _rotation(self, rope: Node) -> _Rotation:
        layout = rope.attrs["cos_layout"]
        cos, sin = (self._table(tensor, layout) for tensor in rope.inputs[1:3])
        style = rope.attrs["style"]
        attrs = {
            "rotary_dim": 2 * int(shape_of(cos)[1]),
            "interleaved": int(style in ("interleaved", "concat_halves")),
            "concat_halves": int(style == "concat_halves"),
        }
        return _Rotation(cos, sin, attrs)

    def _table(self, tensor: Tensor, layout: str) -> Tensor:
        """The position table [P, R/2] behind a Rope's cos or sin."""
        known = self._tables.get((tensor.name, layout))
        if known is not None:
            return known
        node = produced_by(tensor, "Reshape", "Gather")
        while node is not None and node.op == "Reshape":
            node = produced_by(node.inputs[0], "Reshape", "Gather")
        if node is None or not is_inline(node.inputs[0]) or node.inputs[1] is not self.positions:
            raise BuildError(
                f"the rotary table {tensor.name!r} depends on more than a token's position, "
                "which the paged kernels cannot apply; expected cos and sin as a function of positions alone"
            )
        values = np.asarray(node.inputs[0].values)
        width = values.shape[1]
        if layout == "repeat_block":
            half, rest = values[:, : width // 2], values[:, width // 2 :]
        elif layout == "repeat_each":
            half, rest = values[:, 0::2], values[:, 1::2]
        else:
            half, rest = values, values
        if not np.array_equal(half, rest):
            raise BuildError(f"the rotary table {tensor.name!r} is not {layout} as its Rope node says")
        table = self.rewriter.constant(np.ascontiguousarray(half), f"{node.inputs[0].name}.half")
        self._tables[tensor.name, layout] = table
        return table

    def _rotate(self, rows: Tensor, rotation: _Rotation | None, heads: int, head_dim: int) -> Tensor:
        if rotation is None:
            return rows
        return self.rewriter.op(
            "PagedRope",
            [rows, self.positions, rotation.cos, rotation.sin],
            shape_of(rows),
            attrs={"heads": heads, "head_dim": head_dim, **rotation.attrs},
            domain=CASTIRON,
            hint=f"{rows.name}.rotated",
        )

    def unfold_rope(self, node: Node) -> None:
        """A Rope whose result is not only read by attention: on rows, and back to [1, H, T, D]."""
        output = node.outputs[0]
        heads, width = _heads(output)
        rotated = self._rotate(self.rows(node.inputs[0]), self._rotation(node), heads, width)
        split = self.rewriter.reshape(rotated, [1, "T", heads, width])
        back = self.rewriter.op("Transpose", [split], shape_of(output), attrs={"perm": [0, 2, 1, 3]})
        self.rewriter.replace(output, back)

    def rows(self, tensor: Tensor) -> Tensor:
        """[1, H, T, D] as rows [T, H·D], moving per-head ops (norms, scales, Rope) onto rows."""
        rewriter = self.rewriter
        heads, width = _heads(tensor)
        target: list[int | str] = ["T", heads * width]
        moved = self._through(tensor, self.rows, heads, width) or rows_of_linear(rewriter, tensor, 2)
        if moved is not None:
            return moved
        transpose = produced_by(tensor, "Transpose")
        if transpose is not None and list(transpose.attrs.get("perm", ())) == [0, 2, 1, 3]:
            return self._token_major(transpose.inputs[0])
        if heads == 1:
            # With one head the transpose moves nothing, so clean_up has made it a Reshape.
            reshape = produced_by(tensor, "Reshape")
            if reshape is not None and shape_of(reshape.inputs[0]) == (1, "T", 1, width):
                return self._token_major(reshape.inputs[0])
            return rewriter.reshape(tensor, target)
        swapped = rewriter.op("Transpose", [tensor], [1, "T", heads, width], attrs={"perm": [0, 2, 1, 3]})
        return rewriter.reshape(swapped, target)

    def _token_major(self, tensor: Tensor) -> Tensor:
        """[1, T, H, D] as rows."""
        heads, width = (int(d) for d in shape_of(tensor)[2:])
        moved = self._through(tensor, self._token_major, heads, width) or rows_of_linear(
            self.rewriter, tensor, 1
        )
        if moved is not None:
            return moved
        return self.rewriter.reshape(tensor, ["T", heads * width], f"{tensor.name}.rows")

    def _through(self, tensor: Tensor, rows_of: Any, heads: int, width: int) -> Tensor | None:
        """Apply the op that made ``tensor`` on rows, if it acts on each head or element by itself."""
        rewriter, node = self.rewriter, tensor.inputs[0] if tensor.inputs else None
        target: list[int | str] = ["T", heads * width]
        if node is None:
            return None
        if node.op in ("RMSNorm", "LayerNorm") and node.domain == CASTIRON:
            weights = [optional_input(node, i) for i in (1, 2)]
            if any(w is not None and shape_of(w) != (width,) for w in weights):
                return None
            attrs = {**node.attrs, "group": width}
            x = rows_of(node.inputs[0])
            return rewriter.op(
                node.op, [x, *weights], target, attrs=attrs, domain=CASTIRON, hint=f"{tensor.name}.rows"
            )
        if node.op == "Rope" and node.domain == CASTIRON:
            return self._rotate(rows_of(node.inputs[0]), self._rotation(node), heads, width)
        if node.domain:
            return None
        if node.op in _UNARY_ON_ROWS and all(isinstance(t, gs.Constant) for t in node.inputs[1:]):
            x = rows_of(node.inputs[0])
            return rewriter.op(node.op, [x, *node.inputs[1:]], target, attrs=dict(node.attrs))
        if node.op in ("Mul", "Div", "Add", "Sub") and shape_of(node.inputs[0]) == shape_of(tensor):
            factor = self._row_operand(node.inputs[1], heads, width)
            if factor is not None:
                x = rows_of(node.inputs[0])
                return rewriter.op(node.op, [x, factor], target, hint=f"{tensor.name}.rows")
        return None

    def _row_operand(self, other: Tensor, heads: int, width: int) -> Tensor | None:
        """The second operand of an elementwise op on heads, in the form that broadcasts over rows."""
        dims = shape_of(other)
        if scalar_of(other) is not None:
            return self.rewriter.reshape(other, [1])
        if "T" in dims and math.prod(d for d in dims if isinstance(d, int)) == 1:
            return self.rewriter.reshape(other, ["T", 1])  # one number per token
        if weight_nodes(other) and [d for d in dims if d != 1] == [heads, width]:
            return self.rewriter.reshape(other, [heads * width])  # a vector of its own for every head
        return None


def _heads(tensor: Tensor) -> tuple[int, int]:
    dims = shape_of(tensor)
    if len(dims) != 4 or not isinstance(dims[1], int) or not isinstance(dims[3], int):
        raise BuildError(
            f"attention operand {tensor.name!r} has shape {list(dims)}; expected [1, heads, T, head_dim]"
        )
    return dims[1], dims[3]
