"""LoRA adapters on engines of tiny models: the logits and tokens of the model with merged weights."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build, builder
from castiron.calibration import QuantizationOptions
from castiron.engines import open_engine
from castiron.runtime import ModelRunner, SamplingParams
from castiron.runtime.outputs import Update

from castiron.errors import RequestError

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from peft_adapters import merge, module_sizes, write_adapter
from zoo import logits_of, make_checkpoint, round_to_int8, source_model

pytestmark = pytest.mark.skipif(not builder._has_core(), reason="the C++ runtime is not built here")
OPTIONS = BuildOptions(
    dtype="float32", max_batch_size=6, max_num_tokens=24, max_seq_len=96, max_logit_rows=24, verify="never"
)
#: float32 against float32 in another order of summation, logits of size one to ten.
TOLERANCE = 1e-4
LENGTHS = (1, 9, 33, 45)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]


#: A tied output projection; q, k and v with biases; GPT-2's Conv1D; one matrix for gate and up; heads of q, k
#: and v interleaved; a gate of another activation and capped logits; experts, which adapters leave alone.
@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "gpt2", "phi3", "gpt_neox", "gemma2", "qwen3_moe"])
def test_an_adapter_of_every_module_equals_merged_weights(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "model")
    build(tmp_path / "model", tmp_path / "engine", OPTIONS)
    source = source_model(tmp_path / "model")
    plain = logits_of(source, prompts()[2])
    pairs = write_adapter(tmp_path / "adapter", module_sizes(source), rank=5, use_rslora=True)
    merge(source, pairs, 10 / np.sqrt(5))
    with ModelRunner.from_dir(tmp_path / "engine", lora_modules={"a": str(tmp_path / "adapter")}) as runner:
        results = runner.generate(input_ids=prompts(), max_new_tokens=8, ignore_eos=True, lora="a")
        for prompt, result in zip(prompts(), results, strict=True):
            tokens = result.outputs[0].token_ids
            wanted = logits_of(source, prompt + tokens)
            found = runner.context_logits(prompt + tokens, lora="a")
            assert np.abs(found - wanted).max() <= TOLERANCE
            # Decoded with the adapter as well: each token is the merged model's best, or a tie of rounding.
            answer = wanted[len(prompt) - 1 : -1]
            assert (answer.max(axis=1) - answer[np.arange(8), tokens]).max() <= 2 * TOLERANCE
        assert np.abs(runner.context_logits(prompts()[2]) - plain).max() <= TOLERANCE
        assert np.abs(logits_of(source, prompts()[2]) - plain).max() > 100 * TOLERANCE  # it does something


def quantized(folder: Path, recipe: str) -> Path:
    """An engine of the folder's model whose activations are not rounded."""
    wanted = QuantizationOptions(recipe=recipe, calib_size=2, calib_seq_len=32, eval_tokens=0)
    build(folder / "model", folder / "engine", replace(OPTIONS, quantization=wanted))
    program = open_engine(folder / "engine").program("host")
    assert any(step.kernel == "quantized_gated_linear" for step in program.steps)
    return folder / "engine"


def test_a_quantized_engine_adds_to_its_own_weights(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    round_to_int8(tmp_path / "model")
    engine = quantized(tmp_path, "int8-wo")
    source = source_model(tmp_path / "model")
    pairs = write_adapter(tmp_path / "adapter", module_sizes(source), rank=7, dtype=torch.bfloat16)
    merge(source, pairs, 2.0)
    tokens = prompts()[3]
    with ModelRunner.from_dir(engine, lora_modules={"a": str(tmp_path / "adapter")}) as runner:
        found = runner.context_logits(tokens, lora="a")
    assert np.abs(found - logits_of(source, tokens)).max() <= TOLERANCE


def test_modules_whose_inputs_smoothquant_scaled_take_no_adapter(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_checkpoint("llama", tmp_path / "model")
    engine = quantized(tmp_path, "int8-sq")
    program = open_engine(engine).program("host")
    taken = {one.module.rpartition(".")[2] for step in program.steps for one in step.modules}
    assert taken == {"o_proj", "down_proj", "lm_head"}
    write_adapter(tmp_path / "adapter", {"model.layers.1.mlp.up_proj": (64, 128)})
    with (
        ModelRunner.from_dir(engine, enable_lora=True) as runner,
        pytest.raises(RequestError, match=r"model\.layers\.1\.mlp\.up_proj.*down_proj"),
    ):
        runner.load_lora("a", tmp_path / "adapter")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """An engine of bfloat16 weights that rounds activations nowhere, and three adapters."""
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder / "model")
    build(folder / "model", folder / "engine", replace(OPTIONS, dtype="bfloat16"))
    sizes = module_sizes(source_model(folder / "model"))
    some = {path: size for path, size in sizes.items() if "self_attn" in path or "gate" in path}
    write_adapter(folder / "a", sizes, rank=8, seed=1)
    write_adapter(folder / "b", some, rank=3, seed=2)
    write_adapter(
        folder / "c", {k: v for k, v in sizes.items() if "down" in k or "lm_head" in k}, rank=16, seed=3
    )
    return folder / "engine", {name: str(folder / name) for name in "abc"}


def run_together(
    runner: ModelRunner, jobs: list[tuple[list[int], str | None]]
) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and log-probabilities of requests that run at once, each with its adapter."""
    updates: list[list[Update]] = [[] for _ in jobs]
    done = threading.Barrier(2)
    left = len(jobs)

    def sink(update: Update, mine: list[Update]) -> None:
        nonlocal left
        mine.append(update)
        left -= update.finish_reason is not None
        if not left:
            done.wait()

    for (prompt, lora), mine in zip(jobs, updates, strict=True):
        params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3, detokenize=False, lora=lora)
        runner.session.submit(prompt, params, partial(sink, mine=mine))
    done.wait(60)
    results = []
    for mine in updates:
        assert [update.error for update in mine if update.error] == []
        entries = [entry for update in mine for entry in update.logprobs]
        numbers = [[e.logprob, *(p for _, p in e.top)] for e in entries]
        results.append(([e.token_id for e in entries], np.array(numbers, np.float32)))
    return results


def test_requests_of_several_adapters_share_steps_and_change_no_bit_of_each_other(llama) -> None:
    engine, adapters = llama
    jobs = [(prompt, lora) for prompt in prompts()[1:] for lora in ("a", None, "b", "c")]
    with ModelRunner.from_dir(engine, lora_modules=adapters, enable_prefix_caching=False) as runner:
        alone = [run_together(runner, [job])[0] for job in jobs]
        together = run_together(runner, jobs)
        stats = runner.stats()
    for (tokens, numbers), (wanted, expected) in zip(together, alone, strict=True):
        assert tokens == wanted
        np.testing.assert_array_equal(numbers, expected)
    assert len({tuple(tokens) for tokens, _ in alone[:4]}) == 4  # the adapters matter
    assert stats["lora_adapters"] == 3
    assert stats["lora_bytes"] > 0


def test_cached_prefixes_belong_to_one_adapter(llama) -> None:
    engine, adapters = llama
    prompt = prompts()[3] + prompts()[2]
    with ModelRunner.from_dir(engine, lora_modules=adapters) as runner:
        cached, texts = {}, {}
        for name in ("a", None, "b", "a", None):
            (result,) = runner.generate(input_ids=prompt, max_new_tokens=6, ignore_eos=True, lora=name)
            cached.setdefault(name, []).append(result.cached_tokens)
            texts.setdefault(name, []).append(result.outputs[0].token_ids)
    assert cached["a"][0] == cached["b"][0] == cached[None][0] == 0
    assert cached["a"][1] >= 64
    assert cached[None][1] >= 64
    assert texts["a"][0] == texts["a"][1]
    assert texts[None][0] == texts[None][1]


def test_more_adapters_than_run_at_once_wait_for_each_other(llama) -> None:
    engine, adapters = llama
    jobs = [(prompt, lora) for lora in ("a", "b", "c", "a", None, "c") for prompt in prompts()[1:3]]
    with ModelRunner.from_dir(engine, lora_modules=adapters) as runner:
        wanted = run_together(runner, jobs)
    with ModelRunner.from_dir(engine, lora_modules=adapters, max_loras=1, max_cpu_loras=3) as runner:
        found = run_together(runner, jobs)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
