"""Signals as a terminal has them, whoever started the tests; for a ``conftest`` to take."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """The background of a shell ignores Ctrl-C and ``nohup`` a closing terminal, and so does
    whatever is started there."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in heard}
    for number, handler in heard.items():
        signal.signal(number, handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
