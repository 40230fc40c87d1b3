"""What a check finds: figures for the tables, and claims that hold or do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that a check was to show.

    Attributes:
        text: What should be so.
        holds: Whether it is.
        found: The number or fact behind it, in words.
    """

    text: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What the files of a check say.

    Attributes:
        figures: Numbers by name, as JSON holds them.
        claims: What they show.
    """

    figures: dict[str, Any]
    claims: tuple[Claim, ...] = ()

    @property
    def hold(self) -> bool:
        """Whether every claim does."""
        return all(claim.holds for claim in self.claims)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"figures": self.figures, "claims": [asdict(claim) for claim in self.claims]}


NOTHING = Findings({})


@dataclass
class Claims:
    """Collects claims in the order in which they are made."""

    made: list[Claim] = field(default_factory=list)

    def add(self, text: str, holds: bool, found: str) -> None:
        """Make a claim."""
        self.made.append(Claim(text, holds, found))

    def below(self, text: str, values: Iterable[float | None], bound: float, unit: str) -> None:
        """Claim that there are values and that none of them exceeds a bound.

        A value that is none (JSON's word for NaN) breaks it.
        """
        found = list(values)
        known = [value for value in found if value is not None]
        holds = bool(found) and len(known) == len(found) and max(known) <= bound
        most = f"{max(known):.3g}" if known else "no number"
        missing = f", {len(found) - len(known)} without a number" if len(known) < len(found) else ""
        self.add(text, holds, f"{most} {unit} at most in {len(found)}, bound {bound:g}{missing}")
