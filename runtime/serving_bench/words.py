"""Prompts of a chosen length, made of random common words."""

from __future__ import annotations

import random
from collections.abc import Callable

#: Short everyday words: with the blank before it each is one token in nearly every vocabulary.
_WORDS = [
    "the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "was", "at", "by", "this",
    "from", "are", "have", "not", "but", "had", "his", "they", "she", "which", "you", "one", "we",
    "all", "there", "would", "their", "more", "when", "who", "will", "no", "if", "out", "so", "said",
    "what", "up", "its", "about", "into", "than", "them", "can", "only", "other", "new", "some", "time",
    "could", "these", "two", "may", "then", "do", "first", "any", "my", "now", "such", "like", "our",
    "over", "man", "me", "even", "most", "made", "after", "also", "did", "many", "before", "must",
    "through", "back", "years", "where", "much", "your", "way", "well", "down", "should", "because",
    "each", "just", "those", "people", "too", "good", "very", "make", "world", "still", "own", "see",
    "work", "long", "get", "here", "between", "both", "life", "being", "under", "never", "day", "same",
    "another", "know", "while", "last", "might", "us", "great", "old", "year", "off", "come", "since",
    "against", "go", "came", "right", "used", "take", "three", "states", "himself", "few", "house",
    "use", "during", "without", "again", "place", "around", "however", "home", "small", "found",
    "thought", "went", "say", "part", "once", "high", "upon", "school", "every", "water", "left",
    "night", "far", "head", "set", "end",
]  # fmt: skip


class PromptMaker:
    """Makes texts of a number of tokens.

    Args:
        rng: draws the words.
        count: tokens of a text; None takes a word for a token, and the server's count tells the truth later.
    """

    def __init__(self, rng: random.Random, count: Callable[[str], int] | None = None) -> None:
        self._rng = rng
        self._count = count

    def text(self, length: int) -> str:
        """About ``length`` tokens; exactly so many where a tokenizer counts and words can make them."""
        words = [self._rng.choice(_WORDS) for _ in range(length)]
        if self._count is None:
            return " ".join(words)
        # Vocabularies that split some of the words: come nearer from above, then word by word.
        while len(words) > 1 and (over := self._count(" ".join(words)) - length) > 0:
            del words[-max(1, over // 4) :]
        while self._count(longer := " ".join([*words, self._rng.choice(_WORDS)])) <= length:
            words.append(longer.rpartition(" ")[2])
        return " ".join(words)
