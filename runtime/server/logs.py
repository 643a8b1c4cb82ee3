"""What the server writes to stderr: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

from .request_context import current

LogFormat = Literal["text", "json"]


def configure_logging(level: str, style: LogFormat) -> None:
    """Send the log of this process to stderr.

    Records may have ``extra={"fields": {...}}``: names and values that follow the message. Records made while
    a request is answered get its ``request_id``. Texts of prompts and outputs are in none of them unless
    --log-prompts asks for it.

    Args:
        level: least level of castiron's own records; those of libraries are written from warning on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if style == "json" else _TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("castiron").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: dict[str, Any] = dict(getattr(record, "fields", {}))
    context = current.get()
    if context is not None:
        given.setdefault("request_id", context.id)
    return given


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [at, record.levelname, _one_line(record.getMessage())]
        parts += [f"{name}={_one_line(str(value))}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(text: str) -> str:
    """Without what would begin a line of its own or steer a terminal: some of it comes from clients."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
