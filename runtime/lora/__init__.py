"""LoRA adapters in the form of Hugging Face PEFT: read, checked, kept in memory, named by requests."""

from .adapters import Adapters, AdapterUse
from .request import LoRARequest

__all__ = ["AdapterUse", "Adapters", "LoRARequest"]
