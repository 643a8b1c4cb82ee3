"""One result of the GPU check: what every script of this folder prints and ``run_checks.py`` collects."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

_MARK = "RESULT "
#: Characters of a note in the table; the JSON has it whole.
_NOTE = 160


@dataclass(frozen=True)
class Row:
    """A check or a figure.

    Attributes:
        section: the part of the report. name: what was checked or measured.
        passed: of a check; None for a figure.
        value, unit: the figure.
        roof: the bound that the figure is compared with, in words. share: figure over bound, 1 = reached.
        note: what is wrong, or conditions.
    """

    section: str
    name: str
    passed: bool | None = None
    value: float | None = None
    unit: str = ""
    roof: str = ""
    share: float | None = None
    note: str = ""

    def emit(self) -> None:
        """Print the row for the collector, at once: what follows may be killed by its time limit."""
        print(_MARK + json.dumps(asdict(self)), flush=True)


def parse_rows(output: str) -> list[Row]:
    """The rows in a script's output; a line that was cut off is left out."""
    rows = []
    for line in output.splitlines():
        if line.startswith(_MARK):
            try:
                fields: dict[str, Any] = json.loads(line[len(_MARK) :])
            except ValueError:
                continue
            rows.append(Row(**fields))
    return rows


def format_table(rows: list[Row]) -> str:
    """The rows as text, a heading for each section."""
    lines = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", section, "-" * len(section)]
        verdict = {True: "ok", False: "FAILED", None: ""}[row.passed]
        figure = "" if row.value is None else f"{row.value:,.4g} {row.unit}"
        share = "" if row.share is None else f"{row.share:.0%} of {row.roof}"
        note = " ".join(row.note.split())[:_NOTE]
        lines.append(f"{row.name[:60]:60} {verdict:6} {figure:>18}  {share:26} {note}".rstrip())
    return "\n".join(lines)
