"""castiron: an ahead-of-time compiler and engine builder for large language models.

``build`` makes an engine from a Hugging Face checkpoint (needs ``pip install castiron[build]``);
``ModelRunner`` runs one (needs neither torch nor the checkpoint).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# Sources lie in folders beside this one (graph/, build/, runtime/ ...) and are installed below castiron/.
# With the repository as the current directory this package is found first; the installed one completes it.
__path__ = extend_path(__path__, __name__)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from castiron.build import build as build
    from castiron.runtime import AsyncEngine as AsyncEngine
    from castiron.runtime import ModelRunner as ModelRunner
    from castiron.runtime import SamplingParams as SamplingParams
    from castiron.runtime import StructuredOutput as StructuredOutput

_HOMES = {
    "build": "castiron.build",
    "ModelRunner": "castiron.runtime",
    "AsyncEngine": "castiron.runtime",
    "SamplingParams": "castiron.runtime",
    "StructuredOutput": "castiron.runtime",
}
__all__ = ["AsyncEngine", "ModelRunner", "SamplingParams", "StructuredOutput", "__version__", "build"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `castiron run` never imports torch and `import castiron` costs nothing.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'castiron' has no attribute {name!r}")
