"""What can be wrong with a task file, as typed values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MEND_ROW = "correct the row or leave it out"


class ProblemKind(StrEnum):
    """What is wrong with a file, a row of it, or its secret."""

    UNREADABLE = "unreadable"
    MISSING_COLUMN = "missing_column"
    WRONG_TYPE = "wrong_type"
    BAD_TEXT = "bad_text"
    """Bytes that are no UTF-8."""
    NO_SECRET = "no_secret"
    NO_NAME = "no_name"
    """No id or no data_source."""
    BAD_PROMPT = "bad_prompt"
    UNKNOWN_SOURCE = "unknown_source"
    REPEATED_ID = "repeated_id"
    REPEATED_SECRET = "repeated_secret"
    GENERIC_SECRET = "generic_secret"
    """A word that questions about other secrets contain by accident."""
    UNFINDABLE_SECRET = "unfindable_secret"
    """The published rule ``exact`` can never find it in a question."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: A verb phrase whose subject is the row or the file.
        cure: What to do about it.
        row: Number of the row, from 0; None for the whole file.
    """

    kind: ProblemKind
    what: str
    cure: str
    row: int | None = None

    def sentence(self, path: str) -> str:
        """The problem as one sentence about a file."""
        about = f"The data file {path!r}" if self.row is None else f"Row {self.row} of {path!r}"
        return f"{about} {self.what}: {self.cure}."
