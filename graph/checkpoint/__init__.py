"""Reading checkpoints: which tensors there are, where they lie, and which parameter each one is."""

from .checkpoint import AccountReport, Checkpoint, Tensor
from .config import eos_token_ids
from .quantized import MadeTensor
from .safetensors_file import TensorInfo, read_header, write_safetensors

__all__ = [
    "AccountReport",
    "Checkpoint",
    "MadeTensor",
    "Tensor",
    "TensorInfo",
    "eos_token_ids",
    "read_header",
    "write_safetensors",
]
