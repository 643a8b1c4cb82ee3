"""A table whose title may be wider than its columns."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table


class TitledTable(Table):
    """rich folds a title to the width of the table below it; this one has the width of the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title's line, then the table without one."""
        title, self.title = self.title, None
        try:
            if title:
                yield console.render_str(title, style="bold") if isinstance(title, str) else title
            yield from super().__rich_console__(console, options)
        finally:
            self.title = title
