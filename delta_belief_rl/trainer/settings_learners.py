"""Which learner makes a token column, and its settings from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer.learner import LearnerSettings

LEARNERS: Mapping[str, Callable[[RunConfig, str, int], LearnerSettings]] = {}
"""By column: the configuration, the device and the number of training steps to the settings."""


def learners_of(
    cfg: RunConfig, needs: Collection[str], device: str, total_steps: int
) -> tuple[LearnerSettings, ...]:
    """The learners behind the columns that a method needs, each once, in the order of ``LEARNERS``.

    Args:
        cfg: The configuration.
        needs: Names in ``requires`` of all elements of the method.
        device: Where the policy is trained.
        total_steps: Of the run.

    Raises:
        UserError: A setting is out of its range.
    """
    made = [make(cfg, device, total_steps) for name, make in LEARNERS.items() if name in needs]
    return tuple({learner.name: learner for learner in made}.values())
