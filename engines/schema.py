"""Types that the schemas of an engine share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# No control characters: these are printed on terminals.
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, le=1 << 48)]


class Schema(BaseModel):
    """Strict: unknown keys, other types and numbers that are none are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
