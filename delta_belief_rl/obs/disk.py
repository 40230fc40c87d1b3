"""A disk that refuses a write ends the run in one sentence, wherever it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from delta_belief_rl.types import UserError


class DiskRefused(UserError):
    """A file could not be written: the disk or a quota is full, or the place is gone."""

    @classmethod
    def of(cls, error: OSError, what: str, place: Path, setting: str) -> DiskRefused:
        """The failure of one write.

        Args:
            error: What the system says.
            what: e.g. ``"The checkpoint of step 5"``.
            place: File or folder.
            setting: That names another place.
        """
        return cls(
            f"{what} could not be written to {place} ({error.strerror or error}); free space or "
            f"set {setting} to another disk."
        )


@contextmanager
def writing(what: str, place: Path, setting: str = "trainer.output_dir") -> Iterator[None]:
    """Turn a refusal of the system inside the block into ``DiskRefused``; see there."""
    try:
        yield
    except OSError as error:
        raise DiskRefused.of(error, what, place, setting) from error
