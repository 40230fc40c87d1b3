"""What a person sees while a run goes on: one live line on stderr, or plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from delta_belief_rl.obs.metrics import NESTED_TIMINGS

ETA_STEPS = 5
"""The estimate of what is left follows the mean of this many last steps."""


def format_seconds(seconds: float) -> str:
    """A duration a person reads at a glance.

    Example:
        >>> format_seconds(7.04), format_seconds(75), format_seconds(7260)
        ('7.0 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def split_text(timings: Mapping[str, float], limit: int = 4) -> str:
    """The largest parts of a step, e.g. ``"gen 2.8 s, update_actor 2.4 s"``.

    Args:
        timings: Seconds by ``timing_s/<part>`` or ``<part>``; ``step`` is the whole and is left
            out, as are parts inside other parts.
    """
    parts = {name.removeprefix("timing_s/"): seconds for name, seconds in timings.items()}
    for name in ("step", *NESTED_TIMINGS):
        parts.pop(name, None)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:limit]
    return ", ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in largest if seconds > 0
    )


class ProgressView:
    """The progress of a run: one line in place on a terminal, a printed line a step elsewhere.

    Use it as a context manager, so that the terminal is given back on any exit.
    """

    def __init__(self, total_steps: int, start_step: int = 0, stream: TextIO | None = None) -> None:
        """Args: ``start_step`` is the last finished step, the checkpoint's on a resume."""
        self._total = total_steps
        self._step = start_step
        self._phase = "start"
        self._phase_began = time.monotonic()
        self._last = ""
        self._durations: list[float] = []
        self._step_began = time.monotonic()
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False)
        self._live = (
            Live(
                get_renderable=self._text,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays, above the live one; any thread may call it."""
        if self._live:
            self._console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)

    def set_phase(self, phase: str) -> None:
        """Name what the run does from now on."""
        self._phase, self._phase_began = phase, time.monotonic()

    @property
    def phase(self) -> str:
        """What the run does now."""
        return self._phase

    @property
    def phase_seconds(self) -> float:
        """How long it has done so."""
        return time.monotonic() - self._phase_began

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._step

    def finish_step(self, step: int, strict_win: float, timings: Mapping[str, float]) -> None:
        """Say what came of a step.

        Args:
            strict_win: Share of the step's games won under the strict rule.
            timings: ``timing_s/*`` of the step; ``timing_s/step`` is the whole.
        """
        now = time.monotonic()
        seconds = timings.get("timing_s/step", now - self._step_began)
        self._step_began = now
        self._step = step
        self._durations = [*self._durations, seconds][-ETA_STEPS:]
        self._last = (
            f"step {step}/{self._total}  strict win {100 * strict_win:.1f} %  "
            f"{format_seconds(seconds)}"
            f" ({split_text(timings)})  left {format_seconds(self.eta_seconds())}"
        )
        if not self._live:
            self.say(self._last)

    def eta_seconds(self) -> float:
        """Seconds left by the mean of the last steps; 0 before the first one is done."""
        if not self._durations:
            return 0.0
        return (self._total - self._step) * sum(self._durations) / len(self._durations)

    def _text(self) -> Text:
        share = self._step / self._total if self._total else 1.0
        filled = round(20 * share)
        bar = "━" * filled + "╌" * (20 - filled)
        waited = format_seconds(time.monotonic() - self._step_began)
        head = f"{bar} {self._last or f'step {self._step}/{self._total}'}"
        return Text(f"{head}  now: {self._phase}, {waited}", overflow="ellipsis", no_wrap=True)
