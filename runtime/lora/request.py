"""LoRARequest, as users of vLLM and TensorRT-LLM know it."""

from __future__ import annotations

from dataclasses import dataclass

from ..request_errors import ParameterError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for the requests of one call.

    Args:
        lora_name: by which the adapter is known from then on.
        lora_int_id: accepted for compatibility; the name alone identifies an adapter.
        lora_path: folder with adapter_config.json and adapter_model.safetensors; may be left out for an
            adapter that is loaded already.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ParameterError(
                f"lora_name is {self.lora_name!r}; expected the name of an adapter", param="lora_request"
            )
