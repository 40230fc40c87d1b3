"""What each vLLM engine holds of its GPUs after its start, told against the plan's estimate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from delta_belief_rl.config.engine_memory import EngineNeeds
from delta_belief_rl.config.memory import show_bytes
from delta_belief_rl.obs.events import EventLog


@dataclass(frozen=True, slots=True)
class Footprint:
    """One engine.

    Attributes:
        role: For people, e.g. ``judge 0``.
        workers: Per GPU of the engine what ``PolicyWorkerExtension.policy_memory`` says, in bytes.
        needs: The estimate for one GPU; None where there is none.
    """

    role: str
    workers: Sequence[Mapping[str, int]]
    needs: EngineNeeds | None

    def sentence(self) -> str:
        """Measured against estimated, for the GPU that holds most."""
        most = max(self.workers, key=lambda worker: worker["reserved"])
        estimate = f" (estimated {show_bytes(self.needs.weights)})" if self.needs else ""
        return (
            f"{self.role}: weights {show_bytes(most['weights'])}{estimate}, cache "
            f"{show_bytes(most['cache'])}, {show_bytes(most['reserved'])} reserved at most"
        )


def tell_footprints(footprints: Sequence[Footprint], events: EventLog) -> None:
    """Print and record what the engines hold; engines without a GPU are left out."""
    for found in footprints:
        if not any(worker["reserved"] for worker in found.workers):
            continue
        print(found.sentence(), file=sys.stderr)
        events.write(
            "engine_memory",
            role=found.role,
            workers=[dict(worker) for worker in found.workers],
            estimated_weights=found.needs and found.needs.weights,
        )
