"""Small graphs in the form that capture emits, written by hand, with random weights in a real file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper


@dataclass
class GraphBuilder:
    """Collects nodes, recorded shapes and external initializers; ``file`` receives the weights."""

    file: Path
    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    infos: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._count = 0

    def weight(self, name: str, *shape: int, scale: float = 0.3) -> str:
        if name not in self.weights:
            self.weights[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return name

    def const(self, values: object, dtype: type = np.int64) -> str:
        self._count += 1
        name = f"c{self._count}"
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(
        self, op: str, inputs: list[str], shape: list, domain: str = "", name: str = "", dtype=None, **attrs
    ) -> str:
        self._count += 1
        output = name or f"{op.lower()}_{self._count}"
        self.nodes.append(helper.make_node(op, inputs, [output], f"n{self._count}", domain=domain, **attrs))
        self.infos.append(helper.make_tensor_value_info(output, dtype or TensorProto.FLOAT, shape))
        return output

    def linear(self, x: str, name: str, rows: list, n: int, k: int, bias: bool = False) -> str:
        inputs = [x, self.weight(f"{name}.weight", n, k)]
        if bias:
            inputs.append(self.weight(f"{name}.bias", n))
        return self.op("Linear", inputs, [*rows, n], domain="castiron")

    def split_heads(self, x: str, heads: int, width: int) -> str:
        x = self.op("Reshape", [x, self.const([1, -1, heads, width])], [1, "T", heads, width])
        return self.op("Transpose", [x], [1, heads, "T", width], perm=[0, 2, 1, 3])

    def model(self, vocab: int) -> onnx.ModelProto:
        offset = 0
        initializers = list(self.initializers)
        with self.file.open("wb") as out:
            for name, values in self.weights.items():
                data = values.tobytes()
                tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=values.shape)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (("location", self.file), ("offset", offset), ("length", len(data))):
                    tensor.external_data.add(key=key, value=str(value))
                initializers.append(tensor)
                out.write(data)
                offset += len(data)
        infos = [info for info in self.infos if info.name != "logits"]
        graph = helper.make_graph(
            self.nodes,
            "hand_built",
            [
                helper.make_tensor_value_info("token_ids", TensorProto.INT64, ["T"]),
                helper.make_tensor_value_info("positions", TensorProto.INT64, ["T"]),
                helper.make_tensor_value_info("logit_rows", TensorProto.INT64, ["N"]),
            ],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", vocab])],
            initializers,
            value_info=infos,
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("castiron", 1)]
        return helper.make_model(graph, opset_imports=opsets)


def rotary(g: GraphBuilder, width: int, base: float = 10000.0) -> tuple[str, str]:
    """cos and sin [1, T, width] from positions, as Llama computes them."""
    frequencies = g.const(1.0 / base ** (np.arange(0, width, 2) / width), np.float32)
    batch = g.op("Unsqueeze", ["positions", g.const([0])], [1, "T"], dtype=TensorProto.INT64)
    column = g.op("Unsqueeze", [batch, g.const([2])], [1, "T", 1], dtype=TensorProto.INT64)
    as_float = g.op("Cast", [column], [1, "T", 1], to=TensorProto.FLOAT)
    angles = g.op("Mul", [as_float, frequencies], [1, "T", width // 2])
    twice = g.op("Concat", [angles, angles], [1, "T", width], axis=-1)
    return g.op("Cos", [twice], [1, "T", width]), g.op("Sin", [twice], [1, "T", width])


def llama(
    file: Path, *, layers: int = 2, vocab: int = 61, tied: bool = True, bias: bool = False
) -> onnx.ModelProto:
    """A Llama with grouped queries: hidden 32, 4 query heads and 2 KV heads of 8, MLP 48."""
    g = GraphBuilder(file)
    hidden, heads, kv_heads, width, inner = 32, 4, 2, 8, 48
    ids = g.op("Unsqueeze", ["token_ids", g.const([0])], [1, "T"], dtype=TensorProto.INT64)
    x = g.op("Gather", [g.weight("model.embed_tokens.weight", vocab, hidden), ids], [1, "T", hidden], axis=0)
    cos, sin = rotary(g, width)
    rows = [1, "T"]
    for i in range(layers):
        p = f"model.layers.{i}"
        norm = g.op("RMSNorm", [x, g.weight(f"{p}.input_layernorm.weight", hidden)], [*rows, hidden],
                    domain="castiron", eps=1e-5, one_plus=0)  # fmt: skip
        q = g.split_heads(
            g.linear(norm, f"{p}.self_attn.q_proj", rows, heads * width, hidden, bias), heads, width
        )
        k = g.split_heads(
            g.linear(norm, f"{p}.self_attn.k_proj", rows, kv_heads * width, hidden, bias), kv_heads, width
        )
        v = g.split_heads(
            g.linear(norm, f"{p}.self_attn.v_proj", rows, kv_heads * width, hidden), kv_heads, width
        )
        rope = {"domain": "castiron", "style": "half", "cos_layout": "repeat_block"}
        q = g.op("Rope", [q, cos, sin], [1, heads, "T", width], **rope)
        k = g.op("Rope", [k, cos, sin], [1, kv_heads, "T", width], **rope)
        a = g.op("Attention", [q, k, v], [1, "T", heads, width], domain="castiron",
                 layer=i, scale=width**-0.5, window=0, chunk=0, softcap=0.0)  # fmt: skip
        a = g.op("Reshape", [a, g.const([1, -1, heads * width])], [1, "T", heads * width])
        x = g.op(
            "Add", [x, g.linear(a, f"{p}.self_attn.o_proj", rows, hidden, heads * width)], [*rows, hidden]
        )
        norm = g.op("RMSNorm", [x, g.weight(f"{p}.post_attention_layernorm.weight", hidden)], [*rows, hidden],
                    domain="castiron", eps=1e-5, one_plus=0)  # fmt: skip
        gate = g.linear(norm, f"{p}.mlp.gate_proj", rows, inner, hidden)
        gate = g.op("Activation", [gate], [*rows, inner], domain="castiron", fn="silu")
        up = g.linear(norm, f"{p}.mlp.up_proj", rows, inner, hidden)
        h = g.op("Mul", [gate, up], [*rows, inner])
        x = g.op("Add", [x, g.linear(h, f"{p}.mlp.down_proj", rows, hidden, inner)], [*rows, hidden])
    x = g.op("RMSNorm", [x, g.weight("model.norm.weight", hidden)], [*rows, hidden],
             domain="castiron", eps=1e-5, one_plus=0)  # fmt: skip
    x = g.op("Gather", [x, "logit_rows"], [1, "N", hidden], axis=1)
    head = "model.embed_tokens.weight" if tied else g.weight("lm_head.weight", vocab, hidden)
    x = g.op("Linear", [x, head], [1, "N", vocab], domain="castiron")
    g.op("Squeeze", [x, g.const([0])], ["N", vocab], name="logits")
    return g.model(vocab)
