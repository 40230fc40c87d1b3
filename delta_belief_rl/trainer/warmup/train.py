"""The supervised warm-up: teach a small model the language, the facts and the bookkeeping of a
closed world.

What makes it work is the order: one-turn games first, then longer ones, then games cut anywhere
with a guess added, full games last; and exact targets in place of drawn ones. Plain next-token loss
on full games stays at "guess anything" for a long time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from delta_belief_rl.trainer.warmup.data import BatchRecipe, BatchSource
from delta_belief_rl.trainer.warmup.games import GameBatch, Language, Teacher
from delta_belief_rl.trainer.warmup.model import ActionTensors, LossTerms, ModelSizes, batch_loss
from delta_belief_rl.types import UserError

_PREFETCH_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Settings of the warm-up.

    ``steps`` makes the result a function of the seed; with ``minutes`` it depends on the machine.
    Exactly one of the two is set.
    """

    seed: int = 0
    device: str = "auto"
    minutes: float | None = 5.0
    steps: int | None = None
    batch_games: int = 256
    micro_games: int = 256
    """Games per forward pass; those of similar length go together."""
    max_turns: int = 20
    workers: int = 0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    lr_warmup_steps: int = 50
    final_lr: float = 0.02
    """Share of ``lr`` at the end."""
    clip_norm: float = 1.0
    aux_weight: float = 0.5
    bf16: bool = True
    """Autocast to bfloat16, on CUDA only."""
    lora_rank: int = 0
    """Train an adapter of this rank and merge it, for large models; 0 trains all weights."""
    log_seconds: float = 5.0
    sizes: ModelSizes = field(default_factory=ModelSizes)
    teacher: Teacher = field(default_factory=Teacher)

    def __post_init__(self) -> None:
        counts = {
            "--steps": self.steps,
            "--batch-games": self.batch_games,
            "--micro-games": self.micro_games,
            "--max-turns": self.max_turns,
            "--layers": self.sizes.layers,
            "--hidden": self.sizes.hidden,
            "--mlp": self.sizes.mlp,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: give a whole number above 0.")
        for name, value in (("--minutes", self.minutes), ("--lr", self.lr)):
            if value is not None and not 0.0 < value < math.inf:
                raise UserError(f"{name} is {value}: give a number above 0.")
        if self.seed < 0:
            raise UserError(f"--seed is {self.seed}: give a whole number from 0.")


@dataclass(frozen=True, slots=True)
class WarmupLog:
    """One logged line; KL in nats, means since the line before."""

    step: int
    share: float
    seconds: float
    lr: float
    policy_kl: float
    posterior_kl: float
    tokens_per_second: float


def learning_rate(settings: WarmupSettings, step: int, share: float) -> float:
    """Linear warm-up, constant to half of the training, then linear to ``final_lr``."""
    ramp = min(1.0, (step + 1) / max(settings.lr_warmup_steps, 1))
    decay = 1.0 if share < 0.5 else 1.0 - (1.0 - settings.final_lr) * (share - 0.5) / 0.5
    return settings.lr * ramp * max(decay, settings.final_lr)


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one.

    Raises:
        UserError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name} is no device: give auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device: use --device cpu.")
    return device


class Clock:
    """Share of the training done: by steps or by time."""

    def __init__(self, settings: WarmupSettings) -> None:
        if (settings.minutes is None) == (settings.steps is None):
            raise UserError("the warm-up needs either minutes or steps: set one of them to null")
        self._steps = settings.steps
        self._seconds = (settings.minutes or 0.0) * 60
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Begin to count now."""
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    def share(self, step: int) -> float:
        """Share of the training that is done after so many steps."""
        if self._steps is not None:
            return step / self._steps
        return self.elapsed() / self._seconds

    def ahead(self, step: int, count: int) -> tuple[float, ...]:
        """Shares expected at the batches to come."""
        if self._steps is not None:
            return tuple(min((step + i) / self._steps, 1.0) for i in range(max(count, 1)))
        return (self.share(step),) * max(count, 1)


def train(
    model: PreTrainedModel,
    language: Language,
    settings: WarmupSettings,
    log: Callable[[WarmupLog], None] | None = None,
) -> list[WarmupLog]:
    """Train ``model`` in place on teacher games.

    Args:
        model: On its device; its trainable parameters are trained.
        language: World, actions and tokens.
        settings: See :class:`WarmupSettings`.
        log: Called with every logged line; prints to stderr when None.

    Returns:
        The logged lines, the last one at the end of the training.
    """
    device = next(model.parameters()).device
    torch.manual_seed(settings.seed)
    head = _posterior_head(model, len(language.values), settings, device)
    optimizer = optimizer_of([model, *([head] if head is not None else [])], settings)
    tree = ActionTensors.place(language.actions, device)
    logs: list[WarmupLog] = []
    meter = _Meter()
    clock = Clock(settings)
    recipe = BatchRecipe(
        language, settings.seed, settings.batch_games, settings.max_turns, settings.teacher
    )
    source = BatchSource(recipe, settings.workers)
    ahead = settings.workers * _PREFETCH_PER_WORKER
    autocast = settings.bf16 and device.type == "cuda"
    model.train()
    with source:
        batch = source.take(clock.ahead(0, ahead))
        clock.restart()
        step = 0
        while (share := clock.share(step)) < 1.0:
            rate = learning_rate(settings, step, share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            for part in _micro_batches(batch, settings.micro_games):
                terms = batch_loss(model, head, tree, part, device, settings.aux_weight, autocast)
                (terms.loss * (len(part.token_turn) / len(batch.token_turn))).backward()
                meter.add(terms, part)
            torch.nn.utils.clip_grad_norm_(_trained(model), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            done = clock.share(step)
            if done >= 1.0 or meter.due(settings.log_seconds):
                logs.append(meter.line(step, done, clock.elapsed(), rate))
                (log or print_line)(logs[-1])
            if done < 1.0:
                batch = source.take(clock.ahead(step, ahead))
    model.eval()
    return logs


def _micro_batches(batch: GameBatch, games: int) -> list[GameBatch]:
    """Games of similar length together, at most ``games`` of them."""
    if len(batch.lengths) <= games:
        return [batch]
    order = np.argsort(batch.lengths, kind="stable")
    return [batch.select(part) for part in np.array_split(order, -(-len(order) // games))]


def print_line(line: WarmupLog) -> None:
    """One line of progress to stderr."""
    print(
        f"warm-up {line.share:5.1%} step {line.step:6d} {line.seconds:6.0f} s  lr {line.lr:.1e}  "
        f"policy KL {line.policy_kl:.4f}  posterior KL {line.posterior_kl:.4f}  "
        f"{line.tokens_per_second:.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


class _Meter:
    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._weights: list[int] = []
        self._tokens = 0
        self._since = time.perf_counter()

    def add(self, terms: LossTerms, batch: GameBatch) -> None:
        weight = len(batch.token_turn)
        self._sums.append(torch.stack([terms.policy_kl, terms.posterior_kl]) * weight)
        self._weights.append(weight)
        self._tokens += int(batch.lengths.sum())

    def due(self, seconds: float) -> bool:
        return time.perf_counter() - self._since >= seconds

    def line(self, step: int, share: float, seconds: float, lr: float) -> WarmupLog:
        policy, posterior = (torch.stack(self._sums).sum(0) / sum(self._weights)).tolist()
        span = max(time.perf_counter() - self._since, 1e-9)
        out = WarmupLog(step, share, seconds, lr, policy, posterior, self._tokens / span)
        self._reset()
        return out


def _posterior_head(
    model: PreTrainedModel, things: int, settings: WarmupSettings, device: torch.device
) -> nn.Linear | None:
    if settings.aux_weight <= 0:
        return None
    width = cast(torch.Tensor, model.get_input_embeddings().weight).shape[1]
    head = nn.Linear(width, things)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / width**0.5)
        head.bias.zero_()
    return head.to(device)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def optimizer_of(modules: list[nn.Module], settings: WarmupSettings) -> torch.optim.AdamW:
    """AdamW over the trained parameters of some modules; weight decay for matrices only."""
    parameters = [p for module in modules for p in _trained(module)]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=fused)
