"""Chat templates: Jinja from a checkpoint, so untrusted code, rendered in a sandbox as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from castiron.errors import RequestError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
#: Text that no template contains or changes; marks where a message that is to be continued ends.
_CONTINUE_MARK = "CASTIRON-CONTINUES-HERE "
_LOOPS_OVER_CONTENT = re.compile(r"for\s+\w+\s+in\s+\w+\s*(\[\s*['\"]content['\"]\s*\]|\.content)")
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: Jinja text.
        special_tokens: ``bos_token`` and the like, which templates write into the prompt.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: ``{"role": ..., "content": str | [{"type": "text", "text": ...}] | None, ...}``.
            tools: JSON schemas of functions, given to the template.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: leave the last message open instead, for the model to go on with.
            variables: further variables for the template (``chat_template_kwargs``).

        Raises:
            RequestError: the template refuses the conversation or fails on it.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; one message can be "
                "continued or a "
                "new one begun, so set one of them to false"
            )
        if not isinstance(messages, Iterable):
            raise RequestError(
                f"messages is of type {type(messages).__name__}; expected a list of objects with a role and "
                "a content"
            )
        chat = [self._plain(m) for m in messages]
        if not chat:
            raise RequestError("the conversation is empty; expected at least one message")
        if continue_final_message:
            if not isinstance(chat[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text content to continue"
                )
            chat[-1]["content"] += _CONTINUE_MARK
        from jinja2 import TemplateError

        try:
            text = self._compiled.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": chat,
                    "tools": [dict(t) for t in tools] if tools else None,
                    "documents": variables.get("documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as e:
            raise RequestError(f"the chat template refused the conversation: {e}") from None
        except Exception as e:  # the template is foreign code and may fail in any way
            raise RequestError(
                f"the chat template failed on this conversation: {type(e).__name__}: {e}"
            ) from None
        if not continue_final_message:
            return text
        at = text.rfind(_CONTINUE_MARK.strip())
        if at < 0:
            raise RequestError(
                "the chat template does not write the last message's text, so it cannot be continued"
            )
        # A template that trims messages has eaten the mark's last blank: then the text before it was meant
        # trimmed.
        trimmed = text[at : at + len(_CONTINUE_MARK)] != _CONTINUE_MARK
        return text[:at].rstrip() if trimmed else text[:at]

    def check(self) -> None:
        """Raises RequestError where the source is no Jinja."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            # {% generation %} marks what transformers trains on; it writes nothing of its own.
            return _environment().from_string(_GENERATION_TAG.sub("", self.source))
        except jinja2.TemplateError as e:
            raise RequestError(f"the chat template is not valid Jinja: {e}; send a plain prompt") from None

    @cached_property
    def _wants_parts(self) -> bool:
        return _LOOPS_OVER_CONTENT.search(self.source) is not None

    def _plain(self, message: Message) -> dict[str, Any]:
        """A copy that the template may read; text parts are joined unless the template walks over parts."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"a message is {str(message)[:80]!r}; expected an object with a role and a content"
            )
        plain = {k: v for k, v in message.items() if v is not None or k == "content"}
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_text_of_part(part) for part in content]
            plain["content"] = (
                [{"type": "text", "text": t} for t in texts] if self._wants_parts else "\n".join(texts)
            )
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"a message's content is {str(content)[:80]!r}; expected text or a list of text parts"
            )
        return plain


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, Mapping)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") in _TEXT_PARTS
    ):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in _TEXT_PARTS:
        raise RequestError(f"a message holds a part of type {kind!r} that has no text 'text'")
    raise RequestError(f"a message holds a part of type {kind!r}; this engine takes text parts only")


_TEXT_PARTS = ("text", "input_text", "output_text")


def _environment() -> jinja2.Environment:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters, which a prompt must not.
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
