"""Lowering for GPUs: storage, weights, arguments and the coverage of row counts. Nothing is compiled."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from castiron.build.lower import Lowered, lower
from castiron.build.modules import starts_of
from castiron.build.weight_table import WeightPool
from castiron.engines.check import check_program
from castiron.engines.program import Kernel, Limits, ModuleColumns, Program
from castiron.engines.symbols import largest_counts
from castiron.engines.weights_file import CODES, TensorEntry
from castiron.graph.passes import PassContext, run_passes
from castiron.graph.weights import ModuleWeight, WeightGraph
from castiron.plugins.launch import TritonKernel
from castiron.plugins.targets import TARGETS

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from hand_built import llama

LIMITS = Limits(max_batch_size=4, max_num_tokens=300, max_logit_rows=16, max_seq_len=512)
GPUS = [name for name, target in TARGETS.items() if target.family == "cuda"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    model = llama(tmp_path_factory.mktemp("llama") / "w.bin", layers=2, bias=True)
    return run_passes(model, PassContext(LIMITS.max_seq_len))[0]


def lowered(graph: onnx.ModelProto, target: str = "sm_90", dtype: str = "bfloat16") -> Lowered:
    return lower(graph, target, LIMITS, dtype)


def with_kernels(one: Lowered) -> Program:
    """The program with kernels as if they were compiled."""
    from castiron.build.launches import param_types

    target = one.program.target
    kernels = []
    for number, request in enumerate(one.requests):
        entry = f"{target}/kernels/{number}"
        assert isinstance(request.kernel, TritonKernel)
        kernels.append(
            Kernel(
                name=f"{request.label}.{number}",
                function=request.label,
                image=entry,
                ptx=entry,
                threads=128,
                params=list(param_types(request.kernel)),
                types=list(request.kernel.types.values()),
                hidden_pointers=2,
            )
        )
    return one.program.model_copy(update={"kernels": kernels})


def check(one: Lowered) -> None:
    """As the reader does: among its checks are types of arguments against types of values and weights."""
    program = with_kernels(one)
    tensors = {
        name: TensorEntry(CODES[source.dtype][0], source.stored_shape, 0, source.nbytes)
        for name, source in one.sources.items()
    }
    check_program(program, tensors, [kernel.image for kernel in program.kernels])


@pytest.mark.parametrize("target", GPUS)
def test_the_reader_takes_what_lowering_makes(graph: onnx.ModelProto, target: str) -> None:
    check(lowered(graph, target))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_stored_in_half_where_only_matrix_units_read_them(
    graph: onnx.ModelProto, dtype: str
) -> None:
    half = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    program = lowered(graph, dtype=dtype).program
    dtypes = {value.name: value.dtype for value in program.values}
    for step in program.steps:
        read = dtypes[step.inputs[0]]
        if step.kernel in ("linear", "gated_linear", "rope_write_kv", "paged_attention"):
            assert read == half, step.kernel
        if step.kernel == "linear" and len(step.inputs) == 2:
            assert dtypes[step.inputs[1]] == dtypes[step.outputs[0]] == "f32", "the residual stream"
    assert dtypes["logits"] == "f32"
    assert {layer.dtype for layer in program.kv_layers} == {half}
    for value in program.values:
        if value.base is not None:
            assert value.dtype == dtypes[value.base]


def test_graph_inputs_take_no_place_in_the_arena(graph: onnx.ModelProto) -> None:
    def arena(inputs_only: bool) -> int:
        program = lowered(graph).program
        ends = [
            value.offset
            for value in program.values
            if (value.name in ("token_ids", "positions", "logit_rows")) == inputs_only
        ]
        return max(ends)

    assert arena(inputs_only=True) == 0
    assert arena(inputs_only=False) > 0


def test_every_row_count_is_served_by_exactly_one_product_of_each_step(graph: onnx.ModelProto) -> None:
    for target in GPUS:
        one = lowered(graph, target)
        most = largest_counts(LIMITS, one.program.vocab_size, one.program.prefill_tile)
        for step in one.program.steps:
            if step.kernel not in ("linear", "gated_linear"):
                continue
            products = [
                launch.when
                for launch in step.launches
                if one.requests[launch.kernel].label != "linear_reduce"
            ]
            symbol = next(when.of for when in products if when is not None)
            for count in range(1, most[symbol] + 1):
                serving = [when for when in products if when and when.low <= count <= when.high]
                assert len(serving) == 1, (target, step.outputs[0], symbol, count)


def test_alignment_follows_from_numbers(graph: onnx.ModelProto) -> None:
    """Keys start at column 32 of qkv, values at 48: 64 and 96 bytes, both multiples of 16."""
    one = lowered(graph)
    step = next(step for step in one.program.steps if step.kernel == "rope_write_kv")
    columns = [value.column for value in one.program.values if value.name in step.inputs and value.base]
    assert columns == [0, 32, 48]
    (launch,) = step.launches
    kernel = one.requests[launch.kernel].kernel
    assert isinstance(kernel, TritonKernel)
    pointers = {name for name, kind in kernel.types.items() if kind.startswith("*")}
    assert pointers <= kernel.aligned
    sizes = {name for name, arg in zip(kernel.types, launch.args, strict=True) if arg.size is not None}
    assert not sizes & kernel.aligned
    strides = {
        arg.i32: name in kernel.aligned
        for name, arg in zip(kernel.types, launch.args, strict=True)
        if arg.i32 is not None
    }
    assert strides
    assert strides == {number: number % 16 == 0 for number in strides}


def test_host_and_gpus_share_vectors_and_keep_their_own_matrices(graph: onnx.ModelProto) -> None:
    pool = WeightPool(WeightGraph(graph))
    host, first, second = (
        lower(graph, target, LIMITS, "bfloat16", pool=pool) for target in ("host", "sm_80", "sm_100")
    )
    assert first.sources == second.sources, "one form for all GPUs"
    layouts = {weight.name: weight.layout for weight in host.program.weights}
    for weight in first.program.weights:
        assert weight.layout == "plain"
        assert layouts.get(weight.name, "plain") == "plain", "a name means one form"
    shared = set(host.sources) & set(first.sources)
    assert {len(first.sources[name].shape) for name in shared if "table" not in name} == {1}
    assert all(first.sources[name] is host.sources[name] for name in shared)


def test_a_gated_matrix_is_all_rows_of_gate_then_all_rows_of_up(graph: onnx.ModelProto) -> None:
    one = lowered(graph)
    step = next(step for step in one.program.steps if step.kernel == "gated_linear")
    source = one.sources[step.weights[0]]
    stored = np.frombuffer(b"".join(bytes(chunk) for chunk in source.chunks()), ml_dtypes.bfloat16)
    weights = WeightGraph(graph)
    gate, up = (weights.value(name) for name in step.weights[0].split("|"))
    expected = np.concatenate([gate, up]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored[: expected.size].reshape(expected.shape), expected)


def test_equal_kernels_are_asked_for_once(graph: onnx.ModelProto) -> None:
    one = lowered(graph)
    launches = sum(len(step.launches) for step in one.program.steps)
    keys = {request.key for request in one.requests}
    assert len(keys) == len(one.requests) < launches


def test_sampling_runs_behind_the_steps_and_its_results_outlive_it(graph: onnx.ModelProto) -> None:
    program = lowered(graph).program
    assert program.sampling
    values = {value.name: value for value in program.values}
    last = [values[name] for name in ("logits", "sampled", "sample_top_ids", "sample_top_logprobs")]
    ends = sorted((value.offset, value.offset + 4 * 16 * int(value.shape[1])) for value in last)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_tokens_of_the_step_before_are_fed_ahead_of_the_steps(graph: onnx.ModelProto) -> None:
    program = lowered(graph).program
    (step,) = program.feeding
    assert (step.inputs, step.outputs) == (["sampled"], [])
    (launch,) = step.launches
    given = [arg.model_dump(exclude_none=True) for arg in launch.args]
    assert given == [{"input": "token_ids"}, {"input": "token_source"}, {"value": "sampled"}, {"size": "T"}]


def adapted(graph: onnx.ModelProto, target: str = "sm_90", rank: int = 32) -> Lowered:
    """With adapters for every matrix that the graph has in itself."""
    weights = WeightGraph(graph)
    matrices = [tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 2]
    modules = {name: ModuleWeight(name, weights.expr(name).shape[0]) for name in matrices}
    return lower(graph, target, LIMITS, "bfloat16", modules=modules, lora_rank=rank)


def test_adapters_change_no_launch_of_a_step_without_them(graph: onnx.ModelProto) -> None:
    plain, one = lowered(graph).program, adapted(graph).program
    for without, step in zip(plain.steps, one.steps, strict=True):
        assert (without.launches, without.inputs, without.outputs) == (
            *(step.launches, step.inputs, step.outputs),
        )
    assert plain.adapters is None
    assert not any(step.adapted or step.modules for step in plain.steps)


@pytest.mark.parametrize("target", GPUS)
def test_adapters_lie_apart_in_their_slot_and_every_product_has_them(
    graph: onnx.ModelProto, target: str
) -> None:
    one = adapted(graph, target)
    check(one)
    slots = one.program.adapters
    assert slots is not None
    assert slots.rank == 32
    widths = {value.name: value.shape[-1] for value in one.program.values}
    taken = []
    for step in one.program.steps:
        assert bool(step.adapted) == (step.kernel in ("linear", "gated_linear"))
        if step.adapter is None:
            continue
        columns = int(widths[step.outputs[0]]) * (2 if step.kernel == "gated_linear" else 1)
        assert sum(module.count for module in step.modules) == columns
        ranks = 32 * len({module.module for module in step.modules})
        assert step.adapter.inputs == widths[step.inputs[0]]
        taken += [(step.adapter.a, 2 * ranks * step.adapter.inputs), (step.adapter.b, 2 * 32 * columns)]
    taken.sort()
    assert all(at % 256 == 0 for at, _ in taken)
    assert all(at + size <= then for (at, size), (then, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] <= slots.slot_bytes


def test_modules_that_alternate_or_are_too_many_are_not_told_apart() -> None:
    def columns(*names: str) -> list[ModuleColumns]:
        return [ModuleColumns(module=n, column=8 * i, row=0, count=8) for i, n in enumerate(names)]

    assert starts_of(columns("q", "q", "k", "v")) == (0, 16, 24)
    assert starts_of(columns("q", "k", "q")) == ()
    assert starts_of(columns("q", "k", "v", "w")) == ()
    assert starts_of([]) == ()
