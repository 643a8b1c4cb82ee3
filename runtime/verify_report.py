"""What ``castiron verify`` tolerates and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..engines import Verification
from .devices import DeviceChoice


@dataclass(frozen=True)
class Tolerance:
    """Bounds by weight dtype.

    fp32: both sides compute in float32 and differ by the order of summation alone. A sum of K products
    carries about eps·sqrt(K) ≈ 1.2e-7·50 of relative error; some hundred operations in a row add up to about
    1e-4 of the largest logit, below which no wrong kernel hides. Doubled for headroom.
    bf16: an operand rounded to 8 bits is off by 2⁻⁹ ≈ 0.002; over a few hundred roundings errors grow as the
    square root, to 3 to 10 % of the logits' spread on deep models. A wrong kernel gives about 100 %. KL is
    measured as well, because it is what a user notices; Hugging Face's own bf16 stays below 0.01 on real
    models.
    fp16: three more bits, an eighth of the error.
    """

    #: max |error| ≤ this · max(1, max |logit|)
    max_abs: float
    #: rms of errors ≤ this · rms of the golden logits around each row's mean
    relative: float
    mean_kl: float
    #: Decode against the engine's own prefill, as max_abs, where the kernels promise equality bit for bit
    #: (host, docs/program.md): what remains is the arithmetic of log-softmax. Other targets decode by other
    #: kernels than they prefill with, which round elsewhere: there max_abs is the bound.
    own: float
    #: A row whose golden top-1 leads by more than this · max(1, max |logit|) must have the same top-1.
    margin: float
    #: Share of a prompt's rows, the worst, that count for none of the above.
    outliers: float = 0.0
    #: A continuation may leave the golden one anywhere: a router may have decided otherwise there.
    may_leave: bool = False


TOLERANCES = {
    "float32": Tolerance(max_abs=2e-4, relative=2e-4, mean_kl=1e-6, own=2e-4, margin=4e-4),
    "bfloat16": Tolerance(max_abs=0.15, relative=0.1, mean_kl=0.03, own=0.01, margin=0.15),
    "float16": Tolerance(max_abs=0.02, relative=0.015, mean_kl=0.002, own=0.002, margin=0.02),
}


def tolerance_for(
    dtype: str,
    choice: DeviceChoice | None,
    activations: frozenset[str] = frozenset(),
    cache: str = "auto",
    *,
    rounds_by_itself: bool = False,
    routes: bool = False,
) -> Tolerance:
    """The bounds for an engine of ``dtype`` on the device that runs it (None: the host's).

    ``activations``, ``cache``: formats that these are rounded to. The golden outputs round them too, but
    a number near the middle between two codes may fall to either side for a difference in its last bits: with
    the one bit of e2m1's mantissa that changes it by up to a half, with the three of e4m3's by an eighth. The
    mean over many numbers, which KL shows, hardly moves; single logits do. (Two layers of random weights,
    64 wide, the worst case: 0.06 of the spread with e4m3 activations, 0.08 with such a cache as well.) A
    float32 engine does not round them. int8 with a scale a token leaves next to nothing of a row whose
    largest number is a thousand times the others: that costs SmolLM2 a KL of 0.03 to the unquantized model,
    and two computations that differ in their last bits lose other parts of such rows (KL 0.05, 0.25 of the
    spread).
    ``rounds_by_itself``: the program rounds activations to int8 where the golden outputs do not (the build's
    ``activations="auto"``). Text answers to that as to a little noise, but a few positions of random tokens
    are switches: the second of forty may or may not become a sink of attention on SmolLM2, and all that look
    at it move by a third of their spread. A wrong kernel moves everything by its whole spread.
    ``routes``: a mixture of experts. A token near the border between two experts goes to the other one for a
    difference in its last bits, and its row is another; the rest shows a wrong kernel all the same.
    """
    tolerance = TOLERANCES[dtype]
    rounded = activations | {cache}
    if rounded & {"nvfp4", "mxfp4"} or rounds_by_itself:
        tolerance = _at_least(tolerance, max_abs=0.5, relative=0.25)
    elif "int8" in activations and dtype != "float32":
        tolerance = replace(_at_least(tolerance, max_abs=0.5, relative=0.5), mean_kl=0.2)
    elif rounded & {"fp8", "mxfp8"} and dtype != "float32":
        tolerance = _at_least(tolerance, max_abs=0.25, relative=0.15)
    if rounds_by_itself:
        tolerance = replace(tolerance, outliers=0.05, relative=0.5, mean_kl=0.2)
    if routes and dtype == "float32":
        tolerance = replace(tolerance, outliers=0.02, may_leave=True)
    elif routes:
        tolerance = _at_least(tolerance, max_abs=0.5, relative=0.25)
        mean_kl = max(tolerance.mean_kl, 0.1)
        tolerance = replace(tolerance, outliers=0.1, mean_kl=mean_kl, may_leave=True)
    if choice is None or choice.gpu is None:
        return tolerance
    return replace(tolerance, own=tolerance.max_abs)


def _at_least(tolerance: Tolerance, max_abs: float, relative: float) -> Tolerance:
    wide = max(tolerance.max_abs, max_abs)
    return replace(tolerance, max_abs=wide, relative=max(tolerance.relative, relative), margin=wide)


@dataclass(frozen=True)
class PromptReport:
    """The comparison of one prompt; ``phase`` is prefill or decode, errors are in logits (decode: nats)."""

    phase: str
    sequence: int
    prompt_tokens: int
    rows: int
    max_abs_error: float
    mean_kl: float
    top1_agreement: float
    problem: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found; ``problems`` is empty exactly when the engine passed."""

    passed: bool
    max_abs_error: float
    mean_kl: float
    top1_agreement: float
    relative_error: float
    rows: int
    decode_max_abs_error: float
    decode_rows: int
    seconds: float
    prompts: list[PromptReport]
    problems: list[str]
    #: Where the engine ran and why there; None for a stand-in.
    device: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``verify --json``."""
        return asdict(self)

    def summary(self) -> Verification:
        """Return what the manifest keeps."""
        return Verification(
            passed=self.passed,
            max_abs_error=self.max_abs_error,
            mean_kl=self.mean_kl,
            top1_agreement=self.top1_agreement,
            rows=self.rows + self.decode_rows,
        )
