"""The vocabulary check: what does not fit docs/graph.md is named."""

from __future__ import annotations

import pytest
from castiron.graph.ops import check_vocabulary
from onnx import ModelProto, TensorProto, helper


def _model(op: str, inputs: list[str], **attributes: object) -> ModelProto:
    node = helper.make_node(op, inputs, ["y"], name="node", domain="castiron", **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 4])
    return helper.make_model(helper.make_graph([node], "g", [x], []))


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "message"),
    [
        ("Lineer", ["x", "w"], {}, "no op 'Lineer'"),
        ("Linear", ["x"], {}, "Linear\\(x, w, b\\?, residual\\?\\): 1 operands"),
        ("Linear", ["x", ""], {}, "2 operands, 1 of them given"),
        ("Linear", ["x", "w", "b", "r", "s"], {}, "5 operands"),
        ("RMSNorm", ["x", "w"], {"epsilon": 1e-5}, "RMSNorm has no attribute epsilon"),
    ],
)
def test_a_node_outside_the_vocabulary_is_named(
    op: str, inputs: list[str], attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_vocabulary(_model(op, inputs, **attributes))


def test_optional_operands_may_be_left_out_or_empty() -> None:
    check_vocabulary(_model("Linear", ["x", "w"]))
    check_vocabulary(_model("Linear", ["x", "w", "", "residual"], activation="none", alpha=1.0))
