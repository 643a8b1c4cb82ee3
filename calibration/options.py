"""What a quantized build may be told. No torch here: the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from castiron.errors import BuildError

from ..graph.quant_plan import CacheFormat
from .recipes import Recipe, recipe_named

CACHE_FORMATS: Final[tuple[CacheFormat, ...]] = ("auto", "fp8", "int8")
#: 16 x 512 tokens: more than the widest matrix of small models has inputs, and a pass of seconds.
DEFAULT_CALIB_SIZE: Final = 16
DEFAULT_CALIB_SEQ_LEN: Final = 512
#: Enough to see a broken engine in a build; the figures of a release want `castiron evaluate`.
DEFAULT_EVAL_TOKENS: Final = 2048
#: Windows of the accuracy report, tokens.
EVAL_WINDOW: Final = 512


@dataclass(frozen=True)
class QuantizationOptions:
    """Options of quantization; without a recipe and with cache format "auto" nothing is quantized.

    Attributes:
        recipe: a name of ``recipes.RECIPES``, or None.
        kv_cache: format of the KV cache; "auto" leaves it in the build's dtype.
        calib_data: a text file or a folder of them; None takes the text that ships with castiron.
        calib_size, calib_seq_len: how many sequences of how many tokens calibration runs.
        exclude: patterns (fnmatch) of module names that stay as they are.
        auto_bits: mean bits of a weight that mixed precision may reach, or None for one format throughout.
        quantize_head: whether the output projection is held as int8.
        eval_data: held-out text of the accuracy report; None takes the text that ships with castiron.
        eval_tokens: tokens of the report; 0 leaves it out.
        max_kl: the build fails when the mean KL to the source model is larger, nats.
    """

    recipe: str | None = None
    kv_cache: CacheFormat = "auto"
    calib_data: Path | None = None
    calib_size: int = DEFAULT_CALIB_SIZE
    calib_seq_len: int = DEFAULT_CALIB_SEQ_LEN
    exclude: tuple[str, ...] = ()
    auto_bits: float | None = None
    quantize_head: bool = True
    eval_data: Path | None = None
    eval_tokens: int = DEFAULT_EVAL_TOKENS
    max_kl: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to quantize."""
        return self.recipe is not None or self.kv_cache != "auto"

    def check(self) -> None:
        """Raise BuildError for values that make no sense, and for options that nothing would read."""
        if self.recipe is not None:
            recipe = recipe_named(self.recipe)
            self._check_bits(recipe)
        elif self.exclude or self.auto_bits is not None:
            given = "--exclude" if self.exclude else "--auto-quantize"
            raise BuildError(f"{given} is given, but no --quantize: name a recipe, or leave it out")
        if not self.wanted:
            self._check_unread()
        if self.kv_cache not in CACHE_FORMATS:
            raise BuildError(f"the KV cache's dtype is {self.kv_cache!r}; expected auto, fp8 or int8")
        for name, least in (("calib_size", 1), ("calib_seq_len", 2), ("eval_tokens", 0)):
            value = getattr(self, name)
            if value < least:
                raise BuildError(f"{name} is {value}; expected at least {least}")
        if self.max_kl is not None and (not self.max_kl > 0 or self.eval_tokens == 0):
            raise BuildError(
                f"max_kl is {self.max_kl} with {self.eval_tokens} eval_tokens; expected a positive bound and "
                "an accuracy report to hold against it"
            )

    def _check_unread(self) -> None:
        """Options of calibration and of the accuracy report, in a build that has neither."""
        given = {
            "--calib-data": self.calib_data is not None,
            "--calib-size": self.calib_size != DEFAULT_CALIB_SIZE,
            "--calib-seq-len": self.calib_seq_len != DEFAULT_CALIB_SEQ_LEN,
            "--eval-data": self.eval_data is not None,
            "--max-kl": self.max_kl is not None,
        }
        unread = [option for option, there in given.items() if there]
        if unread:
            raise BuildError(
                f"{' and '.join(unread)}: given, but the build quantizes nothing and has no accuracy report; "
                "add --quantize or --kv-cache-dtype, or leave it out (a finished engine is measured by "
                "'castiron evaluate')"
            )

    def _check_bits(self, recipe: Recipe) -> None:
        if self.auto_bits is None:
            return
        if recipe.upgrade is None:
            raise BuildError(
                f"--auto-quantize mixes a 4-bit recipe with 8-bit layers; {recipe.name} has 8 bits"
            )
        least = recipe.bits_per_weight
        if not least <= self.auto_bits <= 8:
            raise BuildError(
                f"--auto-quantize {self.auto_bits:g}: {recipe.name} takes {least:g} bits a weight with its "
                "scales, and its 8-bit layers 8; expected a budget between them"
            )
