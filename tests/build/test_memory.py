"""The arena plan never lets two live buffers overlap, and the table's numbers are those of the layouts."""

from __future__ import annotations

from castiron.build.memory import Buffer, aligned, peak_live_bytes, plan_arena, rounded_bytes
from castiron.engines.kv_cache import packed_block_bytes
from castiron.engines.program import KvLayer, Limits, Program, Step, Value, Weight
from castiron.engines.weights_file import layout_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

buffers = st.lists(
    st.builds(
        lambda size, first, length: Buffer(size, first, first + length),
        st.integers(1, 5000),
        st.integers(0, 40),
        st.integers(0, 15),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(buffers)
def test_buffers_that_live_at_once_never_overlap(given_buffers: list[Buffer]) -> None:
    offsets, total = plan_arena(given_buffers)
    placed = list(zip(given_buffers, offsets, strict=True))
    for i, (a, start_a) in enumerate(placed):
        assert start_a % 64 == 0
        assert start_a + a.size <= total
        for b, start_b in placed[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert start_a + a.size <= start_b or start_b + b.size <= start_a


@settings(max_examples=100, deadline=None)
@given(buffers)
def test_the_arena_is_at_least_the_peak_and_at_most_everything(given_buffers: list[Buffer]) -> None:
    _, total = plan_arena(given_buffers)
    assert peak_live_bytes(given_buffers) <= total <= sum(aligned(b.size) for b in given_buffers)


def test_a_chain_of_equal_buffers_needs_two_of_them() -> None:
    chain = [Buffer(1000, step, step + 1) for step in range(30)]
    assert plan_arena(chain)[1] == 2 * 1024


def test_the_smallest_gap_that_fits_is_taken() -> None:
    # Live at step 1: [0, 256) and [512, 640) and [768, 1024): gaps of 256 and 128 bytes.
    big = [Buffer(1024, 0, 0)]
    held = [Buffer(256, 1, 3), Buffer(256, 1, 1), Buffer(128, 1, 3)]
    offsets, total = plan_arena([*big, *held, Buffer(64, 2, 3)])
    assert total == 1024
    assert offsets[4] in (256, 512)


def test_stored_bytes_follow_the_layouts() -> None:
    def weight(shape: list[int], dtype: str, layout: str) -> Weight:
        return Weight.model_validate({"name": "w", "dtype": dtype, "layout": layout, "shape": shape})

    assert layout_bytes(weight([33, 10], "f32", "panel16")) == 3 * 10 * 16 * 4
    assert layout_bytes(weight([33, 11], "bf16", "panel16x2")) == 3 * 6 * 16 * 2 * 2
    assert layout_bytes(weight([7], "f32", "plain")) == 28
    assert layout_bytes(weight([5, 3], "bf16", "plain")) == 30


def test_a_kv_block_holds_keys_and_values_of_32_tokens_in_every_layer() -> None:
    layers = [
        KvLayer(kv_heads=2, head_dim=8, v_head_dim=4, dtype="bf16"),
        KvLayer(kv_heads=1, head_dim=8, v_head_dim=8, dtype="f32"),
    ]
    assert packed_block_bytes(layers) == 2 * (8 + 4) * 32 * 2 + 1 * 16 * 32 * 4


def test_experts_have_a_row_for_each_pair_of_a_token_and_an_expert() -> None:
    values = [
        Value(name="x", dtype="f32", shape=["T", 96], offset=0),
        Value(name="y", dtype="f32", shape=["T", 4, 32], offset=0),
    ]
    limits = Limits(max_batch_size=2, max_num_tokens=10, max_logit_rows=3, max_seq_len=64)
    program = Program.model_construct(limits=limits, values=values)

    def bytes_of(**attrs: str | int) -> int:
        step = Step(kernel="expert_linear", inputs=["x"], outputs=["y"], attrs={"experts": 7, **attrs})
        return rounded_bytes(program, step)

    order = aligned(4 * (7 + 1 + 40))
    assert bytes_of() == 40 * 384 + order  # as float32, which are more than as bf16
    # Codes of a byte, and for each 32 of them scale, sum and start
    assert bytes_of(x_format="int8", x_group=32, group=32) == 40 * 384 + order


def test_rounded_rows_are_counted_for_as_many_rows_as_a_step_may_have() -> None:
    limits = Limits(max_batch_size=2, max_num_tokens=100, max_logit_rows=3, max_seq_len=64)
    values = [
        Value(name=name, dtype="f32", shape=[rows, 576]) for name, rows in (("hidden", "T"), ("last", "N"))
    ]
    program = Program.model_construct(limits=limits, values=values)

    def needed(x: str, **attrs: str | int) -> int:
        return rounded_bytes(program, Step(kernel="quantized_linear", inputs=[x], attrs=dict(attrs)))

    # by hand: 576 codes; 18 runs of 32, each with a scale, a sum and one starting sum; whole lines of 64
    assert needed("hidden", x_format="int8", x_group=32, group=0) == 100 * (576 + 18 * 12 + 40)
    # one run of 576, its starting sums for chunks of 32: 576 + 8 + 72, a line of 64 at a time
    assert needed("last", x_format="int8", x_group=0, group=0) == 3 * 704
    assert needed("hidden", x_format="fp8", x_group=128, group=128) == 100 * 576 * 4
    assert needed("hidden", x_format="float") == 0

    def before(dtype: str, x: str) -> int:
        weight = Weight.model_construct(name="w", dtype=dtype)
        program = Program.model_construct(limits=limits, values=values, weights=[weight])
        return rounded_bytes(program, Step(kernel="linear", inputs=[x], weights=["w"]))

    # on a CPU with AMX: 18 lines of 64 bytes, and one to make them odd
    assert before("bf16", "hidden") == 100 * 19 * 64
    assert before("bf16", "last") == 3 * 19 * 64
    assert before("f32", "hidden") == 0
