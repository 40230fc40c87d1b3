"""What all tests of faults have."""

from __future__ import annotations

from tests.signals import signals_are_heard as signals_are_heard
