"""The plugin SDK: what a plugin file imports, and how the build reads such a file (docs/plugins.md).

A plugin is one Python file that defines ``PLUGIN = Plugin(...)``. Its ops, patterns and tactics are the same
kinds of object as the built-in ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from castiron.errors import BuildError

from ..graph.custom import CustomOp, ModuleTakeover, Pattern, Shape
from .launch import (
    CudaKernel,
    Grid,
    HostKernel,
    KernelLaunch,
    Param,
    TritonKernel,
    When,
    row_stride,
    size,
    step_input,
    value,
    weight,
)
from .paged_step import PagedStep
from .registry import Registry
from .tactic import Call, Context, Lowering, Op, Operand, Tactic, View, WeightUse, bandwidth_cost
from .targets import Target

__all__ = [
    "Call",
    "Context",
    "CudaKernel",
    "CustomOp",
    "Example",
    "Grid",
    "HostKernel",
    "KernelLaunch",
    "Lowering",
    "ModuleTakeover",
    "Op",
    "Operand",
    "PagedStep",
    "Param",
    "Pattern",
    "Plugin",
    "Shape",
    "Tactic",
    "Target",
    "TritonKernel",
    "View",
    "WeightUse",
    "When",
    "bandwidth_cost",
    "load_plugin",
    "row_stride",
    "size",
    "step_input",
    "value",
    "weight",
]


@dataclass(frozen=True)
class Example:
    """Operands with which ``castiron plugin test`` tries an op.

    Attributes:
        op: name of the op, a plugin's or a built-in one ("castiron.Activation").
        shapes: of the operands, "T" and "N" allowed; None for an absent one.
        attributes: of the op.
        constant: indices of operands that are weights.
        kv: (kv_heads, head_dim, v_head_dim) for an op that reads the cache: the trial then has a step of two
            decoding sequences and a prefill chunk, and the reference gets it as ``step`` (a PagedStep).
        tolerance: largest |error| ≤ tolerance · max(1, largest |reference|), on float32 operands; on half
            operands their rounding (2⁻⁸ for bfloat16) is added.
    """

    op: str
    shapes: tuple[Shape | None, ...]
    attributes: dict[str, bool | int | float | str]
    constant: tuple[int, ...] = ()
    kv: tuple[int, int, int] | None = None
    tolerance: float = 1e-5


@dataclass(frozen=True)
class Plugin:
    """What a plugin file brings: ops, the patterns and modules that become them, and tactics.

    The ops of ``modules`` need not be repeated in ``ops``.
    """

    name: str
    ops: tuple[CustomOp, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    modules: tuple[ModuleTakeover, ...] = ()
    tactics: tuple[Tactic, ...] = ()
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        if not self.tactics:
            raise BuildError(
                f"plugin {self.name!r} has no tactic, so it can change nothing; expected at least one"
            )
        implemented = {tactic.kind for tactic in self.tactics}
        for op in self.all_ops:
            if op.name not in implemented:
                raise BuildError(f"plugin {self.name!r} defines {op.name} and has no tactic that computes it")

    @property
    def all_ops(self) -> tuple[CustomOp, ...]:
        """Every op of the plugin, once."""
        return tuple({op.name: op for op in (*self.ops, *(module.op for module in self.modules))}.values())


def load_plugin(path: str | Path) -> Plugin:
    """Run a plugin file and return its PLUGIN.

    Raises BuildError, with the plugin's own traceback where it failed, for a file that cannot be run or that
    defines no PLUGIN.
    """
    file = Path(path).absolute()
    plugin = getattr(load_module(file), "PLUGIN", None)
    if not isinstance(plugin, Plugin):
        found = "nothing of that name" if plugin is None else f"a {type(plugin).__name__}"
        raise BuildError(f"{file} must define PLUGIN = castiron.plugins.sdk.Plugin(...); found {found}")
    return plugin


def load_module(file: Path) -> ModuleType:
    """Run a plugin file as a module of its own; raises BuildError as ``load_plugin`` does."""
    if not file.is_file():
        raise BuildError(f"there is no plugin file {str(file)!r}")
    # Triton reads kernels' sources through their module, so it needs a name of its own in sys.modules.
    name = f"castiron_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BuildError(f"{file} is no Python file; a plugin is one (docs/plugins.md)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BuildError as error:
        raise BuildError(f"{file}: {error}") from None
    except (Exception, SystemExit) as error:
        raise BuildError(f"the plugin {file} cannot be loaded:\n{_own_lines(error, file)}") from error
    return module


def register(plugins: Sequence[Plugin], registry: Registry) -> dict[str, CustomOp]:
    """Add the plugins' tactics to a registry; returns their ops by name.

    Raises BuildError for names that two plugins share.
    """
    ops: dict[str, CustomOp] = {}
    for plugin in plugins:
        for op in plugin.all_ops:
            if op.name in ops:
                raise BuildError(f"two plugins define the op {op.name}")
            ops[op.name] = op
        for tactic in plugin.tactics:
            registry.register(tactic)
    return ops


def _own_lines(error: BaseException, file: Path) -> str:
    """The traceback from the plugin's first line on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename == str(file)), len(frames))
    lines = traceback.format_list(frames[first:])
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
