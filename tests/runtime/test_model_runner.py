"""ModelRunner over the fake core, whose tokens are computed apart."""

from __future__ import annotations

import threading

import fake_core
import make_tokenizer
import numpy as np
import pytest
from castiron.runtime.loading import parse_bytes
from castiron.runtime.model_runner import ModelRunner
from castiron.runtime.request_errors import ParameterError
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.structured_output import StructuredOutput
from castiron.runtime.tokenizer import Tokenizer
from fake_core import FOR_EVER, FakeCore, greedy, make_session
from server_calls import wait_until

from castiron.errors import EngineError, RequestError


@pytest.fixture
def tokenizer_dir(tmp_path):
    return make_tokenizer.byte_level(tmp_path / "tok")


@pytest.fixture
def runner():
    with ModelRunner(make_session()) as made:
        yield made


def scripted(tokenizer_dir, text, **info):
    """A runner whose model says ``text`` over and over."""
    ids = Tokenizer(tokenizer_dir).encode(text, add_special_tokens=False)
    core = FakeCore(script=ids)
    return ModelRunner(make_session(core, tokenizer_dir=tokenizer_dir, **info)), ids, core


def test_the_first_grammar_needs_no_file_of_the_engine_any_more(tokenizer_dir):
    runner, _, _ = scripted(tokenizer_dir, "ab", eos_token_ids=(0,))
    with runner:
        assert runner.tokenizer.encode("ab")
        (tokenizer_dir / "tokenizer.json").unlink()
        form = StructuredOutput(regex="(ab)+")
        assert runner.session._matcher(SamplingParams(structured_output=form)) is not None


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("1.5g", 1.5e9), ("500MB", 5e8), ("2 GiB", 2**31), ("1TB", 1e12), ("3TiB", 3 * 2**40)],
)
def test_sizes_are_read_with_the_units_of_disks_too(text, size):
    assert parse_bytes("kv_cache_memory", text) == size


def test_the_call_that_tensorrt_llm_users_know_works_as_it_stands(runner):
    (result,) = runner.generate(input_ids=[1, 2, 3], max_new_tokens=128, temperature=0.7, top_p=0.9)
    assert len(result.outputs[0].token_ids) == 128
    assert result.outputs[0].finish_reason == "length"
    assert result.prompt_token_ids == [1, 2, 3]
    assert result.error is None


def test_every_prompt_of_a_batch_gets_what_it_gets_alone(runner):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8], [9] * 20]
    results = runner.generate(input_ids=prompts, max_new_tokens=10)
    assert [r.outputs[0].token_ids for r in results] == [greedy(p, 10) for p in prompts]
    assert [r.index for r in results] == [0, 1, 2, 3]


class Tensor:
    """Looks like a torch tensor as far as the runner may look."""

    def __init__(self, data):
        self.data = data

    def tolist(self):
        return self.data


@pytest.mark.parametrize(
    "input_ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        [[1, 2, 3]],
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]], dtype=np.uint16),
        [np.array([1, 2, 3])],
        [np.int64(1), np.int64(2), np.int64(3)],
        [np.array(1), np.array(2), np.array(3)],
        Tensor([1, 2, 3]),
        [Tensor([1, 2, 3])],
    ],
)
def test_prompts_come_as_lists_arrays_or_tensors(runner, input_ids):
    (result,) = runner.generate(input_ids=input_ids, max_new_tokens=4)
    assert result.outputs[0].token_ids == greedy([1, 2, 3], 4)


def test_one_bad_prompt_never_fails_its_batch(runner):
    prompts = [[1, 2], [], [5, 300], [7] * 254, [299, 1], [8], [1.5], "text"]
    results = runner.generate(input_ids=prompts, max_new_tokens=5)
    good = [0, 5]
    assert [r.outputs[0].token_ids for r in results if r.index in good] == [
        greedy(prompts[i], 5) for i in good
    ]
    for result in results:
        if result.index not in good:
            assert result.error
            assert result.outputs[0].finish_reason == "error"
    assert "a prompt is empty; expected at least one token" in results[1].error
    assert "token id 300; expected ids from 0 to 299" in results[2].error
    assert (
        "maximum context length is 256 tokens, but 259 were requested (254 in the prompt" in results[3].error
    )
    assert "299 is refused" in results[4].error


def test_bad_parameters_fail_the_call_before_anything_runs(runner):
    with pytest.raises(RequestError, match="temperature is -1"):
        runner.generate(input_ids=[1], temperature=-1)
    with pytest.raises(RequestError, match="no option 'num_heads'"):
        runner.generate(input_ids=[1], num_heads=4)
    with pytest.raises(RequestError, match="neither"):
        runner.generate(max_new_tokens=1)
    with pytest.raises(RequestError, match="both"):
        runner.generate(input_ids=[1], prompts="x")
    with pytest.raises(RequestError, match="same as max_tokens"):
        runner.generate(input_ids=[1], max_tokens=1, max_new_tokens=2)
    with pytest.raises(RequestError, match="of type dict; expected SamplingParams"):
        runner.generate(input_ids=[1], sampling_params={"temperature": 1})
    for prompts in (5, b"text", {"a": 1}, {"a": "text"}, {"text"}):
        with pytest.raises(RequestError, match="prompts is of type"):
            runner.generate(prompts=prompts)
    assert runner.session.core.submitted == []


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"num_beams": 0}, "num_beams is 0; expected an integer from 1", "num_beams"),
        ({"num_beams": True}, "num_beams is True; expected an integer", "num_beams"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_beams is 2; expected num_return_sequences (3) or more",
            "num_beams",
        ),
        ({"num_beams": 2, "min_p": 0.5}, "min_p is 0.5; expected 0 with num_beams, which", "min_p"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; expected", "max_new_tokens"),
        (
            {"max_new_tokens": 3, "min_tokens": 4},
            "min_tokens is 4; expected at most max_new_tokens (3)",
            "min_tokens",
        ),
        ({"random_seed": "x"}, "random_seed is 'x'; expected an integer", "random_seed"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0; expected", "num_return_sequences"),
        ({"end_id": "x"}, "end_id is 'x'; expected an integer", "end_id"),
        ({"end_id": -2}, "end_id is -2; expected an integer from -1", "end_id"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; expected a string or a list", "stop"),
        ({"stop": "a\ud800"}, "stop has a lone surrogate", "stop"),
        ({"bad_words": ["\udfff"]}, "bad_words has a lone surrogate", "bad_words"),
        (
            {"stop_token_ids": {3: 1}},
            "stop_token_ids is {3: 1}; expected a list of token ids",
            "stop_token_ids",
        ),
        ({"stop_token_ids": b"ab"}, "stop_token_ids is b'ab'; expected a list", "stop_token_ids"),
    ],
)
def test_a_refusal_names_the_parameter_that_was_given(runner, options, message, param):
    with pytest.raises(ParameterError) as refusal:
        runner.generate(input_ids=[1], **options)
    assert message in str(refusal.value)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "form", [{"regex": "\ud800"}, {"choice": ("a", "\ud800")}, {"grammar": 'start: "\ud800"'}]
)
def test_a_form_with_half_of_a_surrogate_pair_is_refused(form):
    with pytest.raises(ParameterError, match="has a lone surrogate"):
        StructuredOutput(**form)


def test_a_prompt_that_is_no_unicode_text_fails_alone(tokenizer_dir):
    runner, _, _ = scripted(tokenizer_dir, "ab")
    with runner:
        bad, good = runner.generate(prompts=["\ud800", "x"], max_new_tokens=1)
    assert bad.error.startswith(r"prompt has a lone surrogate ('\ud800') at character 0; expected Unicode")
    assert good.error is None


def test_an_engine_without_tokenizer_gives_ids_and_refuses_text(runner):
    (result,) = runner.generate(prompts="Hello")
    assert "without a tokenizer" in result.error
    assert runner.generate(input_ids=[1], max_new_tokens=2)[0].outputs[0].text == ""
    assert "need a tokenizer" in runner.generate(input_ids=[1], stop="x")[0].error


@pytest.mark.parametrize(
    ("ids", "text"),
    [([1, 2**70], "more than 64 bits"), ([-(10**5000)], "64 bits"), ([1, 10**6], "id 1000000")],
)
def test_ids_that_no_vocabulary_has_are_named(runner, ids, text):
    (result,) = runner.generate(input_ids=ids, max_new_tokens=1)
    assert text in result.error


class Unreadable:
    """A tensor without numbers: torch's of the meta device and sparse ones raise such errors."""

    ndim = 1

    def __len__(self):
        return 3

    def tolist(self):
        raise RuntimeError("Cannot copy out of meta tensor; no data!\nat a place in C++")


def test_what_has_no_ids_to_read_is_refused_in_our_words(runner):
    for prompt in (Unreadable(), [Unreadable()]):
        (result,) = runner.generate(input_ids=prompt, max_new_tokens=1)
        assert "of type Unreadable and its numbers cannot be read (Cannot copy" in result.error
        assert "at a place" not in result.error
    for raw in (b"\1\2", bytearray(b"\1\2"), memoryview(b"\1\2")):  # bytes, however they come
        with pytest.raises(RequestError, match=f"input_ids is of type {type(raw).__name__}; expected a list"):
            runner.generate(input_ids=raw, max_new_tokens=1)
        (result,) = runner.generate(input_ids=[raw], max_new_tokens=1)
        assert f"a prompt is of type {type(raw).__name__}; expected a list" in result.error


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(runner):
    class Long(Unreadable):
        def __len__(self):
            return 3_000_000

    (result,) = runner.generate(input_ids=Long(), max_new_tokens=1)
    assert "context length is 256 tokens, but 3000001 were requested" in result.error


def test_an_empty_batch_has_no_results(runner):
    assert runner.generate(input_ids=[[]])[0].error
    assert runner.generate(prompts=[]) == []


def test_max_tokens_none_fills_the_engine(runner):
    (result,) = runner.generate(input_ids=[1] * 200, sampling_params=SamplingParams(max_tokens=None))
    assert len(result.outputs[0].token_ids) == 56


def test_each_prompt_may_have_sampling_params_of_its_own(runner):
    lengths = [3, 1, 2]
    results = runner.generate(
        input_ids=[[1], [2], [3]],
        sampling_params=[SamplingParams(max_tokens=n, ignore_eos=True, n=n) for n in lengths],
        temperature=1.0,
    )
    assert [len(r.outputs) for r in results] == lengths
    assert [len(r.outputs[0].token_ids) for r in results] == lengths
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts; give one for all, or one for"):
        runner.generate(input_ids=[[1], [2], [3]], sampling_params=[SamplingParams()] * 2)
    with pytest.raises(RequestError, match="of type dict; expected SamplingParams"):
        runner.generate(input_ids=[[1]], sampling_params=[{"temperature": 1}])


def test_options_override_sampling_params(runner):
    base = SamplingParams(max_tokens=50, temperature=0.5, top_p=0.3)
    runner.generate([1], None, base, max_new_tokens=3, random_seed=7)
    params = runner.session.core.submitted[-1][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.3, 7)


def test_decoding_is_greedy_unless_something_asks_for_sampling(runner):
    def temperature(**options):
        runner.generate([1], max_new_tokens=1, **options)
        return runner.session.core.submitted[-1][1].temperature

    assert temperature() == 0
    assert temperature(top_k=1) == 0
    assert temperature(top_p=0.9) == 1.0
    assert temperature(top_k=50) == 1.0
    assert temperature(top_p=0.9, temperature=0) == 0


def test_several_outputs_of_one_prompt(runner):
    (result,) = runner.generate([1, 2], temperature=2.0, seed=3, num_return_sequences=3, max_new_tokens=8)
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in result.outputs}) == 3
    again = runner.generate([1, 2], temperature=2.0, seed=3, n=3, max_new_tokens=8)[0]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


def test_eos_and_stop_tokens_end_the_output(tmp_path):
    expected = greedy([1, 2], 20)
    eos, other = expected[7], expected[4]
    cut = expected.index(eos)
    with ModelRunner(make_session(eos_token_ids=(eos,))) as runner:
        (out,) = runner.generate([1, 2], max_new_tokens=20)[0].outputs
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (expected[:cut], "stop", None)
        (out,) = runner.generate([1, 2], max_new_tokens=20, stop_token_ids=[other])[0].outputs
        assert (out.token_ids, out.stop_reason) == (expected[: expected.index(other)], other)
        (out,) = runner.generate([1, 2], max_new_tokens=20, ignore_eos=True)[0].outputs
        assert out.token_ids == expected
        (out,) = runner.generate([1, 2], max_new_tokens=20, end_id=-1)[0].outputs
        assert out.token_ids == expected
        (out,) = runner.generate([1, 2], max_new_tokens=20, end_id=other)[0].outputs
        assert out.token_ids == expected[: expected.index(other)]


def test_streaming_gives_growing_results_that_end_with_the_whole(runner):
    prompts = [[1, 2, 3], [4, 5]]
    last, seen = {}, {0: [], 1: []}
    for partial in runner.generate(input_ids=prompts, max_new_tokens=6, streaming=True):
        seen[partial.index] += partial.outputs[0].token_ids_diff
        assert partial.outputs[0].token_ids == seen[partial.index]
        last[partial.index] = partial
    assert [last[i].outputs[0].token_ids for i in (0, 1)] == [greedy(p, 6) for p in prompts]
    assert all(r.finished for r in last.values())


def test_leaving_a_stream_early_cancels_the_request():
    with ModelRunner(make_session(FakeCore(step_seconds=0.001), max_seq_len=2 * FOR_EVER)) as runner:
        stream = runner.generate([1], max_new_tokens=FOR_EVER, streaming=True)
        next(stream)
        stream.close()
        wait_until(lambda: runner.session.unfinished == 0, 5)
        assert runner.session.core.cancelled


def test_text_streams_as_the_whole_decodes(tokenizer_dir):
    runner, ids, _ = scripted(tokenizer_dir, "naïve 🙂 日本")
    with runner:
        pieces = [
            p.outputs[0].text_diff
            for p in runner.generate(prompts="x", max_new_tokens=len(ids), streaming=True)
        ]
        assert "".join(pieces) == "naïve 🙂 日本"
        (result,) = runner.generate(prompts="x", max_new_tokens=len(ids))
        assert result.outputs[0].text == "naïve 🙂 日本"
        assert result.prompt == "x"


def test_a_stop_string_over_token_borders_cuts_text_and_frees_the_request(tokenizer_dir):
    runner, ids, _ = scripted(tokenizer_dir, "one two, three four")
    with runner:
        (out,) = runner.generate(prompts="x", stop=["three", ", t"], max_new_tokens=100)[0].outputs
        assert (out.text, out.finish_reason, out.stop_reason) == ("one two", "stop", ", t")
        assert out.token_ids == ids[: len(out.token_ids)]
        wait_until(lambda: runner.session.unfinished == 0, 5)
        (out,) = runner.generate(
            prompts="x", stop="two", include_stop_str_in_output=True, max_new_tokens=100
        )[0].outputs
        assert out.text == "one two"
        (out,) = runner.generate(prompts="x", stop="one", min_tokens=len(ids), max_new_tokens=100)[0].outputs
        assert out.text == "one two, three four"


def test_logits_of_the_output_come_with_a_stop_string_too(tokenizer_dir):
    runner, ids, core = scripted(tokenizer_dir, "one two, three four")
    with runner:
        options = {"stop": "three", "max_new_tokens": 100, "return_generation_logits": True}
        (result,) = runner.generate(prompts="x", **options)
        out, prompt = result.outputs[0], result.prompt_token_ids
        assert (out.text, out.finish_reason, out.stop_reason) == ("one two, ", "stop", "three")
        assert out.generation_logits.shape == (len(out.token_ids), core.vocab)
        for i, row in enumerate(out.generation_logits):
            np.testing.assert_array_equal(row, fake_core.logits([*prompt, *ids[:i]], core.vocab))
        *_, last = runner.generate(prompts="x", streaming=True, **options)
        assert last.outputs[0].generation_logits.shape == out.generation_logits.shape


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(tokenizer_dir):
    runner, ids, _ = scripted(tokenizer_dir, "one two thr")
    with runner:
        (out,) = runner.generate(prompts="x", stop="three", max_new_tokens=len(ids))[0].outputs
        assert (out.text, out.finish_reason) == ("one two thr", "length")


def test_special_tokens_are_left_out_unless_asked_for(tokenizer_dir):
    runner, ids, _ = scripted(tokenizer_dir, "a<|im_end|>b")
    with runner:
        assert runner.generate(prompts="x", max_new_tokens=len(ids))[0].outputs[0].text == "ab"
        (out,) = runner.generate(prompts="x", max_new_tokens=len(ids), skip_special_tokens=False)[0].outputs
        assert out.text == "a<|im_end|>b"


def test_the_stop_tokens_text_is_included_only_on_demand(tokenizer_dir):
    end = Tokenizer(tokenizer_dir).backend.token_to_id("<|im_end|>")
    runner, _, _ = scripted(tokenizer_dir, "ab<|im_end|>c", eos_token_ids=(end,))
    with runner:
        options = {"max_new_tokens": 9, "skip_special_tokens": False}
        assert runner.generate(prompts="x", **options)[0].outputs[0].text == "ab"
        (out,) = runner.generate(prompts="x", include_stop_str_in_output=True, **options)[0].outputs
        assert out.text == "ab<|im_end|>"


def test_logprobs_are_the_raw_log_softmax(runner):
    (out,) = runner.generate([1, 2], logprobs=3, max_new_tokens=4)[0].outputs
    history = [1, 2]
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        raw = fake_core.log_softmax(fake_core.logits(history))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(raw[token], abs=1e-9)
        assert [t for t, _ in entry.top] == list(np.argsort(-raw)[:3])
        history.append(token)
    assert out.cumulative_logprob == pytest.approx(sum(e.logprob for e in out.logprobs))


def test_context_logits_has_a_row_for_every_position(runner):
    rows = runner.context_logits([5, 6, 7])
    assert rows.shape == (3, fake_core.VOCAB)
    np.testing.assert_array_equal(rows[1], fake_core.logits([5, 6]))
    assert runner.context_logits([1] * 256).shape[0] == 256
    with pytest.raises(RequestError, match="maximum context length"):
        runner.context_logits([1] * 257)


def test_prompt_logprobs_come_once_whatever_n_is(runner):
    prompt = [5, 9, 7, 200]
    for options in ({"max_new_tokens": 0}, {"max_new_tokens": 3, "n": 2}):
        (result,) = runner.generate(prompt, prompt_logprobs=2, **options)
        assert result.prompt_logprobs[0] is None
        for i in range(1, 4):
            raw = fake_core.log_softmax(fake_core.logits(prompt[:i]))
            entry = result.prompt_logprobs[i]
            assert entry.token_id == prompt[i]
            assert entry.logprob == pytest.approx(raw[prompt[i]], abs=1e-9)
            assert [t for t, _ in entry.top] == list(np.argsort(-raw)[:2])
    assert runner.generate([5], prompt_logprobs=0)[0].prompt_logprobs == [None]
    *_, last = runner.generate(prompt, prompt_logprobs=0, max_new_tokens=4, streaming=True)
    assert len(last.prompt_logprobs) == 4


def test_logits_of_prompt_and_output_come_on_request(runner):
    (result,) = runner.generate(
        [5, 9], max_new_tokens=3, n=2, return_context_logits=True, return_generation_logits=True
    )
    np.testing.assert_array_equal(result.context_logits[1], fake_core.logits([5, 9]))
    for out in result.outputs:
        assert out.generation_logits.shape == (3, fake_core.VOCAB)
        np.testing.assert_array_equal(out.generation_logits[2], fake_core.logits([5, 9, *out.token_ids[:2]]))


def test_best_of_returns_the_likeliest_of_all_outputs_best_first(runner):
    options = {"temperature": 1.5, "seed": 3, "max_new_tokens": 6}
    all_of_them = runner.generate([1, 2], n=8, logprobs=0, **options)[0].outputs
    wanted = sorted(all_of_them, key=lambda out: -sum(e.logprob for e in out.logprobs))[:3]
    (result,) = runner.generate([1, 2], n=3, best_of=8, prompt_logprobs=0, **options)
    assert [out.token_ids for out in result.outputs] == [out.token_ids for out in wanted]
    for out, other in zip(result.outputs, wanted, strict=True):
        assert out.cumulative_logprob == pytest.approx(sum(e.logprob for e in other.logprobs))
        assert (out.text, out.finish_reason, out.logprobs) == (other.text, "length", None)
    assert [out.index for out in result.outputs] == [0, 1, 2]
    assert len(result.prompt_logprobs) == 2
    streamed = list(runner.generate([1, 2], n=3, best_of=8, streaming=True, **options))
    assert [out.token_ids for out in streamed[-1].outputs] == [out.token_ids for out in wanted]


def test_a_failure_of_one_of_best_of_ends_the_prompt_with_its_message():
    core = FakeCore()
    with ModelRunner(make_session(core)) as runner:
        results = []
        iterator = runner.generate([1], temperature=1.0, best_of=3, max_new_tokens=200, streaming=True)
        reading = threading.Thread(target=lambda: results.extend(iterator))
        with core.held():
            reading.start()
            wait_until(lambda: len(core.submitted) == 3)
            core.cancel(2)
        reading.join()
    (result,) = results
    assert result.outputs[0].finish_reason == "cancelled"
    assert set(core.cancelled) == {1, 2, 3}


def test_chat_goes_through_the_template(tokenizer_dir):
    runner, _, core = scripted(tokenizer_dir, "Hi!")
    with runner:
        (result,) = runner.chat([{"role": "user", "content": "Hello"}], max_new_tokens=3)
        expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert runner.tokenizer.decode(core.submitted[-1][0], False) == expected
        assert result.outputs[0].text.startswith("Hi!"[: len(result.outputs[0].text)])
        with pytest.raises(RequestError, match="messages is of type NoneType"):
            runner.chat(None)


def test_calls_from_several_threads_share_the_batch(runner):
    results = {}

    def call(i):
        results[i] = runner.generate([i + 1], max_new_tokens=20)[0].outputs[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: greedy([i + 1], 20) for i in range(8)}


def test_a_dying_engine_ends_requests_with_an_error_and_refuses_new_ones():
    core = FakeCore(step_seconds=0.002)
    with ModelRunner(make_session(core, max_seq_len=2 * FOR_EVER)) as runner:
        stream = runner.generate([1], max_new_tokens=FOR_EVER, streaming=True)
        next(stream)
        core.fail_with = RuntimeError("kernel fault")
        last = list(stream)[-1]
        assert "kernel fault" in last.error
        assert last.outputs[0].finish_reason == "error"
        with pytest.raises(EngineError, match="kernel fault"):
            runner.generate([1])


def test_a_closed_runner_says_so():
    runner = ModelRunner(make_session())
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.generate([1])
