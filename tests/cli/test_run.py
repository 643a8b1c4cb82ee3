"""castiron run and bench over the twin of the core: what is printed, and the exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

import make_tokenizer
from castiron.runtime import loading, model_runner
from castiron.runtime.tokenizer import Tokenizer
from fake_core import FakeCore, greedy, make_session

from castiron.cli import main


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command line; the engine's model answers ``say`` over and over, or the twin's own tokens."""

    def call(*args, say=None, tokenizer=True, input=None, **info):
        folder = make_tokenizer.byte_level(tmp_path / "tok") if tokenizer else None
        script = Tokenizer(folder).encode(say, False) if say else None
        cores = []

        def open_fake(engine_dir, rank=0, options=None):
            cores.append(FakeCore(script=script))
            return make_session(cores[-1], tokenizer_dir=folder, **info)

        monkeypatch.setattr(loading, "open_session", open_fake)
        monkeypatch.setattr(model_runner, "open_session", open_fake)
        result = CliRunner().invoke(main, [str(a) for a in args], input=input)
        result.core = cores[0] if cores else None
        return result

    return call


def test_text_goes_in_and_comes_out(run):
    result = run("run", "ENGINE", "--prompt", "x", "--stop", "!", say="Hi! ")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hi\n", "")


def test_json_has_the_keys_that_scripts_rely_on(run):
    result = run("run", "E", "--prompt", "x", "--prompt", "y", "--max_tokens", 2, "--json", "--logprobs", 1)
    data = json.loads(result.stdout)
    assert [o["index"] for o in data["outputs"]] == [0, 1]
    for output in data["outputs"]:
        assert output["finish_reason"] == "length"
        assert len(output["token_ids"]) == 2 == output["completion_tokens"] == len(output["logprobs"])
        assert isinstance(output["text"], str)
        assert output["prompt_tokens"] == 1
    assert data["timing"]["ttft_ms"] > 0
    assert data["timing"]["load_s"] >= 0


def test_token_ids_work_without_a_tokenizer(run):
    result = run("run", "E", "--input-ids", "1,2,3", "--max-tokens", 4, "--json", tokenizer=False)
    assert json.loads(result.stdout)["outputs"][0]["token_ids"] == greedy([1, 2, 3], 4)
    shown = run("run", "E", "--input-ids", "1 2 3", "--max-tokens", 4, tokenizer=False)
    assert shown.stdout.split() == [str(t) for t in greedy([1, 2, 3], 4)]


def test_stdin_is_the_prompt_when_none_is_given(run):
    result = run("run", "E", "--max-tokens", 1, "--json", input="a prompt")
    assert json.loads(result.stdout)["outputs"][0]["prompt_tokens"] == len(result.core.submitted[0][0])


def test_a_prompt_file_is_read(run, tmp_path):
    (tmp_path / "p.txt").write_text("from a file")
    assert run("run", "E", "--prompt-file", tmp_path / "p.txt", "--max-tokens", 1).exit_code == 0
    missing = run("run", "E", "--prompt-file", tmp_path / "none", "--max-tokens", 1)
    assert missing.exit_code == 1
    assert "cannot be read: No such file" in missing.stderr
    (tmp_path / "p.txt").write_bytes(b"ab\xff")
    for where, options in (("stdin", {"input": b"ab\xff"}), ("p.txt", {})):
        named = () if options else ("--prompt-file", tmp_path / "p.txt")
        wrong = run("run", "E", "--max-tokens", 1, *named, **options)
        assert wrong.exit_code == 1
        assert where in wrong.stderr
        assert "is no UTF-8: byte 2 is 0xff" in wrong.stderr


def test_chat_puts_the_prompt_into_the_template(run, tmp_path):
    result = run("run", "E", "--prompt", "Hello", "--chat", "--system", "Be brief.", "--max-tokens", 1)
    text = Tokenizer(tmp_path / "tok").decode(result.core.submitted[0][0], False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_streaming_prints_the_same_as_not_streaming(run):
    args = ("run", "E", "--prompt", "x", "--prompt", "y", "--max-tokens", 40)
    plain = run(*args, "--no-stream", say="naïve 🙂 日本")
    streamed = run(*args, "--stream", say="naïve 🙂 日本")
    assert plain.stdout == streamed.stdout
    assert "🙂" in plain.stdout


def test_sampling_options_reach_the_engine(run):
    result = run(
        "run", "E", "-p", "x", "--max-tokens", 1, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.8,
        "--min-p", 0.1,
        "--seed", 3, "--repetition-penalty", 1.2,
    )  # fmt: skip
    params = result.core.submitted[0][1]
    got = (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.repetition_penalty,
    )
    assert got == (0.5, 9, 0.8, 0.1, 3, 1.2)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ((), 0.0),
        (("--top-p", 0.9), 1.0),
        (("--top-k", 5, "--seed", 3), 1.0),
        (("--temperature", 0, "--seed", 3), 0.0),
        (("--temperature", 0.0, "--top-p", 0.9), 0.0),
    ],
)
def test_whoever_narrows_the_choice_gets_one(run, given, temperature):
    result = run("run", "E", "-p", "x", "--max-tokens", 1, *given)
    assert result.core.submitted[0][1].temperature == temperature


def test_a_stop_string_ends_the_text(run):
    assert run("run", "E", "-p", "x", "--stop", "two", say="one two three").stdout == "one \n"


def test_a_failed_prompt_is_reported_and_the_others_printed(run):
    result = run("run", "E", "--input-ids", "1", "--input-ids", "9999", "--max-tokens", 2, "--json")
    assert result.exit_code == 1
    outputs = json.loads(result.stdout)["outputs"]
    assert outputs[0]["token_ids"] == greedy([1], 2)
    assert "9999" in outputs[1]["error"]
    assert "prompt 1" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1", "-p", "x"], "temperature is -1"),
        (["--input-ids", "a,b"], "expected token ids"),
        (["--system", "s", "-p", "x"], "--chat"),
        (["--input-ids", "1", "-p", "x"], "exclude"),
        (["-p", "x", "--json", "--stream"], "exclude"),
        (["-p", "x", "--logprobs", "2"], "--json"),
        (["-p", "x", "--seed", "0"], "--seed would change nothing: without --temperature"),
        (["-p", "x", "--min-p", "0.1", "--seed", "3"], "--min-p and --seed would change nothing"),
    ],
)
def test_wrong_options_say_what_is_wrong(run, args, message):
    result = run("run", "E", *args)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_an_engine_that_is_none_is_an_error_line(tmp_path):
    result = CliRunner().invoke(main, ["run", str(tmp_path), "-p", "x"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
