"""``castiron bench serve``: load on an OpenAI-compatible server, and what its clients see of it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from castiron.errors import RequestError

from .common import FiniteRange, comma_lists, json_option, print_json, progress_bar
from .many_values import ManyValuesCommand, pairs

if TYPE_CHECKING:
    from castiron.runtime.serving_bench.benchmark import Benchmark
    from castiron.runtime.serving_bench.load import Measured
    from castiron.runtime.serving_bench.outcome import Outcome

_positive = click.IntRange(min=1)
_METRICS = ("ttft", "tpot", "itl", "e2el")


def _metric_names(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    names = comma_lists(context, option, given)
    if unknown := [name for name in names if name not in _METRICS]:
        raise click.BadParameter(f"{unknown[0]!r}; expected some of {', '.join(_METRICS)}")
    return names


def _percents(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(_number(text, 0, 100) for text in comma_lists(context, option, given))


def _limits(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    found = pairs(context, option, given, separator=":")
    if unknown := [name for name in found if name not in ("ttft", "tpot", "e2el")]:
        raise click.BadParameter(f"{unknown[0]!r}; expected ttft:MS, tpot:MS or e2el:MS")
    return {name: _number(value, 0, math.inf) for name, value in found.items()}


def _rate(_context: click.Context, _option: click.Parameter, given: str) -> float:
    rate = _number(given, 0, math.inf)
    if rate == 0:
        raise click.BadParameter("0; expected requests per second above 0, or inf")
    return rate


def _number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise click.BadParameter(f"{text!r}; expected a number from {low:g} to {high:g}")
    return value


def _json_object(_context: click.Context, _option: click.Parameter, given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError as error:
        raise click.BadParameter(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{given!r}; expected a JSON object")
    return found


@click.command(cls=ManyValuesCommand, short_help="Measure a server through its OpenAI-compatible API.")
@click.option("--base-url", default="http://127.0.0.1:8000", help="Scheme, host and port of the server.")
@click.option("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions.")
@click.option("--model", default="", show_default="the first of /v1/models", help="Name in the requests.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "shared-prefix", "multi-turn", "custom"]),
    default="random",
    help="random words; prompts with common beginnings; conversations whose turns build on the answers; a "
    "JSONL file.",
)
@click.option(
    "--dataset-path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='For custom: lines of {"prompt": "..."} or {"messages": [...]}, with "output_len" if they differ.',
)
@click.option("--input-len", type=_positive, default=128, help="New tokens of each request.")
@click.option("--output-len", type=_positive, default=128, help="Tokens of each answer at most.")
@click.option(
    "--random-range-ratio",
    type=FiniteRange(0, 1),
    default=0.0,
    help="Draw lengths from (1 - R) to (1 + R) times those.",
)
@click.option("--prefix-len", type=_positive, default=256, help="shared-prefix: tokens in common.")
@click.option("--num-prefixes", type=_positive, default=4, help="shared-prefix: different beginnings.")
@click.option("--num-turns", type=_positive, default=4, help="multi-turn: requests of a conversation.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with a tokenizer.json (an engine is one): prompts of exactly so many tokens. Without it a "
    "word counts as one; the result has the server's count.",
)
@click.option("--num-prompts", type=_positive, default=100, help="Measured requests.")
@click.option("--num-warmups", type=click.IntRange(min=0), default=0, help="Requests before them.")
@click.option(
    "--request-rate",
    default="inf",
    callback=_rate,
    metavar="RATE",
    help="Conversations that begin in a second; inf: all at once.",
)
@click.option(
    "--burstiness",
    type=FiniteRange(0, min_open=True),
    default=1.0,
    help="Of the times between them: 1 is a Poisson process, less has bursts, more is more even.",
)
@click.option(
    "--max-concurrency", type=_positive, show_default="no limit", help="Requests under way at once."
)
@click.option("--ignore-eos", is_flag=True, help="Have every answer made as long as --output-len says.")
@click.option("--extra-body", default="{}", callback=_json_object, help="JSON: more fields of every request.")
@click.option("--timeout", type=FiniteRange(0, min_open=True), default=3600.0, help="Seconds a request.")
@click.option(
    "--ready-check-timeout-sec", type=FiniteRange(0), default=0.0, help="Wait so long for the server."
)
@click.option(
    "--goodput",
    multiple=True,
    callback=_limits,
    metavar="METRIC:MS...",
    help="Count requests within all of these: ttft, tpot, e2el.",
)
@click.option(
    "--percentile-metrics",
    multiple=True,
    default=["ttft,tpot,itl,e2el"],
    callback=_metric_names,
    help="Latencies in the table.",
)
@click.option("--metric-percentiles", multiple=True, default=["99"], callback=_percents, help="0 to 100.")
@click.option("--seed", type=int, default=0, help="Of prompts and arrivals.")
@click.option("--save-result", is_flag=True, help="Write a JSON file.")
@click.option("--save-detailed", is_flag=True, help="The same, with values of each request.")
@click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), help="Its folder.")
@click.option("--result-filename", show_default="made of what was measured", help="Its name.")
@click.option(
    "--metadata",
    multiple=True,
    callback=functools.partial(pairs, separator="="),
    metavar="KEY=VALUE...",
    help="Kept in the result.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a .png, .svg or .pdf.")
@json_option
def serve(as_json: bool, **given: Any) -> None:
    """Send requests to an OpenAI-compatible server and measure what its clients see.

    TTFT is the time from sending a request to its first text, ITL the gap between one event with text and the
    next, TPOT the time from the first to the last text over the tokens after the first, E2EL the time to the
    end. A request that waits for --max-concurrency has not been sent yet.
    """
    import asyncio

    from castiron.runtime.serving_bench import plot, report, summary

    if given["plot"] is not None:
        plot.check_suffix(given["plot"])
        report.make_folder(given["plot"].parent)
    saves = given["save_result"] or given["save_detailed"]
    folder = given["result_dir"] or Path()
    if saves:
        report.make_folder(folder)
    benchmark = _benchmark(given)
    conversations = benchmark.conversations()
    name, measured = asyncio.run(
        benchmark.measure(conversations, lambda total: _progress(total, quiet=as_json))
    )
    percentiles = given["metric_percentiles"]
    figures = summary.summarize(measured, percentiles=percentiles, goodput=given["goodput"])
    result = {**benchmark.description(name), **given["metadata"], **figures}
    if as_json:
        print_json(result)
    else:
        click.echo(report.table(result, given["percentile_metrics"], percentiles))
    _tell_errors(measured)
    if saves:
        path = folder / (given["result_filename"] or report.file_name(result))
        report.save(path, {**result, **(summary.details(measured) if given["save_detailed"] else {})})
        click.echo(f"result: {path}", err=True)
    if not result["completed"]:
        raise RequestError("no request succeeded")
    if given["plot"] is not None:
        plot.save_plot(given["plot"], measured, f"{name}: {result['completed']} requests")
        click.echo(f"plot: {given['plot']}", err=True)


def _benchmark(given: dict[str, Any]) -> Benchmark:
    from castiron.runtime.serving_bench.benchmark import Benchmark
    from castiron.runtime.serving_bench.client import Target
    from castiron.runtime.serving_bench.datasets import Shape
    from castiron.runtime.serving_bench.load import Load

    sizes = ("num_prompts", "input_len", "output_len", "prefix_len", "num_prefixes", "num_turns")
    return Benchmark(
        target=Target(
            base_url=given["base_url"],
            endpoint=given["endpoint"],
            model=given["model"],
            headers={"Authorization": f"Bearer {given['api_key']}"} if given["api_key"] else {},
            extra_body={**({"ignore_eos": True} if given["ignore_eos"] else {}), **given["extra_body"]},
            timeout=given["timeout"],
        ),
        dataset=given["dataset_name"],
        shape=Shape(range_ratio=given["random_range_ratio"], **{name: given[name] for name in sizes}),
        load=Load(given["request_rate"], given["burstiness"], given["max_concurrency"]),
        dataset_path=given["dataset_path"],
        tokenizer=given["tokenizer"],
        num_warmups=given["num_warmups"],
        wait_seconds=given["ready_check_timeout_sec"],
        seed=given["seed"],
    )


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[Outcome], None]]:
    with progress_bar("requests", total, quiet=quiet) as advance:
        yield lambda _: advance()


def _tell_errors(measured: Measured) -> None:
    from castiron.runtime.serving_bench.summary import error_counts

    for message, count in error_counts(measured.outcomes):
        click.secho(f"{count} failed: {message}", fg="red", err=True)
