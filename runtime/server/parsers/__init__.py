"""Reading tool calls and reasoning out of what models write: a parser for each style, and their registry."""

from __future__ import annotations

from .deltas import CallArguments, CallBroken, CallStart, Content, Delta, Message, Reasoning
from .registry import REASONING_STYLES, TOOL_STYLES, AnswerStyle, find_style

__all__ = [
    "REASONING_STYLES",
    "TOOL_STYLES",
    "AnswerStyle",
    "CallArguments",
    "CallBroken",
    "CallStart",
    "Content",
    "Delta",
    "Message",
    "Reasoning",
    "find_style",
]
