"""Chat templates: Jinja from a checkpoint, so untrusted code, rendered in a sandbox as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from castiron.errors import RequestError

from .param_values import shown
from .request_errors import ParameterError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
#: Of messages that have a text, always: only a model may say nothing but calls.
_ROLES_WITH_CONTENT = ("system", "developer", "user", "tool")
_USUAL_ROLES = (*_ROLES_WITH_CONTENT, "assistant")
#: Text that no template contains or changes, put into a message to see whether the template reads it.
_PROBE = "7183920465"
#: Text that no template contains or changes; marks where a message that is to be continued ends.
_CONTINUE_MARK = "CASTIRON-CONTINUES-HERE "
_LOOPS_OVER_CONTENT = re.compile(r"for\s+\w+\s+in\s+\w+\s*(\[\s*['\"]content['\"]\s*\]|\.content)")
_ASKS_FOR_NONE = re.compile(r"(?<!_)content['\"\]]{0,2}\s*(is\s+(not\s+)?|[!=]=\s*)none\b")
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
        if tools is not None and not (
            isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise ParameterError(f"tools is {shown(tools)}; expected a list of JSON schemas", param="tools")
        if "messages" in variables:
            raise ParameterError(
                "messages is also a variable of the template; give it once", param="messages"
            )
        chat = [self._plain(i, m) for i, m in enumerate(messages)]
        if not chat:
            raise RequestError("the conversation is empty; expected at least one message")
        given = {
            **self._special_tokens,
            **variables,
            "tools": [dict(t) for t in tools] if tools else None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            text = self._render(chat, given)
            self._require_all_read(chat, given, text)
            return text
        last = chat[-1].get("content")
        if not isinstance(last, str):
            raise RequestError("continue_final_message needs a last message with text content to continue")
        text = self._render([*chat[:-1], {**chat[-1], "content": last + _CONTINUE_MARK}], given)
        at = text.rfind(_CONTINUE_MARK.strip())
        if at < 0:
            raise RequestError(
                "the chat template does not write the last message's text, so it cannot be continued"
            )
        # A template that trims messages has eaten the mark's last blank: then the text before it was meant
        # trimmed.
        trimmed = text[at : at + len(_CONTINUE_MARK)] != _CONTINUE_MARK
        text = text[:at].rstrip() if trimmed else text[:at]
        self._require_all_read(chat, given, text)
        return text

    def _render(self, chat: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self._compiled.render({**given, "messages": chat})
        except TemplateError as e:
            raise RequestError(f"the chat template refused the conversation: {e}") from None
        except Exception as e:  # the template is foreign code and may fail in any way
            raise RequestError(
                f"the chat template failed on this conversation: {type(e).__name__}: {e}"
            ) from None

    def _require_all_read(self, chat: list[dict[str, Any]], given: Mapping[str, Any], text: str) -> None:
        """Raise ParameterError for a message that the template left out of ``text``: many do so, without a
        word, with roles that they do not know, and the model would answer as if it had not been sent.

        What a message with calls says besides is the template's business.
        """
        doubtful = [i for i, message in enumerate(chat) if _may_be_unread(message, text)]
        if len(doubtful) > 1:  # one rendering instead of many: what is read then is read
            doubtful = self._unread(doubtful, chat, given)
        for i in doubtful:
            if self._unread([i], chat, given):
                raise ParameterError(
                    f"messages[{i}] has the role {chat[i]['role'][:80]!r}, and the model's chat template "
                    "leaves such a message out of the prompt; expected a role that it writes, such as "
                    "user or assistant",
                    param="messages",
                )

    def _unread(
        self, places: Sequence[int], chat: list[dict[str, Any]], given: Mapping[str, Any]
    ) -> list[int]:
        """Those of some messages of which more text would not get into the prompt."""
        probes = {i: f"{_PROBE}{i:06}" for i in places}
        changed = list(chat)
        for i, probe in probes.items():
            content = chat[i]["content"]
            part = {"type": "text", "text": probe}
            longer = [*content, part] if isinstance(content, list) else (content or "") + probe
            changed[i] = {**chat[i], "content": longer}
        try:
            text = self._render(changed, given)
        except RequestError:  # it has looked at one of them
            return [] if len(places) == 1 else list(places)
        return [i for i, probe in probes.items() if probe not in text]

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
    def _asks_for_none(self) -> bool:
        return _ASKS_FOR_NONE.search(self.source) is not None

    @cached_property
    def _wants_parts(self) -> bool:
        return _LOOPS_OVER_CONTENT.search(self.source) is not None

    def _plain(self, i: int, message: Message) -> dict[str, Any]:
        """A copy that the template may read; text parts are joined unless the template walks over parts."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"a message is {str(message)[:80]!r}; expected an object with a role and a content"
            )
        plain = {k: v for k, v in message.items() if v is not None or k == "content"}
        content = message.get("content")
        if content is None and message["role"] in _ROLES_WITH_CONTENT:
            raise ParameterError(
                f"messages[{i}] of the role {message['role']!r} has no content; expected text or a list of "
                "text parts",
                param="messages",
            )
        if content is None:
            # Templates that do not look for it join text to it.
            plain["content"] = None if self._asks_for_none else ""
        elif isinstance(content, (list, tuple)):
            texts = [_text_of_part(part) for part in content]
            plain["content"] = (
                [{"type": "text", "text": t} for t in texts] if self._wants_parts else "\n".join(texts)
            )
        elif not isinstance(content, str):
            raise RequestError(
                f"a message's content is {str(content)[:80]!r}; expected text or a list of text parts"
            )
        return plain


def _may_be_unread(message: Mapping[str, Any], text: str) -> bool:
    """Whether a look at the prompt does not show that a message is in it. Nothing always is."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    usual = message["role"] in _USUAL_ROLES and all(part["text"].strip() in text for part in parts)
    return not usual and not message.get("tool_calls")


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
