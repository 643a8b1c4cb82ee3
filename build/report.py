"""What a build plans and what it did, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..engines import Limits, Verification
from ..engines.quantization import Quantization
from .memory import MemoryPlan


@dataclass(frozen=True)
class BuildPlan:
    """Known before anything is written.

    ``dtype``: of the engine; ``precision``: the same for people, with its quantization and with what weights
    are stored as where that is another, ``stored_dtypes``.
    ``memory``: what a runtime reserves, by target. ``disk_bytes``: size of the engine. ``peak_bytes``: what
    the build itself will hold in memory beyond Python and its libraries.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    stored_dtypes: tuple[str, ...]
    precision: str
    limits: Limits
    memory: dict[str, MemoryPlan]
    disk_bytes: int
    peak_bytes: int
    verify: bool


@dataclass(frozen=True)
class BuildReport:
    """What a build did; ``to_dict`` is what ``--json`` prints and, in part, what the engine keeps."""

    output_dir: str
    plan: BuildPlan
    passes: tuple[tuple[str, int], ...]
    decisions: tuple[dict[str, str], ...]
    notes: tuple[str, ...]
    phases: dict[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    quantization: Quantization | None = None
    verification: Verification | None = None
    dry_run: bool = False

    @property
    def seconds(self) -> float:
        """Duration of all phases."""
        return sum(self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plan = self.plan
        return {
            "output_dir": self.output_dir,
            "dry_run": self.dry_run,
            "model": plan.model,
            "architecture": plan.architecture,
            "parameters": plan.parameters,
            "dtype": plan.dtype,
            "stored_dtypes": list(plan.stored_dtypes),
            "limits": plan.limits.model_dump(),
            "memory_plan": {t: [asdict(item) for item in memory.items] for t, memory in plan.memory.items()},
            "disk_bytes": plan.disk_bytes,
            "estimated_peak_bytes": plan.peak_bytes,
            "passes": [{"name": name, "applied": applied} for name, applied in self.passes],
            "decisions": list(self.decisions),
            "notes": list(self.notes),
            "phases": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
            "quantization": None if self.quantization is None else self.quantization.model_dump(),
            "verification": None if self.verification is None else self.verification.model_dump(),
        }
