"""``castiron run``: prompts in, text out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from castiron.errors import RequestError

from .common import engine_argument, json_option, print_json
from .runtime_options import runtime_options

if TYPE_CHECKING:
    from castiron.runtime.outputs import RequestOutput


@click.command(short_help="Generate text with an engine.")
@engine_argument
@click.option("--prompt", "-p", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompt-file", type=click.Path(dir_okay=False), help="A file with one prompt; - = stdin.")
@click.option("--input-ids", multiple=True, metavar="IDS", help='Token ids instead of text: "1,2,3".')
@click.option(
    "--chat", is_flag=True, help="Put each prompt into the engine's chat template as a user's message."
)
@click.option("--system", help="System message for --chat.")
@click.option("--max-tokens", type=int, show_default="128, or what fits", help="New tokens at most.")
@click.option(
    "--temperature",
    type=float,
    show_default="0, or 1 with --top-k or --top-p",
    help="Randomness; 0 = always the most likely token.",
)
@click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0 = off.")
@click.option("--top-p", type=float, default=1.0, help="Keep tokens up to this summed probability; 1 = off.")
@click.option(
    "--min-p", type=float, default=0.0, help="Drop tokens less likely than this times the best; 0 = off."
)
@click.option("--repetition-penalty", type=float, default=1.0, help="1 = off.")
@click.option("--seed", type=int, help="Seed of the random numbers.")
@click.option("--stop", multiple=True, help="A string that ends the text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's EOS token.")
@click.option("--lora", metavar="NAME", help="The adapter of --lora-modules to run with.")
@click.option("--logprobs", type=int, help="With --json: log-probabilities and this many alternatives.")
@click.option(
    "--stream/--no-stream", default=None, show_default="on a terminal", help="Print text as it comes."
)
@json_option
@runtime_options
def command(
    engine: str,
    prompt: tuple[str, ...],
    prompt_file: str | None,
    input_ids: tuple[str, ...],
    chat: bool,
    system: str | None,
    stream: bool | None,
    as_json: bool,
    runtime: dict[str, Any],
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Generate text with ENGINE for one or several prompts.

    Without --prompt, --prompt-file or --input-ids the prompt is read from stdin.
    """
    from castiron.runtime.generate_arguments import merged_params
    from castiron.runtime.model_runner import ModelRunner

    if system is not None and not chat:
        raise click.UsageError("--system is a part of the chat template; give --chat too")
    if input_ids and (chat or prompt or prompt_file):
        raise click.UsageError("--input-ids and text prompts exclude each other")
    if stream and as_json:
        raise click.UsageError("--stream and --json exclude each other: JSON is printed when all is done")
    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs are a part of the JSON; give --json too")
    given = {name: value for name, value in sampling.items() if value is not None} | {"stop": stop}
    made = merged_params(None, given)  # refuses bad values before the engine is loaded
    unread = [option for option, there in (("--min-p", made.min_p), ("--seed", "seed" in given)) if there]
    if unread and "temperature" not in given and made.temperature == 0:
        raise click.UsageError(
            f"{' and '.join(unread)} would change nothing: without --temperature, --top-k or --top-p the "
            "most likely token is taken; give one of them"
        )
    ids = [_parse_ids(text) for text in input_ids]
    texts = [] if ids else _texts(prompt, prompt_file)
    began = time.perf_counter()
    with ModelRunner.from_dir(engine, **runtime) as runner:
        load_seconds = time.perf_counter() - began
        if runner.device is not None and runner.device.gpu is not None:
            click.echo(f"device: {runner.device}", err=True)
        if chat:
            ids = [runner.tokenizer.encode_chat(_messages(text, system)) for text in texts]
        what: dict[str, Any] = {"input_ids": ids} if ids else {"prompts": texts}
        if stream is None:
            stream = sys.stdout.isatty() and not as_json
        began = time.perf_counter()
        if stream:
            results, first = _stream(runner.generate(**what, **given, streaming=True), len(ids or texts))
        else:
            results, first = _collect(runner.generate(**what, **given, streaming=True))
        seconds = time.perf_counter() - began
    if as_json:
        print_json(_as_json(results, load_seconds, first, seconds))
    elif not stream:
        _print_texts(results)
    _fail_if_any(results)


def _texts(prompts: tuple[str, ...], prompt_file: str | None) -> list[str]:
    texts = list(prompts)
    if prompt_file is not None and prompt_file != "-":
        try:
            texts.append(_decoded(Path(prompt_file).read_bytes(), f"--prompt-file {prompt_file}"))
        except OSError as e:
            raise RequestError(f"--prompt-file {prompt_file} cannot be read: {e.strerror or e}") from None
    elif prompt_file == "-" or not texts:
        texts.append(_decoded(sys.stdin.buffer.read(), "the prompt on stdin"))
    return texts


def _decoded(raw: bytes, what: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise RequestError(
            f"{what} is no UTF-8: byte {e.start} is 0x{raw[e.start]:02x}; convert it (iconv -t utf-8)"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as files of text are read


def _parse_ids(text: str) -> list[int]:
    from castiron.runtime.param_values import shown

    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f'--input-ids is {shown(text)}; expected token ids such as "1,2,3"') from None


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


def _collect(partials: Iterator[RequestOutput]) -> tuple[list[RequestOutput], float | None]:
    """All results, and the seconds to the first token."""
    began, first = time.perf_counter(), None
    results: dict[int, RequestOutput] = {}
    for result in partials:
        if first is None and result.error is None:
            first = time.perf_counter() - began
        results[result.index] = result
    return [results[i] for i in sorted(results)], first


def _stream(partials: Iterator[RequestOutput], count: int) -> tuple[list[RequestOutput], float | None]:
    """The same, printing text as it comes, one prompt after the other (they still run together)."""
    latest: dict[int, RequestOutput] = {}
    shown, current = 0, 0

    def watched() -> Iterator[RequestOutput]:
        nonlocal shown, current
        for result in partials:
            latest[result.index] = result
            while current in latest:
                text = _text(latest[current])
                if shown == 0 and count > 1:
                    click.echo(f"[{current}] ", nl=False)
                click.echo(text[shown:], nl=False)
                shown = len(text)
                if not latest[current].finished:
                    break
                click.echo()
                shown, current = 0, current + 1
            yield result

    return _collect(watched())


def _text(result: RequestOutput) -> str:
    """What to show of a result: its text, or the ids of an engine without a tokenizer."""
    out = result.outputs[0]
    return out.text or ("" if result.prompt is not None else " ".join(map(str, out.token_ids)))


def _print_texts(results: list[RequestOutput]) -> None:
    for result in results:
        if result.error is None:
            head = f"[{result.index}] " if len(results) > 1 else ""
            click.echo(head + _text(result))


def _fail_if_any(results: list[RequestOutput]) -> None:
    failed = [r for r in results if r.error is not None]
    if failed:
        which = "" if len(results) == 1 else f"prompt {failed[0].index}: "
        raise RequestError(f"{which}{failed[0].error}")


def _as_json(
    results: list[RequestOutput], load: float, first: float | None, seconds: float
) -> dict[str, Any]:
    outputs = []
    for result in results:
        out = result.outputs[0]
        entry: dict[str, Any] = {
            "index": result.index,
            "text": out.text,
            "token_ids": out.token_ids,
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(out.token_ids),
            "error": result.error,
        }
        if out.logprobs is not None:
            entry["logprobs"] = [
                {"token_id": x.token_id, "logprob": x.logprob, "top": [list(t) for t in x.top]}
                for x in out.logprobs
            ]
        outputs.append(entry)
    made = sum(len(r.outputs[0].token_ids) for r in results)
    return {
        "outputs": outputs,
        "timing": {
            "load_s": load,
            "ttft_ms": None if first is None else first * 1e3,
            "total_s": seconds,
            "output_tokens_per_s": made / seconds if seconds > 0 else None,
        },
    }
