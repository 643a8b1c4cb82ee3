"""Machine code of the attention kernels for every architecture, compiled on this machine."""

from __future__ import annotations

from typing import Any

import pytest
from castiron.engines.cuda_layout import kv_layout
from castiron.engines.program import KvLayer, Limits
from castiron.plugins import Call, Context, Op, Operand
from castiron.plugins.cuda import attention, rope
from castiron.plugins.launch import TritonKernel
from castiron.plugins.targets import TARGETS
from compiling import compiled

LIMITS = Limits(max_batch_size=64, max_num_tokens=8192, max_logit_rows=64, max_seq_len=8192)
#: What 64 rows and more are multiplied with: prefill, and groups of as many heads. Fewer take instructions of
#: single warps everywhere.
MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05"}


def kernels_of(
    target: str, tactic: Any, q_heads: int, kv_heads: int, head_dim: int, cache: str = "bf16", **more: Any
) -> list[Any]:
    layer = {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim, "dtype": cache}
    layout = kv_layout([KvLayer.model_validate(layer)])
    context = Context(TARGETS[target], "bf16", LIMITS, layout, 128)
    q = Operand("q", ("T", q_heads * head_dim), "bf16")
    operands: tuple[Operand, ...] = (q,)
    if tactic.kind == "castiron.RopeWriteKV":
        kv = [Operand(name, ("T", kv_heads * head_dim), "bf16") for name in "kv"]
        tables = [Operand(name, (8192, head_dim // 2), constant=True) for name in ("cos", "sin")]
        operands = (q, *kv, Operand("positions", ("T",), "i32"), *tables)
    attrs = {
        "layer": 0,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "scale": head_dim**-0.5,
        **more,
    }
    op = Op(tactic.kind, operands, (Operand("out", q.shape, "bf16"),), attrs)
    (call,) = tactic.lower(op, context).actions
    assert isinstance(call, Call)
    return [launch.kernel for launch in call.launches if isinstance(launch.kernel, TritonKernel)]


def check(target: str, kernels: list[TritonKernel], wide: float = 0.5) -> None:
    hot = [kernel for kernel in kernels if kernel.hot]
    found = compiled(hot, target)
    assert {kernel.function.__name__ for kernel, _ in found} == {"attention_prefill", "attention_decode"}
    for kernel, code in found:
        used = code.resources
        name = f"{target} {kernel.function.__name__} {dict(kernel.constants)} {used}"
        rows = kernel.constants.get("BLOCK_M") or kernel.constants["BLOCK_H"]
        assert used["spills"] == 0, name
        assert used["matrix"] == (MATRIX.get(target, "mma") if rows >= 64 else "mma"), name
        # The narrow ones read block tables and counts.
        assert used["wide_loads"] >= wide * used["global_loads"], name
        assert code.shared_bytes + used["static_shared_bytes"] <= TARGETS[target].shared_bytes, name


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_attention_of_an_8b_model_multiplies_on_matrix_units_without_spills(target: str) -> None:
    check(target, kernels_of(target, attention.TACTICS[0], 32, 8, 128))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_86", "sm_120"])
def test_as_above_on_parts_with_less_shared_memory(target: str) -> None:
    check(target, kernels_of(target, attention.TACTICS[0], 32, 8, 128))


@pytest.mark.parametrize(
    ("target", "cache"),
    [
        ("sm_90", "f8e4m3"),
        pytest.param("sm_80", "i8", marks=pytest.mark.slow),
        pytest.param("sm_80", "f8e4m3", marks=pytest.mark.slow),
        pytest.param("sm_90", "i8", marks=pytest.mark.slow),
        pytest.param("sm_100", "f8e4m3", marks=pytest.mark.slow),
    ],
)
def test_attention_over_caches_of_codes(target: str, cache: str) -> None:
    kernels = kernels_of(target, attention.TACTICS[0], 32, 8, 128, cache)
    # Values of a byte, of which the matrix unit wants columns, come 8 bytes at a time.
    check(target, kernels, wide=0.2)


GEMMA2 = (8, 4, 256, {"softcap": 50.0})
FALCON = (71, 1, 64, {})
PHI = (32, 32, 80, {"window": 1024})
SMOLLM2 = (9, 3, 64, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ("sm_80", GEMMA2),
        ("sm_86", GEMMA2),
        ("sm_90", GEMMA2),
        ("sm_100", GEMMA2),
        ("sm_90", FALCON),
        ("sm_80", PHI),
        ("sm_86", SMOLLM2),
    ],
)
def test_attention_of_other_shapes(target: str, shape: tuple[int, int, int, dict[str, Any]]) -> None:
    q_heads, kv_heads, head_dim, more = shape
    check(target, kernels_of(target, attention.TACTICS[0], q_heads, kv_heads, head_dim, **more))


def test_rotation_and_stores_move_16_bytes_at_a_time() -> None:
    attrs = {"rotary_dim": 128, "interleaved": False, "concat_halves": False}
    ((_, code),) = compiled(kernels_of("sm_80", rope.TACTICS[1], 32, 8, 128, **attrs), "sm_80")
    assert code.resources["spills"] == 0
    assert code.resources["wide_loads"] >= 0.5 * code.resources["global_loads"]
