"""What one request of a benchmark came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request; times are seconds of ``time.perf_counter``.

    Attributes:
        started: when it was sent.
        token_times: when each event with new text came.
        ended: when the stream ended; the last of ``token_times`` may be earlier.
        prompt_tokens: as the server counted them, or None if it did not say.
        output_tokens: as the server counted them; else the number of events with text.
        counted_by_server: ``output_tokens`` is the server's count.
        text: the answer.
        error: why it failed; None when it did not.
    """

    started: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by_server: bool = False
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text."""
        return self.token_times[0] - self.started

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Mean seconds of the tokens after the first; None with one token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between an event with text and the next: what a reader sees, also when an event has several
        tokens.
        """
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]
