"""The engine's tokenizer: text to ids and back, with the checkpoint's own rules for special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.errors import EngineError, RequestError

from .chat_template import ChatTemplate, Message
from .detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from .param_values import check_unicode

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes prompts and conversations, and makes detokenizers. Safe to use from several threads.

    Args:
        folder: holds tokenizer.json and, where the checkpoint had them, tokenizer_config.json,
            special_tokens_map.json and chat_template.jinja.
        backend: what tokenizer.json holds, where somebody has read it.

    Raises:
        EngineError: tokenizer.json is missing or damaged.
    """

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer | None = None) -> None:
        self.folder = folder
        self.backend: tokenizers.Tokenizer = backend or _read_backend(folder / "tokenizer.json")
        self.config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(self.config, _read_json(folder / "special_tokens_map.json"))
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_ids_by_text = {added[i].content: i for i in self.special_ids}
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self._bytes: dict[int, bytes] = {}
        self._visible_bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with special tokens (BOS) as the checkpoint says, unless told otherwise.

        The post-processor in tokenizer.json decides about BOS, as in transformers 5, which ignores
        ``add_bos_token`` beside it. A text that already starts with the BOS token gets no second one.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt is of type {type(text).__name__}; expected text")
        try:
            # Batches alone let other threads run meanwhile, and fast ones keep no offsets, half of the work.
            (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
        except Exception as e:  # tokenizers raises bare Exception
            check_unicode("prompt", text)
            raise RequestError(f"the prompt cannot be tokenized: {e}") from None
        if (
            len(ids) > 1
            and ids[0] == ids[1] == self.bos_id
            and text.startswith(self.special_tokens["bos_token"])
        ):
            del ids[0]
        return ids

    def encode_chat(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """Token ids of a conversation; ``options`` as for ``ChatTemplate.render``.

        Raises:
            RequestError: no chat template, or it refuses the conversation.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The prompt text of a conversation; the template writes BOS itself where the model wants it."""
        templates = self.chat_templates
        name = "tool_use" if options.get("tools") and "tool_use" in templates else "default"
        if name not in templates:
            raise RequestError(
                "this engine has no chat template: its checkpoint came without one; send a plain prompt to "
                "/v1/completions (or run without --chat), or add chat_template.jinja to the engine folder"
            )
        return templates[name].render(messages, **options)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, shown: Sequence[int] = ()
    ) -> Detokenizer:
        """A detokenizer for the text that continues a prompt; ``shown`` are special tokens not to skip."""
        skip = self.special_ids.difference(shown) if skip_special_tokens else frozenset[int]()
        if self._byte_level:
            if skip == self.special_ids:
                return ByteLevelDetokenizer(self._visible_token_bytes)
            return ByteLevelDetokenizer(lambda token: b"" if token in skip else self.token_bytes(token))
        return WindowDetokenizer(lambda ids: self.decode(ids, False), prompt_ids, skip)

    def token_text(self, token: int) -> str:
        """One token as text, special tokens included (U+FFFD where it is part of a character)."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text; empty for an id outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    @cached_property
    def chat_templates(self) -> dict[str, ChatTemplate]:
        """Chat templates by name; the usual one is called ``default``."""
        sources: dict[str, str] = {}
        configured = self.config.get("chat_template")
        if isinstance(configured, str):
            sources["default"] = configured
        elif isinstance(configured, list):
            sources.update({t["name"]: t["template"] for t in configured if isinstance(t, dict)})
        for path in sorted(self.folder.glob("additional_chat_templates/*.jinja")):
            sources[path.stem] = path.read_text("utf-8")
        if (path := self.folder / "chat_template.jinja").is_file():
            sources["default"] = path.read_text("utf-8")
        return {name: ChatTemplate(source, self.special_tokens) for name, source in sources.items()}

    @cached_property
    def _byte_level(self) -> bool:
        import tokenizers.decoders

        return isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel)

    def _visible_token_bytes(self, token: int) -> bytes:
        found = self._visible_bytes.get(token)
        if found is None:
            found = b"" if token in self.special_ids else self.token_bytes(token)
            self._visible_bytes[token] = found
        return found

    def _find_bytes(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            if any(c not in _BYTE_OF_CHAR for c in text):
                return str(text).encode("utf-8")
            return bytes(_BYTE_OF_CHAR[c] for c in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        # Decoders strip the first token's leading space; decoding it behind itself shows what it adds.
        once, twice = self.decode([token], False), self.decode([token, token], False)
        return (twice[len(once) :] if twice.startswith(once) else once).encode("utf-8")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's table: printable Latin-1 stands for itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as e:  # tokenizers raises bare Exception
        raise EngineError(
            f"{path} cannot be read as a tokenizer: {e}; copy it again from the checkpoint or rebuild "
            "the engine"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise EngineError(f"{path} is not valid JSON: {e}; copy it again from the checkpoint") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name in _NAMED:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found
