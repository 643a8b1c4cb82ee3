"""A program for sm_80 by hand, over weights of the tiny engine: three steps, two kernels without code."""

from __future__ import annotations

import json
from typing import Any

from castiron.engines import EngineWriter, KvLayer, Program, Value, Weight
from castiron.engines.program import Kernel
from tiny import DIM, HIDDEN, KV_HEADS, LIMITS, VOCAB

#: Enough of an ELF for a reader that does not execute it.
IMAGE = b"\x7fELF" + bytes(60)
TARGET = "sm_80"


def images() -> dict[str, bytes]:
    return {f"{TARGET}/kernels/{name}.cubin": IMAGE for name in ("rows.0", "store.1")}


def program() -> Program:
    """Embedding rows, a write to the cache, and rows of another table as logits."""
    rows = Kernel(
        name="rows.0",
        function="rows",
        image=f"{TARGET}/kernels/rows.0.cubin",
        threads=128,
        params=["ptr", "ptr", "ptr", "i32", "f32"],
        types=["*i32", "*fp32", "*fp32", "i32", "fp32"],
        hidden_pointers=2,
        resources={"registers": 40, "spills": 0, "matrix": "mma", "occupancy": 0.5},
    )
    store = Kernel(
        name="store.1",
        function="store",
        image=f"{TARGET}/kernels/store.1.cubin",
        threads=64,
        params=["ptr", "ptr", "ptr", "ptr"],
        types=["*fp32", "*i32", "*fp32", "*fp32"],
    )

    def step(kernel: str, inputs: list[str], weights: list[str], outputs: list[str], *launches: Any) -> Any:
        return {
            "kernel": kernel,
            "inputs": inputs,
            "weights": weights,
            "outputs": outputs,
            "launches": list(launches),
        }

    def gathered(ids: str, table: str, to: str, symbol: str) -> dict[str, Any]:
        return {
            "kernel": 0,
            "grid": [{"of": symbol, "per": 4}, {"times": 2}],
            "args": [{"value": ids}, {"weight": table}, {"value": to}, {"size": symbol}, {"f32": 1.0}],
            "when": {"of": symbol, "low": 1, "high": 16},
        }

    cached = {
        "kernel": 1,
        "grid": [{"of": "T"}],
        "args": [{"value": "k"}, {"input": "slots"}, {"k_cache": 0}, {"v_cache": 0}],
    }
    values = [
        Value(name="token_ids", dtype="i32", shape=["T"]),
        Value(name="positions", dtype="i32", shape=["T"]),
        Value(name="logit_rows", dtype="i32", shape=["N"]),
        Value(name="x", dtype="f32", shape=["T", HIDDEN]),
        Value(name="k", dtype="f32", shape=["T", KV_HEADS * DIM], base="x", column=16),
        Value(name="logits", dtype="f32", shape=["N", VOCAB], offset=2048),
    ]
    plain = Program(
        format=(1, 1),
        target=TARGET,
        vocab_size=VOCAB,
        limits=LIMITS,
        arena_bytes=2048 + 16 * VOCAB * 4,
        values=values,
        weights=[
            Weight(name="embed", dtype="f32", layout="plain", shape=[VOCAB, HIDDEN]),
            Weight(name="cos", dtype="f32", layout="plain", shape=[96, DIM // 2]),
        ],
        steps=[],
        kv_layers=[KvLayer(kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, dtype="f32")],
        kernels=[rows, store],
        prefill_tile=16,
    )
    steps = [
        step("embedding", ["token_ids"], ["embed"], ["x"], gathered("token_ids", "embed", "x", "T")),
        step("write_kv", ["k"], [], [], cached),
        step("rows", ["logit_rows"], ["cos"], ["logits"], gathered("logit_rows", "cos", "logits", "N")),
    ]
    return Program.model_validate_json(json.dumps(plain.model_dump() | {"steps": steps}))


def add_cuda(writer: EngineWriter) -> None:
    """Make the engine that ``writer`` writes a fat one."""
    writer.add_images(images())
    writer.add_program(program())
