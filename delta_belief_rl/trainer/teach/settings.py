"""How a judge is taught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.trainer.warmup.model import ModelSizes
from delta_belief_rl.types import UserError

Size = Literal["tiny", "small", "medium"]
Precision = Literal["float32", "bfloat16"]

SIZES: dict[Size, ModelSizes] = {
    "tiny": ModelSizes(hidden=64, layers=2, heads=2, kv_heads=2, mlp=256, max_positions=2048),
    "small": ModelSizes(
        hidden=128, layers=2, heads=2, kv_heads=2, head_dim=32, mlp=512, max_positions=2048
    ),
    "medium": ModelSizes(
        hidden=256, layers=4, heads=4, kv_heads=4, head_dim=64, mlp=1024, max_positions=2048
    ),
}
"""Of a model from scratch: about 0.2, 0.6 and 4.5 million parameters in the packaged world."""


@dataclass(frozen=True, slots=True)
class TeachSettings:
    """How a judge is taught.

    ``steps`` makes the result a function of the seed; with ``minutes`` it depends on the machine.
    Exactly one of the two is set.

    Attributes:
        precision: Of the products, and of the weights that an adapter leaves as they are; what is
            taught and its optimizer are float32 either way.
        workers: Processes that prepare questions ahead; the questions are the same for any number.
        secrets: Things of one step; a step with a history has a fourth of them.
        questions: Questions to each of them; behind a history four times as many.
        history_every: One step in so many shows a history.
        longest_history: Earlier questions at most; short histories are more frequent.
        held_pairs: Share of the pairs of a thing and a property that is never taught.
        lora_rank: Teach an adapter of this rank on all linear layers of ``base`` and merge it; 0
            teaches all weights.
        final_lr: Share of ``lr`` at the end.
        bare_share: Share of the training, at its beginning, in which prompts lack the rules.
        head_weight: Weight of each head's loss; 0 teaches by answers alone.
        measured: Questions of each kind that the taught judge is measured with.
        lanes: Questions that it then answers together.
    """

    size: Size = "small"
    base: str | None = None
    seed: int = 0
    device: str = "cpu"
    precision: Precision = "float32"
    workers: int = 0
    steps: int | None = 3000
    minutes: float | None = None
    secrets: int = 32
    questions: int = 4
    history_every: int = 8
    longest_history: int = 19
    held_pairs: float = 0.04
    lora_rank: int = 0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    lr_warmup_steps: int = 50
    final_lr: float = 0.02
    clip_norm: float = 1.0
    head_weight: float = 0.5
    bare_share: float = 0.5
    measured: int = 400
    lanes: int = 8
    curve_points: int = 50

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise UserError("Teaching a judge needs either steps or minutes: give one of the two.")
        length = self.steps if self.minutes is None else self.minutes
        if not length or length < 0:
            raise UserError("Teaching a judge needs at least one step, or minutes above 0.")
        if self.lora_rank < 0 or (self.lora_rank and self.base is None):
            raise UserError(
                "An adapter needs a rank above 0 and a base model: give --base, or no --lora-rank."
            )
        if min(self.secrets, self.questions) < 1 or self.workers < 0 or not self.lr > 0:
            raise UserError(
                "Teaching a judge needs secrets, questions and a learning rate above 0, and no "
                "negative number of workers."
            )

    def share(self, step: int, seconds: float) -> float:
        """How much of the training is done after so many steps and seconds."""
        return step / self.steps if self.steps else seconds / (60 * (self.minutes or 0.0))


def suited(base: str | None, device: str, lora: bool, cores: int) -> dict[str, int | float | str]:
    """Settings that differ from the defaults for a base model or a GPU.

    A base model reads English already: it needs a smaller learning rate and no lessons without the
    rules. A GPU needs many questions at once, and processes that prepare them.

    Args:
        base: The base model, if any.
        device: ``cpu`` or ``cuda``.
        lora: An adapter is taught.
        cores: CPU cores that may be used.
    """
    found: dict[str, int | float | str] = {}
    if base is not None:
        found |= {"lr": 1e-3 if lora else 3e-4, "bare_share": 0.0}
    if device == "cuda":
        workers = max(0, min(12, cores - 2))
        found |= {"secrets": 128, "questions": 8, "precision": "bfloat16", "lanes": 128}
        found |= {"workers": workers}
    return found
