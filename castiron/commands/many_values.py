"""Options that take all words up to the next option: ``--goodput ttft:200 tpot:50``."""

from __future__ import annotations

from typing import Any

import click


class ManyValuesCommand(click.Command):
    """A command without arguments, whose repeatable options may be given several values at once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give each value its option's name before click reads them."""
        repeatable = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        spread: list[str] = []
        option, used = "", True  # a repeatable option whose values come next, and whether any has come
        for word in args:
            if word.startswith("-") and len(word) > 1:
                spread += [] if used else [option]  # without a value: click says so
                name = "--" + word[2:].replace("_", "-")
                option, used = (name, False) if name in repeatable else ("", True)
                spread += [] if option else [word]
            else:
                spread += [option, word] if option else [word]
                used = True
        spread += [] if used else [option]
        return super().parse_args(ctx, spread)


def pairs(
    _context: click.Context, option: click.Parameter, given: tuple[str, ...], *, separator: str
) -> dict[str, str]:
    """NAME and VALUE of each word, which may also hold several of them, separated by commas."""
    found: dict[str, Any] = {}
    for word in (part for text in given for part in text.split(",") if part.strip()):
        name, sign, value = word.strip().partition(separator)
        if not (name and sign and value):
            raise click.BadParameter(f"{word!r}; expected NAME{separator}VALUE", param=option)
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice", param=option)
        found[name] = value
    return found
