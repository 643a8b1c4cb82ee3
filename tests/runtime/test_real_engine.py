"""The C++ core under the Python runtime, on a tiny hand-made engine; numbers come from its float64 twin."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from server_calls import wait_until

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engines"))

from tiny import LIMITS, TOKENS, VOCAB, TinyModel, write_tiny_engine

from castiron.errors import EngineError, RequestError

pytest.importorskip("castiron.runtime._core", reason="the C++ runtime is not built")

from castiron.engines.kv_cache import kv_blocks

from castiron import ModelRunner

PROMPTS = [[5, 9, 2, 30], [7], list(range(20, 50)), [3] * 17, [11, 12]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def runner(engine):
    with ModelRunner.from_dir(engine, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def model():
    return TinyModel()


def greedy(model, prompt, count):
    """What the float64 model says; padded columns behind the tokenizer's vocabulary are never sampled."""
    used = TOKENS.vocab_size_used
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(tokens, [len(tokens) - 1])[0][:used].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_the_float64_model(runner, model):
    results = runner.generate(input_ids=PROMPTS, max_new_tokens=12, end_id=-1)
    assert [r.outputs[0].token_ids for r in results] == [greedy(model, p, 12) for p in PROMPTS]


def test_the_batch_a_prompt_is_in_does_not_change_its_tokens(runner):
    together = runner.generate(input_ids=PROMPTS, max_new_tokens=12, end_id=-1)
    alone = [runner.generate(input_ids=p, max_new_tokens=12, end_id=-1)[0] for p in PROMPTS]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def test_context_logits_are_those_of_the_float64_model(runner, model):
    ids = [5, 9, 2, 30, 7, 7, 41]
    # float32 against float64 over one layer with weights of size 1: a few units in the last place of ~10.
    np.testing.assert_allclose(runner.context_logits(ids), model.logits(ids, range(7)), atol=1e-4)


def test_prompt_logprobs_and_generation_logits_are_those_of_the_float64_model(runner, model):
    # As long as several chunks and, the second time, in the prefix cache.
    ids = [(7 * i + i * i) % TOKENS.vocab_size_used for i in range(90)]
    for _ in range(2):
        (result,) = runner.generate(
            input_ids=ids, max_new_tokens=3, end_id=-1, prompt_logprobs=2, return_generation_logits=True
        )
        rows = model.logits([*ids, *result.outputs[0].token_ids], range(len(ids) + 2))
        raw = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        assert result.prompt_logprobs[0] is None
        assert result.cached_tokens == 0
        for i, entry in enumerate(result.prompt_logprobs[1:], 1):
            assert entry.token_id == ids[i]
            # float32 against float64, as above.
            assert entry.logprob == pytest.approx(raw[i - 1, ids[i]], abs=1e-4)
            used = raw[i - 1, : TOKENS.vocab_size_used]
            assert [t for t, _ in entry.top] == list(np.argsort(-used)[:2])
        np.testing.assert_allclose(result.outputs[0].generation_logits, rows[len(ids) - 1 :], atol=1e-4)


@pytest.mark.parametrize("options", [{"n": 4}, {"n": 2, "best_of": 4}], ids=str)
def test_outputs_of_one_prompt_share_its_prefill(engine, options):
    ids = [(5 * i + i * i) % TOKENS.vocab_size_used for i in range(75)]
    with ModelRunner.from_dir(engine, num_threads=1) as runner:
        runner.generate(input_ids=ids, temperature=1.0, max_new_tokens=4, end_id=-1, **options)
        stats = runner.stats()
    # Two full blocks of 32 tokens for each of the three others; the rest is each one's own.
    assert stats["prefix_cached_tokens"] == 3 * 64
    assert stats["prompt_tokens"] == 75 + 3 * 11


def test_a_beam_search_runs_beside_others_and_can_be_cancelled(runner, model):
    alone = runner.generate(input_ids=[5, 9, 2], num_beams=3, max_new_tokens=12, end_id=-1, n=3)[0]
    assert [out.index for out in alone.outputs] == [0, 1, 2]
    scores = [out.score for out in alone.outputs]
    assert scores == sorted(scores, reverse=True)
    for out in alone.outputs:
        rows = model.logits([5, 9, 2, *out.token_ids], range(2, 14))
        raw = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        total = sum(raw[i, token] for i, token in enumerate(out.token_ids))
        assert out.cumulative_logprob == pytest.approx(total, abs=1e-3)
    stream = runner.generate(input_ids=PROMPTS, max_new_tokens=60, end_id=-1, streaming=True)
    next(stream)
    beside = runner.generate(input_ids=[5, 9, 2], num_beams=3, max_new_tokens=12, end_id=-1, n=3)[0]
    assert [out.token_ids for out in beside.outputs] == [out.token_ids for out in alone.outputs]
    stream.close()
    searching = runner.generate(
        input_ids=[[5, 9, 2], [7]], num_beams=3, max_new_tokens=80, end_id=-1, streaming=True
    )
    next(searching)  # one has ended
    searching.close()
    wait_until(lambda: runner.stats()["kv_blocks_used"] + runner.stats()["kv_blocks_promised"] == 0)


def test_logprobs_are_the_log_softmax_of_the_float64_model(runner, model):
    (out,) = runner.generate(input_ids=[5, 9], max_new_tokens=5, logprobs=3, end_id=-1)[0].outputs
    history = [5, 9]
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        row = model.logits(history, [len(history) - 1])[0].astype(np.float64)
        raw = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(raw[token], abs=1e-4)
        assert [t for t, _ in entry.top] == list(np.argsort(-raw)[:3])
        history.append(token)


def test_a_seed_repeats_and_seeds_differ(runner):
    def sample(seed):
        return (
            runner.generate([5, 9], max_new_tokens=20, temperature=2.0, seed=seed, end_id=-1)[0]
            .outputs[0]
            .token_ids
        )

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_stop_tokens_end_the_output_without_being_part_of_it(runner, model):
    expected = greedy(model, [5, 9, 2, 30], 12)
    stop = expected[5]
    (out,) = runner.generate([5, 9, 2, 30], max_new_tokens=12, end_id=stop)[0].outputs
    assert out.token_ids == expected[: expected.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_bad_prompts_fail_alone(runner, model):
    prompts = [[5, 9], [VOCAB], [1] * LIMITS.max_seq_len, [7]]
    results = runner.generate(input_ids=prompts, max_new_tokens=3, end_id=-1)
    assert [bool(r.error) for r in results] == [False, True, True, False]
    assert results[3].outputs[0].token_ids == greedy(model, [7], 3)


def test_more_requests_than_the_batch_holds_all_finish(runner, model):
    prompts = [[i % VOCAB, (3 * i) % VOCAB] for i in range(40)]
    results = runner.generate(input_ids=prompts, max_new_tokens=4, end_id=-1)
    assert [r.outputs[0].token_ids for r in results] == [greedy(model, p, 4) for p in prompts]


def test_cancelled_streams_give_their_blocks_back(runner):
    for _ in range(20):
        stream = runner.generate([5, 9], max_new_tokens=90, streaming=True, end_id=-1)
        next(stream)
        stream.close()
    end = time.monotonic() + 10
    while runner.session.unfinished or runner.stats()["kv_blocks_used"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_limits_may_be_lowered_but_not_raised(engine, model):
    with ModelRunner.from_dir(engine, max_batch_size=1, max_num_tokens=8, num_threads=1) as small:
        results = small.generate(input_ids=PROMPTS, max_new_tokens=6, end_id=-1)
        assert [r.outputs[0].token_ids for r in results] == [greedy(model, p, 6) for p in PROMPTS]
    with pytest.raises(EngineError, match="built for 4"):
        ModelRunner.from_dir(engine, max_batch_size=5)
    with pytest.raises(EngineError, match="rank"):
        ModelRunner.from_dir(engine, rank=1)


def test_the_kv_cache_can_be_given_in_bytes(engine):
    each = kv_blocks(TinyModel().program()).together
    assert each == 32 * 2 * (8 + 8) * 4  # tokens x KV heads x (K + V) x float32, one layer
    with ModelRunner.from_dir(engine, kv_cache_memory=each * 5 + 1, num_threads=1) as small:
        assert small.stats()["kv_blocks_total"] == 5
    with pytest.raises(EngineError, match="one of them"):
        ModelRunner.from_dir(engine, kv_cache_memory="1MiB", kv_cache_blocks=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"watchdog_timeout": "x"}, "watchdog_timeout is 'x'"),
        ({"watchdog_timeout": None}, "watchdog_timeout is None"),
        ({"watchdog_timeout": float("nan")}, "watchdog_timeout is nan"),
        ({"watchdog_timeout": True}, "watchdog_timeout is True"),
        ({"kv_cache_fraction": "half"}, "kv_cache_fraction is 'half'"),
        ({"kv_cache_disk_tier": "1GB"}, "give both or none"),
        ({"kv_cache_disk_tier": "1GB", "kv_cache_disk_folder": "/tmp"}, "what kv_cache_host_tier gives up"),
        ({"kv_cache_fraction": 0.5}, "runs on the CPU; give kv_cache_memory or kv_cache_blocks"),
        ({"kv_cache_fraction": 0.5, "kv_cache_blocks": 3}, "kv_cache_fraction and kv_cache_blocks both set"),
        ({"kv_cache_fraction": 0.5, "kv_cache_memory": "1GB"}, "kv_cache_memory both set"),
        ({"cuda_graphs": False}, "cuda_graphs is False, and this engine runs on the CPU"),
        ({"speculative_decoding": "draft", "draft_engine": 5}, "draft_engine is 5"),
    ],
)
def test_options_of_a_wrong_type_are_refused_with_what_was_expected(engine, options, says):
    with pytest.raises(EngineError, match=says):
        ModelRunner.from_dir(engine, num_threads=1, **options)


def test_more_threads_than_any_machine_has_are_refused(engine):
    with pytest.raises(EngineError, match="num_threads is 5000; expected at most 1024"):
        ModelRunner.from_dir(engine, num_threads=5000)


def test_no_engine_is_a_clear_error(tmp_path):
    with pytest.raises(EngineError, match="castiron build"):
        ModelRunner.from_dir(tmp_path)


def test_an_engine_without_tokenizer_refuses_text(runner):
    assert "without a tokenizer" in runner.generate(prompts="Hello")[0].error
    with pytest.raises(RequestError):
        _ = runner.tokenizer


def test_the_served_engine_drains_on_sigterm_and_exits_with_0(engine, model):
    command = [
        sys.executable,
        "-m",
        "castiron",
        "serve-engine",
        str(engine),
        "--port",
        "0",
        "--num-threads",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            shown = []
            for line in process.stdout:
                shown.append(line)
                if match := re.search(r"on (http://127\.0\.0\.1:\d+)/v1", line):
                    break
            else:
                pytest.fail(f"not started: {''.join(shown)} {process.stderr.read()}")
            assert "maximum concurrency for 96 tokens" in "".join(shown)
            body = {
                "prompt": [5, 9],
                "max_tokens": 5,
                "temperature": 0,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            answer = httpx.post(match[1] + "/v1/completions", json=body, timeout=30)
            assert answer.json()["choices"][0]["token_ids"] == greedy(model, [5, 9], 5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, process.stderr.read()
        finally:
            process.kill()


def test_running_an_engine_imports_nothing_that_it_does_not_need(engine):
    program = (
        "import sys; from castiron import ModelRunner\n"
        "with ModelRunner.from_dir(sys.argv[1]) as r: r.generate([5, 9], max_new_tokens=1)\n"
        "print(*[m for m in ('torch', 'numpy', 'onnx', 'fastapi', 'uvicorn', 'jinja2', 'rich', 'click',\n"
        "    'asyncio', 'castiron.graph', 'castiron.build', 'transformers', 'prometheus_client')\n"
        "    if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(engine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_bench_and_run_work_from_the_command_line(engine, model):
    def castiron(*args):
        command = [sys.executable, "-m", "castiron", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    out = castiron("run", engine, "--input-ids", "5,9", "--max-tokens", 4, "--ignore-eos", "--json")
    assert out["outputs"][0]["token_ids"] == greedy(model, [5, 9], 4)
    sizes = ("--input-len", 20, "--output-len", 8, "--num-iters", 2, "--json", "--num-threads", 1)
    latency = castiron("bench", "latency", engine, *sizes)
    assert {"ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s"} <= set(latency)
    throughput = castiron("bench", "throughput", engine, "--num-prompts", 6, *sizes)
    assert {"output_tokens_per_s", "request_throughput"} <= set(throughput)
