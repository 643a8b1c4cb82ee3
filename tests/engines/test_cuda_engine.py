"""Engines with a CUDA target: what the reader gives, and each way in which a program for a GPU can lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from castiron.engines import open_engine
from castiron.engines.cuda_layout import kv_layout, step_input_bytes
from castiron.engines.kernel_paths import kernel_paths
from castiron.engines.program import KvLayer, module_sizes
from edit import copy_engine, edit_program, read_entries, write_entries
from tiny import write_tiny_engine
from tiny_cuda import IMAGE, TARGET, add_cuda, program

from castiron.errors import EngineError


@pytest.fixture(scope="module")
def fat_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("fat") / "engine", more=add_cuda)


def test_a_fat_engine_gives_the_program_and_the_images_of_each_target(fat_engine: Path) -> None:
    engine = open_engine(fat_engine)
    assert engine.targets == ["host", TARGET]
    assert engine.program(TARGET) == program()
    assert engine.kernel_images(TARGET) == {
        "sm_80/kernels/rows.0.cubin": IMAGE,
        "sm_80/kernels/store.1.cubin": IMAGE,
    }
    assert engine.kernel_images("host") == {}
    with pytest.raises(EngineError, match=r"no program for 'sm_90'.*host, sm_80.*--target sm_90"):
        engine.program("sm_90")


def _launch(changed: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda p: p["steps"][0]["launches"][0].update(changed)


def _arg(step: int, index: int, arg: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def change(p: dict[str, Any]) -> None:
        p["steps"][step]["launches"][0]["args"][index] = arg

    return change


def test_kernel_paths_count_the_steps_of_each_kernel(fat_engine: Path) -> None:
    """The program by hand has rows gathered twice and keys stored once; on host each step is one op."""
    engine = open_engine(fat_engine)
    assert kernel_paths(engine.program(TARGET)) == {"rows.0": 2, "store.1": 1}
    host = engine.program("host")
    assert sum(kernel_paths(host).values()) == len(host.steps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_launch({"kernel": 2}), "launches kernel 2 of 2"),
        (_launch({"args": []}), "0 arguments; it takes 5"),
        (_launch({"grid": []}), "grid"),
        (_launch({"grid": [{}, {"of": "T", "times": 70000}]}), "blocks in a dimension that takes 65535"),
        (_launch({"when": {"of": "T", "low": 3, "high": 2}}), "from 3 to 2"),
        (_launch({"when": {"of": "R", "low": 0, "high": 2}}), "counts R"),
        (_launch({"grid": [{"of": "V"}]}), "counts V"),
        (_arg(0, 0, {"value": "nothing"}), "'nothing', which is no operand"),
        (_arg(0, 2, {"value": "logits"}), "'logits', which is no operand"),
        (_arg(0, 0, {}), "an argument that is nothing"),
        (_arg(0, 0, {"value": "x", "i32": 1}), "value and i32"),
        (_arg(0, 0, {"i32": 1}), "gives i32 where the kernel takes ptr"),
        (_arg(0, 3, {"value": "x"}), "gives value where the kernel takes i32"),
        (_arg(0, 0, {"value": "x"}), r"gives x of f32 where the kernel takes \*i32"),
        (_arg(0, 1, {"weight": "cos"}), "weight 'cos', which is no operand"),
        (_arg(0, 3, {"size": "Q"}), "size"),
        (_arg(1, 1, {"input": "temperature"}), "'temperature', which only sampling has"),
        (_arg(1, 1, {"input": "secrets"}), "input"),
        (_arg(1, 2, {"k_cache": 1}), "cache layer 1 of 1"),
        (lambda p: p["steps"][1].update(launches=[]), "launches nothing"),
        (lambda p: p["steps"][0]["inputs"].append("logits"), "before anything wrote it"),
        (lambda p: p["kernels"][0].update(image="sm_80/kernels/other.cubin"), "rank0.engine lacks"),
        (lambda p: p["kernels"][0].update(image="host/program.json"), "rank0.engine lacks"),
        (lambda p: p["kernels"][0].update(image=""), "no machine code"),
        (lambda p: p["kernels"][0].update(threads=2048), "threads"),
        (lambda p: p["kernels"][0].update(types=["*i32"]), "contradict its parameters"),
        (lambda p: p["kernels"][1].update(scratch_bytes=64), "no parameter for its address"),
        (lambda p: p["kernels"][1].update(name="rows.0"), "a kernel twice"),
        (lambda p: p.update(prefill_tile=0), "query tiles of 0 rows"),
        (lambda p: p.update(sampling=p["steps"][1:2]), "must sample into value 'sampled'"),
        (lambda p: p.update(feeding=p["steps"][:1]), "feeds what it does not sample"),
        (_arg(1, 1, {"input": "token_source"}), "'token_source', which only sampling has"),
        (lambda p: p.update(arena_bytes=2048), "ends at byte"),
    ],
)
def test_a_damaged_program_never_reaches_the_gpu(
    fat_engine: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    engine = copy_engine(fat_engine, tmp_path / "engine")
    edit_program(engine, change, TARGET)
    with pytest.raises(EngineError, match=words):
        open_engine(engine)


def test_host_programs_have_neither_launches_nor_query_tiles(fat_engine: Path, tmp_path: Path) -> None:
    engine = copy_engine(fat_engine, tmp_path / "engine")
    launch = {"kernel": 0, "grid": [{}], "args": []}
    edit_program(engine, lambda p: p["steps"][0].update(launches=[launch]))
    with pytest.raises(EngineError, match="has launches"):
        open_engine(engine)


def test_an_image_that_is_no_machine_code_is_refused_when_it_is_read(
    fat_engine: Path, tmp_path: Path
) -> None:
    engine = copy_engine(fat_engine, tmp_path / "engine")
    entries = read_entries(engine)
    entries["sm_80/kernels/rows.0.cubin"] = b"MZ" + IMAGE
    write_entries(engine, entries)
    with pytest.raises(EngineError, match=re.escape("rows.0.cubin holds no machine code")):
        open_engine(engine).kernel_images(TARGET)


def test_a_block_of_the_cache_holds_layer_after_layer_on_256_byte_borders() -> None:
    """By hand from docs/cuda-program.md: keys [kv_head][32][D], then values, each part rounded up."""
    layers = [
        KvLayer(kv_heads=2, head_dim=8, v_head_dim=4, dtype="bf16"),
        KvLayer(kv_heads=1, head_dim=3, v_head_dim=8, dtype="f32"),
    ]
    layout = kv_layout(layers)
    assert layout.k_offsets == (0, 1024 + 512)
    assert layout.v_offsets == (1024, 1536 + 512)  # 32 * 3 * 4 = 384, rounded up to 512
    assert layout.block_stride == 2048 + 1024


def test_layers_with_a_window_lie_in_blocks_of_their_own() -> None:
    layers = [
        KvLayer(kv_heads=2, head_dim=8, v_head_dim=4, dtype="bf16", window=16),
        KvLayer(kv_heads=1, head_dim=3, v_head_dim=8, dtype="f32"),
        KvLayer(kv_heads=2, head_dim=8, v_head_dim=4, dtype="bf16", window=16),
    ]
    layout = kv_layout(layers)
    assert layout.k_offsets == (0, 0, 1536)
    assert layout.v_offsets == (1024, 512, 1536 + 1024)
    assert (layout.block_stride, layout.window_stride) == (512 + 1024, 2 * 1536)
    assert [layout.stride_of(layer) for layer in range(3)] == [3072, 1536, 3072]


def test_the_step_inputs_block_has_room_for_every_array_at_its_largest() -> None:
    """Limits of the tiny engine: T and N 16, S and D 4, 96 tokens = 3 blocks, tiles of 16: P = 1 + 4."""
    i32 = 4
    arrays = [16, 16, 16, 16, 5, 4, 4 * 3, 4, 5, 5]  # ids positions slots rows starts len table decode tiles
    expected = sum(-(-count * i32 // 16) * 16 for count in arrays)
    assert step_input_bytes(program()) == expected


def _adapted(damage: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Adapters of rank 16 for the program's first step, then ``damage(program, step)``."""

    def change(p: dict[str, Any]) -> None:
        step = p["steps"][0]
        added = {
            "kernel": 1,
            "grid": [{"of": "A"}],
            "args": [{"value": "x"}, {"input": "lora_rows"}, {"adapter": 256}, {"adapter": 512}],
        }
        p["adapters"] = {"rank": 16, "dtype": "bf16", "slot_bytes": 8192}
        step |= {
            "kernel": "linear",
            "modules": [{"module": "q", "column": 0, "row": 0, "count": 8}],
            "adapter": {"inputs": 4, "a": 256, "b": 512, "operands": ["logits"]},
            "adapted": [*step["launches"], added],
        }
        damage(p, step)

    return change


def test_a_program_with_adapters_is_read_and_counts_their_inputs(fat_engine: Path, tmp_path: Path) -> None:
    engine = copy_engine(fat_engine, tmp_path / "engine")
    edit_program(engine, _adapted(lambda p, step: None), TARGET)
    found = open_engine(engine).program(TARGET)
    assert module_sizes(found) == {"q": (4, 8)}
    # T and N of 16, of 4 sequences: 4 tiles of each at most, whose rows and slots follow.
    assert step_input_bytes(found) == step_input_bytes(program()) + 2 * (4 * 16 * 4 + 4 * 4)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p, step: p.update(adapters=None), "are missing"),
        (lambda p, step: step.update(adapter=None), "no matrices"),
        (lambda p, step: step.update(adapted=[]), "are missing"),
        (lambda p, step: step.update(modules=[]), "are missing"),
        (lambda p, step: step.update(kernel="rows"), "only a product has"),
        (lambda p, step: step["adapter"].update(a=100), "outside of a slot"),
        (lambda p, step: step["adapter"].update(b=8192), "outside of a slot"),
        (lambda p, step: step["adapter"].update(inputs=1 << 20), "outside of a slot"),
        (lambda p, step: step["adapter"].update(operands=["nothing"]), "'nothing' for adapters"),
        (lambda p, step: step["adapted"][1]["args"].__setitem__(2, {"adapter": 8192}), "byte 8192 of an"),
        (lambda p, step: step["adapted"][1]["args"].__setitem__(1, {"input": "top_k"}), "only sampling has"),
        (lambda p, step: step["adapted"][1].update(grid=[{"of": "R"}]), "counts R"),
        (lambda p, step: step["launches"].append(step["adapted"][1]), "counts A"),
        (
            lambda p, step: p["steps"][1]["launches"][0]["args"].__setitem__(1, {"input": "lora_slots"}),
            "'lora_slots', which only what adds adapters has",
        ),
        (
            lambda p, step: p["steps"][1]["launches"][0]["args"].__setitem__(0, {"adapter": 0}),
            "an adapter, which only what adds adapters has",
        ),
        (lambda p, step: p["adapters"].update(rank=20), "rank"),
    ],
)
def test_adapters_that_contradict_the_program_never_reach_the_gpu(
    fat_engine: Path,
    tmp_path: Path,
    damage: Callable[[dict[str, Any], dict[str, Any]], None],
    words: str,
) -> None:
    engine = copy_engine(fat_engine, tmp_path / "engine")
    edit_program(engine, _adapted(damage), TARGET)
    with pytest.raises(EngineError, match=words):
        open_engine(engine)
