"""Quantized engines on the virtual device, against the reference evaluator of their own graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import onnx
import pytest
from castiron.build import BuildOptions, build
from castiron.calibration import QuantizationOptions
from castiron.graph import evaluate
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.fake_quant import fake_quantize
from castiron.runtime import ModelRunner
from tokenizers import Tokenizer, models, pre_tokenizers
from virtual_gpu import PROMPT, VirtualGpu, without_compiler
from virtual_process import in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

LIMITS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 24,
    "max_seq_len": 64,
    "max_logit_rows": 24,
    "verify": "never",
}
#: Root mean square over logits of size 0.6: bfloat16 activations (2⁻⁹ relative each) through two layers.
TOLERANCE = 0.015


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of whole words, since scales of the cache come from a text."""
    path = tmp_path_factory.mktemp("llama") / "model"
    make_checkpoint("llama", path)
    words = [f"w{index}" for index in range(256)]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(256), strict=True)), unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    text = np.random.default_rng(0).choice(words, 2000)
    (path.parent / "text.txt").write_text(" ".join(text))
    return path


def generate(engine: Path, cc: int) -> dict[str, Any]:
    """Logits of PROMPT, its greedy continuation, and the kernels that ran."""
    gpu = VirtualGpu(engine, cc)
    with ModelRunner.from_dir(engine, device="cuda", kv_cache_blocks=8) as runner:
        logits = runner.context_logits(PROMPT)
        result = runner.generate(input_ids=[PROMPT], max_new_tokens=3, ignore_eos=True)
    tokens = result[0].outputs[0].token_ids
    kernels = {name.split(".")[0] for name in gpu.interpreter.launches}
    return {"logits": logits, "tokens": tokens, "kernels": kernels, "faults": gpu.driver.faults()}


def rms(x: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt((x**2).mean()))


def reference(graph: onnx.ModelProto, tokens: list[int]) -> tuple[np.ndarray[Any, Any], float]:
    """Logits of the graph, and how far they move when each x is rounded to bfloat16 before its own rounding.

    A number near the middle of two codes then falls on the other side, which moves it by a whole step: with
    NVFP4 a quarter of its size.
    """
    exact = GraphEvaluator(graph).run(tokens)

    def from_bfloat16(x: Any, *how: Any, **more: Any) -> Any:
        return fake_quantize(np.asarray(x, ml_dtypes.bfloat16).astype(np.float32), *how, **more)

    with mock.patch.object(evaluate, "fake_quantize", from_bfloat16):
        moved = GraphEvaluator(graph).run(tokens)
    return np.asarray(exact), rms(moved - exact)


@pytest.mark.parametrize(
    ("recipe", "kv_cache", "cc"),
    [
        ("int4-wo", "fp8", 90),
        ("fp8", "auto", 80),
        ("nvfp4", "fp8", 100),
        ("int8-sq", "int8", 89),
        pytest.param("int8-wo", "auto", 80, marks=pytest.mark.sweep),
        pytest.param("fp8", "fp8", 90, marks=pytest.mark.sweep),
        pytest.param("fp8-block", "auto", 89, marks=pytest.mark.sweep),
        pytest.param("mxfp4", "auto", 90, marks=pytest.mark.sweep),
        pytest.param("w4a8-awq", "int8", 90, marks=pytest.mark.sweep),
        pytest.param("nvfp4", "auto", 90, marks=pytest.mark.sweep),
    ],
)
def test_logits_are_those_of_the_quantized_graph(
    model: Path, tmp_path: Path, recipe: str, kv_cache: Any, cc: int
) -> None:
    quantization = QuantizationOptions(
        recipe=recipe,
        kv_cache=kv_cache,
        calib_data=model.parent / "text.txt",
        calib_size=4,
        calib_seq_len=32,
        eval_tokens=0,
    )
    with without_compiler():
        options = BuildOptions(
            targets=(f"sm_{cc}",), dump_graph=tmp_path / "graph", quantization=quantization, **LIMITS
        )
        build(model, tmp_path / "engine", options)
    found = in_process(generate, tmp_path / "engine", cc, timeout=600)
    assert found["faults"] == []
    many = "scaled_tile" if (recipe, cc) == ("nvfp4", 100) else "quantized_tile"
    assert {"quantized_stream", many} <= found["kernels"]
    assert not any(name.startswith("linear_") for name in found["kernels"] - {"linear_reduce"})

    graph = onnx.load(sorted((tmp_path / "graph").glob("*.onnx"))[-1], load_external_data=False)
    expected, moved = reference(graph, PROMPT + found["tokens"])
    error = rms(found["logits"] - expected[: len(PROMPT)])
    assert error < TOLERANCE + 1.5 * moved, f"{error} where rounding of x alone gives {moved}"
    decoded = expected[len(PROMPT) - 1 : -1]
    short = decoded.max(axis=1) - decoded[np.arange(3), found["tokens"]]
    assert short.max() < 6 * (TOLERANCE + 1.5 * moved)  # the reference's best, or a tie of rounding with it
