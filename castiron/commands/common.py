"""What the commands share: arguments, JSON output, a console, units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

engine_argument = click.argument("engine", type=click.Path(), metavar="ENGINE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


class FiniteRange(click.FloatRange):
    """A range that "nan" is not in: click's lets it pass, because no comparison with it is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails for what is none, not finite, or out of the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number.", param, ctx)
        return number


def comma_lists(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of a repeatable option whose values may also be separated by commas."""
    return tuple(name.strip() for names in given for name in names.split(",") if name.strip())


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout, the only thing that a --json run prints there.

    Numbers that JSON lacks (infinity, not a number) become null.
    """
    click.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def console(*, stderr: bool = False) -> Console:
    """Return a rich console; imported here, so that commands that print plainly do not wait for rich."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextmanager
def progress_bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, so that stdout holds the result alone; yields what advances it."""
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; columns named in ``right`` hold numbers."""
    from rich import box

    from .titled_table import TitledTable

    made = TitledTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def printable(text: str) -> str:
    """Return ``text`` with whatever would steer a terminal replaced; engines come from anywhere."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def human_change(part: float) -> str:
    """Return a relative change as people read it: +1.25%; what rounds to zero is +0.00%."""
    shown = f"{part:+.2%}"
    return "+0.00%" if shown == "-0.00%" else shown


def human_bytes(count: int) -> str:
    """Return a size as people read it: 1.23 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def human_count(count: int) -> str:
    """Return a number of parameters as people say it: 135M."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return str(count)
