"""What one call of a service is told about waiting, and what that means for the other calls.

A service that asks one call to wait means all of them, so none goes out meanwhile. It may ask for a
day, or for a date that is wrong: no reply holds the others for longer than a share of the time that
a call may take, and whoever asks the service then is told anew.
"""

from __future__ import annotations

from delta_belief_rl.engines.api_answer import ApiError, ApiFault

HELD_SHARE = 0.5
"""Of a call's deadline; less than all of it, so that a held call still gets to ask."""


class Pause:
    """Until when the calls of a client are held back. Times are seconds of one clock.

    Args:
        deadline: Seconds that a call may take.
    """

    def __init__(self, deadline: float) -> None:
        self._most = HELD_SHARE * deadline
        self._until = float("-inf")

    def ask(self, seconds: float, now: float) -> None:
        """A reply asks to wait; what was asked before is kept where it is longer.

        Example:
            >>> pause = Pause(deadline=60.0)
            >>> pause.ask(86400.0, now=100.0)
            >>> pause.left(now=110.0, ends=170.0)
            20.0
        """
        self._until = max(self._until, now + min(seconds, self._most))

    def left(self, now: float, ends: float) -> float:
        """Seconds that a call has to wait; 0 where nothing holds it.

        Args:
            now: The present.
            ends: When the call's deadline is over.

        Raises:
            ApiError: The wait would outlast the call; another attempt would end so again.
        """
        seconds = max(0.0, self._until - now)
        if seconds == 0 or now + seconds < ends:
            return seconds
        error = ApiError(ApiFault.RATE_LIMIT, "the service asks for a pause" + beyond(seconds))
        error.passes = False
        raise error


def beyond(seconds: float) -> str:
    """Appendix to the reason of a call that a wait of so many seconds would outlast."""
    return f"; a wait of {seconds:.0f} s would outlast the call's deadline"
