"""The checkpoint's tokenizer as a build needs it: read once, and refused before the work begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.errors import CheckpointError, EngineError, RequestError

if TYPE_CHECKING:
    import tokenizers

    from ..graph.checkpoint import Checkpoint

#: A natural text for the golden outputs: plain prose, so that every tokenizer has words for it.
GOLDEN_TEXT = (
    "Iron has been cast for more than two thousand years. The founder makes a mould of damp sand, melts "
    "the metal in a furnace, and pours it in one steady stream. When the casting is cold the mould is "
    "broken, and what was liquid an hour ago will hold its shape for a century. A good casting needs no "
    "apology: it is made once, for one purpose, and then it simply works. In 1779 the first large bridge "
    "of cast iron was built over a river in England; it carries people to this day. Water boils at 100 "
    "degrees, iron melts at 1538, and a patient worker learns to judge both by eye. "
    "def area(width, height):\n    return width * height\n"
    "A pattern is cut from pine, a little larger than the part, because iron shrinks by about one percent as "
    "it cools. Two half boxes of sand are rammed around it, parted, and closed again over the hollow that it "
    "leaves. Wer Eisen gießt, braucht Geduld. Le fer fondu coule comme de l'eau. El molde se rompe una sola "
    "vez. The foreman asked: 'Is the ladle hot?' - 'Since six this morning,' said the boy, and stepped back. "
    "| metal | melts at |\n| tin | 232 |\n| zinc | 420 |\n| copper | 1085 |\n"
    "for part in castings:\n    if part.weight > limit:\n        part.reject('too heavy')\n"
    "Grey iron is strong when it is pressed and weak when it is pulled, so a bridge of it stands in arches, "
    "each stone-like piece leaning on the next. Steel ended that age within thirty years, yet pumps, stoves, "
    "engine blocks and the covers of drains are still poured as they were, one after the other, from the "
    "same furnace, by people who know by the colour of the stream when it is time.\n"
)


@dataclass(frozen=True)
class SourceTokenizer:
    """``size``: one more than the largest id, None where there is none; ``golden_ids``: the golden text."""

    size: int | None
    golden_ids: list[int]


def read_tokenizer(checkpoint: Checkpoint) -> SourceTokenizer | None:
    """The tokenizer of a checkpoint; None where the folder has none.

    Raises CheckpointError where it or its chat template is damaged, or where it writes the golden text in ids
    that the model lacks. Ids beyond the vocabulary that this text has not, such as added tokens, are let be.
    """
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        return None
    backend = _backend(file)
    ids = list(backend.encode(GOLDEN_TEXT).ids)
    largest, size = max(ids, default=-1), checkpoint.config.get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise CheckpointError(
            f"{file}: writes a text with the token id {largest}, but config.json sets vocab_size to {size}. "
            f"It belongs to another model: download the model's, or remove it"
        )
    _check_chat_templates(checkpoint.folder, backend)
    known = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return SourceTokenizer(known or None, ids)


def _backend(file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(
            f"{file}: cannot be read as a tokenizer: {error}. Download it again."
        ) from error


def _check_chat_templates(folder: Path, backend: tokenizers.Tokenizer) -> None:
    from ..runtime.tokenizer import Tokenizer

    try:
        for template in Tokenizer(folder, backend).chat_templates.values():
            template.check()
    except (EngineError, RequestError) as error:
        raise CheckpointError(
            f"{folder}: {error}. The files beside tokenizer.json are damaged: download them again, or remove "
            f"chat_template.jinja to build without a chat template"
        ) from error
