"""Whether the kernels of a tactic compile for a target: the compilers, checks and cache of a build."""

from __future__ import annotations

from ...plugins.launch import HostKernel
from ...plugins.tactic import Call, Lowering
from ...plugins.targets import Target
from ..kernels.compile import compile_requests
from ..launches import KernelRequest


def check_compiles(lowering: Lowering, target: Target) -> None:
    """Compile every kernel of a CUDA target; raises BuildError with the compiler's words.

    Kernels for the CPU are compiled when they are run.
    """
    launches = [
        launch for action in lowering.actions if isinstance(action, Call) for launch in action.launches
    ]
    requests = [KernelRequest(one.kernel) for one in launches if not isinstance(one.kernel, HostKernel)]
    if requests:
        compile_requests(requests, target)
