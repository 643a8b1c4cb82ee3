"""The registry: which tactics exist for an op on a target, and which one is best."""

from __future__ import annotations

from collections.abc import Iterable

from castiron.errors import BuildError

from .tactic import Context, Op, Tactic


class Registry:
    """Tactics by (op, family). User tactics are added like built-in ones and win at equal cost."""

    def __init__(self, tactics: Iterable[Tactic] = ()) -> None:
        self._tactics: dict[tuple[str, str], list[Tactic]] = {}
        self._names: set[str] = set()
        for tactic in tactics:
            self.register(tactic)

    def register(self, tactic: Tactic) -> None:
        """Add a tactic. Raises BuildError when its name is taken."""
        if tactic.name in self._names:
            raise BuildError(f"a tactic named {tactic.name!r} is already registered; give yours another name")
        self._names.add(tactic.name)
        self._tactics.setdefault((tactic.kind, tactic.family), []).append(tactic)

    def implements(self, kind: str, family: str) -> bool:
        """Whether any tactic is known for an op."""
        return (kind, family) in self._tactics

    def candidates(self, op: Op, context: Context, tokens: int) -> list[Tactic]:
        """Tactics that accept the op, cheapest first for a step of ``tokens`` rows."""
        known = self._tactics.get((op.kind, context.target.family), [])
        # Later registrations first, so that sorting (stable) prefers a user's tactic at equal cost.
        fitting = [tactic for tactic in reversed(known) if tactic.accepts(op, context)]
        return sorted(fitting, key=lambda tactic: tactic.cost(op, context, tokens))

    def choose(self, op: Op, context: Context, tokens: int) -> Tactic:
        """The cheapest tactic. Raises BuildError that names the op and its operands when there is none."""
        fitting = self.candidates(op, context, tokens)
        if fitting:
            return fitting[0]
        operands = ", ".join("-" if o is None else f"{list(o.shape)}" for o in op.inputs)
        results = ", ".join(f"{o.name} {list(o.shape)}" for o in op.outputs)
        tried = [t.name for t in self._tactics.get((op.kind, context.target.family), [])]
        reason = (
            f"none of {', '.join(tried)} takes these operands" if tried else "no tactic implements this op"
        )
        raise BuildError(
            f"target {context.target.name!r} cannot run {op.kind}({operands}) -> {results} with attributes "
            f"{dict(op.attrs)}: {reason}; register a tactic for it (docs/passes.md, 'Tactics')"
        )
