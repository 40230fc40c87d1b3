"""A chain of credit: one method makes the advantages, each transform behind it changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from delta_belief_rl.algo.base import Advantage, Credit, Grain
from delta_belief_rl.types import FloatArray, TurnTable, UserError


@dataclass(frozen=True, slots=True)
class CreditChain:
    """Several elements that are used as one; each has needs of its own (``elements_of``).

    Attributes:
        parts: By name, in their order; the first one is an estimator.
    """

    parts: Mapping[str, Credit]
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Whether the first element compares games; the others only change what it found."""
        return next(iter(self.parts.values())).needs_group

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages of the last element; ``stats`` are those of all, later ones first."""
        stats: dict[str, float] = {}
        for part in self.parts.values():
            previous = part.apply(table, previous)
            stats |= previous.stats
        assert previous is not None, "a chain has at least one element"
        return replace(previous, stats=stats)

    def paid(self, table: TurnTable) -> FloatArray:
        """The rewards that the first element uses."""
        return next(iter(self.parts.values())).paid(table)

    def state_dict(self) -> dict[str, object]:
        """The states of the elements by name, of those that have one."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Give each element its own state back.

        Raises:
            UserError: The state is of another chain.
        """
        for name in state:
            if name not in self.parts:
                raise UserError(
                    f"The checkpoint has a state of {name}, which is not among "
                    f"{', '.join(self.parts)}; resume with the algorithm that wrote it."
                )
        for name, part in self.parts.items():
            part.load_state_dict(cast("Mapping[str, object]", state.get(name, {})))


def elements_of(credit: Credit) -> tuple[Credit, ...]:
    """The elements of a chain; a method that is none is its only element."""
    return tuple(credit.parts.values()) if isinstance(credit, CreditChain) else (credit,)


def reads_of(credit: Credit) -> tuple[str, ...]:
    """What a method's settings name beside its ``requires``; empty for most."""
    return tuple(getattr(credit, "reads", ()))


def chain_of(parts: Sequence[tuple[str, Credit]]) -> Credit:
    """The elements as one; a single one is itself.

    Raises:
        UserError: One is named twice.
    """
    names = [name for name, _ in parts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"algorithm.adv_estimator and algorithm.transforms name {name} more than once; "
                "leave it there once."
            )
    return parts[0][1] if len(parts) == 1 else CreditChain(dict(parts))
