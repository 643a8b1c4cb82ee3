"""Which values are stored in half: by hand on chains of ops."""

from __future__ import annotations

from castiron.build.storage import half_values, with_storage
from castiron.plugins import Op, Operand


def op(kind: str, inputs: str, outputs: str) -> Op:
    """Operands by name; names in capitals are weights."""
    return Op(
        kind,
        tuple(Operand(name, ("T", 8), constant=name.isupper()) for name in inputs.split()),
        tuple(Operand(name, ("T", 8)) for name in outputs.split()),
    )


def test_what_matrix_units_and_the_cache_alone_read_is_half() -> None:
    ops = [
        op("castiron.Embedding", "token_ids E", "x"),
        op("castiron.RMSNorm", "x W", "normed"),
        op("castiron.Linear", "normed Q", "qkv"),
        op("Split", "qkv", "q k v"),
        op("castiron.RopeWriteKV", "q k v positions C S", "rotated"),
        op("castiron.PagedAttention", "rotated", "attended"),
        op("castiron.Linear", "attended O B x", "y"),
        op("castiron.AddRMSNorm", "y x W", "n sum"),
        op("castiron.GatedLinear", "n G U", "gated"),
        op("castiron.Linear", "gated D B sum", "z"),
        op("castiron.Linear", "z H", "logits"),
    ]
    assert half_values(ops, ["logits"]) == {
        *("normed", "qkv", "q", "k", "v", "rotated", "attended", "n", "gated", "z"),
    }


def test_one_reader_in_full_precision_is_enough_to_keep_a_value_whole() -> None:
    """The residual stream feeds a product and an add; logits stay whole whoever reads them."""
    ops = [
        op("castiron.RMSNorm", "x W", "n"),
        op("castiron.Linear", "n A", "a"),
        op("Add", "a n", "logits"),
        op("castiron.Linear", "logits B", "b"),
    ]
    assert half_values(ops, ["logits"]) == set()


def test_a_base_and_its_views_share_their_dtype() -> None:
    """One view that is read whole keeps base and views whole."""
    ops = [
        op("castiron.Linear", "x W", "base"),
        op("Split", "base", "q gate"),
        op("castiron.PagedAttention", "q", "attended"),
        op("castiron.Activation", "gate", "activated"),
    ]
    assert half_values(ops, []) == {"x"}


def test_a_view_of_a_view_follows_the_first_base() -> None:
    ops = [
        op("castiron.Linear", "x W", "base"),
        op("Slice", "base", "part"),
        op("Slice", "part", "small"),
        op("castiron.WriteKV", "small small", ""),
    ]
    assert half_values(ops, []) == {"x", "base", "part", "small"}


def test_ops_that_hand_numbers_on_are_half_readers_where_their_results_are_half() -> None:
    def halves(reader: str) -> set[str]:
        ops = [
            op("castiron.RMSNorm", "x W", "n"),
            op("castiron.PagedRope", "n positions C S", "r"),
            op("Reshape", "r", "flat"),
            op(reader, "flat", "y"),
        ]
        return half_values(ops, [])

    assert halves("castiron.PagedAttention") == {"n", "r", "flat"}
    assert halves("Exp") == set()


def test_tactics_see_the_storage_dtype() -> None:
    stored = with_storage(op("castiron.RMSNorm", "x W", "n"), {"n"}, "bf16")
    assert [o.dtype for o in (*stored.inputs, *stored.outputs) if o] == ["f32", "f32", "bf16"]


def test_rows_that_want_logits_are_picked_from_half_storage() -> None:
    """The last attention is that of the other layers; the residual stream, gathered too, stays whole."""
    ops = [
        op("castiron.PagedAttention", "rotated", "attended"),
        op("castiron.GatherRows", "attended logit_rows", "picked"),
        op("castiron.GatherRows", "x logit_rows", "residual"),
        op("castiron.Linear", "picked O B residual", "y"),
        op("castiron.AddRMSNorm", "y residual W", "n sum"),
        op("castiron.Linear", "n H", "logits"),
    ]
    assert half_values(ops, ["logits"]) == {"rotated", "attended", "picked", "n"}
