"""From an exported torch program to the ONNX graph of docs/graph.md."""

from .builder import StoredTensor
from .emitter import Resolve
from .translate import Emitted, emit

__all__ = ["Emitted", "Resolve", "StoredTensor", "emit"]
