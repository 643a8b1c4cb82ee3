"""The progress of a build as rich bars, with the plan as tables."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .common import human_bytes, human_count, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from castiron.build.report import BuildPlan


class _MarkColumn(SpinnerColumn):
    """A spinner, at the end a tick; a cross where the phase failed."""

    def render(self, task: Task) -> RenderableType:
        return Text("✗", "red") if task.fields.get("failed") else super().render(task)


class RichProgress:
    """One line per phase: spinner or bar, then a tick; implements ``castiron.build.progress.Progress``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            _MarkColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._task is not None:
            self._bars.update(self._task, failed=True)
        self._bars.stop()

    def plan(self, plan: BuildPlan) -> None:
        """Print identity, limits and memory plan."""
        limits = plan.limits
        print_ = self._bars.console.print
        print_(
            f"[bold]{escape(plan.model)}[/] · {escape(plan.architecture)} · {human_count(plan.parameters)} "
            f"parameters · {escape(plan.precision)}"
        )
        print_(
            f"{limits.max_batch_size} requests of {limits.max_seq_len} tokens, {limits.max_num_tokens} "
            f"tokens and {limits.max_logit_rows} logit rows a step"
        )
        for target, memory in plan.memory.items():
            rows = table(f"Memory plan for {target}", "item", "size", "note", right=("size",))
            for item in memory.items:
                rows.add_row(escape(item.item), human_bytes(item.bytes), escape(item.note))
            print_(rows)
        print_(
            f"Engine on disk about {human_bytes(plan.disk_bytes)}; this build needs "
            f"{human_bytes(plan.peak_bytes)} of memory beyond its libraries"
        )

    def start(self, phase: str, total: int | None) -> None:
        """Tick off the phase before and show a new one."""
        self._finish()
        self._task = self._bars.add_task(escape(phase), total=total)

    def advance(self, amount: int) -> None:
        """Move the bar of the current phase."""
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def note(self, text: str) -> None:
        """Print a sentence above the bars."""
        self._bars.console.print(f"[yellow]note[/] {escape(text)}")

    def _finish(self) -> None:
        if self._task is not None:
            total = self._bars.tasks[self._bars.task_ids.index(self._task)].total or 1
            self._bars.update(self._task, total=total, completed=total)
            self._task = None
