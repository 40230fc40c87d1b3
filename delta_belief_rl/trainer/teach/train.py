"""The supervised training of a judge: next-token loss on the answers of many questions.

A step draws some secrets and many questions to each. Most steps show no history, in turn under the
rules of a judge with and without one; every ``history_every``-th step shows a history.

The training begins with prompts that lack the system message: among the two hundred tokens of the
rules a model without other knowledge takes long to find the secret and the question at all. It ends
with the judge's whole prompts.

Two linear heads read the middle of the model while it is taught and are thrown away after: what
holds for the secret, where a question begins and where the prompt ends, and there also which
property is asked for. An answer alone tells one bit. Held-out pairs and phrasings are kept from the
heads as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.teach.cases import CaseMaker
from delta_belief_rl.trainer.teach.feed import Lesson, lessons
from delta_belief_rl.trainer.teach.settings import TeachSettings
from delta_belief_rl.trainer.teach.tree import TREE_ATTENTION, TreeBatch
from delta_belief_rl.trainer.warmup.model import backbone


@dataclass(frozen=True, slots=True)
class TeachPoint:
    """One point of the curve; losses and ``right`` are means since the last one.

    Attributes:
        loss: Of the answers, nats of a token.
        heads: Of both heads, nats.
        right: Share of the questions whose first answer token is the most likely one.
        waited: Share of the time in which the next questions were not ready.
    """

    step: int
    share: float
    seconds: float
    lr: float
    loss: float
    heads: float
    right: float
    questions_per_second: float
    waited: float


@dataclass(eq=False)
class _Since:
    """What was seen since the last point: of each step both losses and the share right."""

    seen: list[Tensor] = field(default_factory=list)
    questions: int = 0
    start: float = field(default_factory=time.perf_counter)
    left: float = field(default_factory=time.perf_counter)
    waited: float = 0.0


def teach(
    model: PreTrainedModel,
    chat: ChatFormat,
    cases: CaseMaker,
    settings: TeachSettings,
    log: Callable[[TeachPoint], None] | None = None,
) -> list[TeachPoint]:
    """Train ``model`` in place, on the device of the settings.

    Nothing in the loop waits for a GPU but the points of the curve.

    Args:
        model: On the CPU; it is moved.
        chat: Its chat format, as the judge will use it.
        cases: Where questions come from.
        settings: How.
        log: Called with every point of the curve.

    Returns:
        The curve, about ``curve_points`` points, the last one at the end.
    """
    device = torch.device(settings.device)
    feed = lessons(cases, chat, settings)
    used: Any = model
    used.to(device)
    before = model.config._attn_implementation
    used.set_attn_implementation(TREE_ATTENTION)
    torch.manual_seed(settings.seed)
    heads = Heads(model, cases, settings.seed).to(device)
    optimizer = _optimizer([model, heads], settings)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    # What is frozen is held in half precision itself, and an adapter's layers compute in it.
    halved = settings.precision == "bfloat16" and not settings.lora_rank
    start, curve, since = time.perf_counter(), list[TeachPoint](), _Since()
    share = 0.0
    model.train()
    for step, prepared in enumerate(feed, start=1):
        since.waited += time.perf_counter() - since.left
        one = prepared.to(device)
        rate = learning_rate(settings, step - 1, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=halved):
            loss, right, middle = answer_loss(model, one.batch)
        read = heads(middle, one)
        (loss + settings.head_weight * read).backward()
        nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since.seen.append(torch.stack((loss.detach(), read.detach(), right)))
        since.questions += len(one.rows)
        seconds = time.perf_counter() - start
        share = settings.share(step, seconds)
        if share >= 1.0 or share * settings.curve_points >= len(curve) + 1:
            losses, heads_losses, hits = torch.stack(since.seen).mean(dim=0).tolist()
            span = max(time.perf_counter() - since.start, 1e-9)
            curve.append(
                TeachPoint(
                    step=step,
                    share=min(share, 1.0),
                    seconds=seconds,
                    lr=rate,
                    loss=losses,
                    heads=heads_losses,
                    right=hits,
                    questions_per_second=since.questions / span,
                    waited=since.waited / span,
                )
            )
            since = _Since()
            if log is not None:
                log(curve[-1])
        if share >= 1.0:
            break
        since.left = time.perf_counter()
    model.eval()
    used.set_attn_implementation(before)
    return curve


def learning_rate(settings: TeachSettings, step: int, share: float) -> float:
    """Linear warm-up, constant to half of the training, then linear to ``final_lr``."""
    ramp = min(1.0, (step + 1) / max(settings.lr_warmup_steps, 1))
    decay = 1.0 if share < 0.5 else 1.0 - (1.0 - settings.final_lr) * (share - 0.5) / 0.5
    return settings.lr * ramp * max(decay, settings.final_lr)


def answer_loss(model: PreTrainedModel, batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss of the answers' tokens, share of right first tokens, and the middle states.

    The middle states ``[T, hidden]`` are those between the two halves of the layers.
    The model runs with the attention of ``teach.tree``.
    """
    inner = backbone(model)
    with _only(inner, batch.sources):
        out = inner(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            tree=batch.shape,
            use_cache=False,
            output_hidden_states=True,
        )
    unembed = cast(nn.Module, model.get_output_embeddings())
    logits = unembed(out.last_hidden_state[0, batch.sources]).float()
    first = batch.shape.groups * batch.shape.prompts
    right = (logits[:first].argmax(dim=-1) == batch.targets[:first]).float().mean()
    middle = out.hidden_states[len(out.hidden_states) // 2][0]
    return functional.cross_entropy(logits, batch.targets), right, middle


class Heads(nn.Module):
    """The two heads that are thrown away after the training.

    Legend: ``N`` things, ``P`` properties; ``values`` and ``taught`` are ``[N, P]``.
    """

    values: Tensor
    taught: Tensor

    def __init__(self, model: PreTrainedModel, cases: CaseMaker, seed: int) -> None:
        super().__init__()
        width = cast(Tensor, model.get_input_embeddings().weight).shape[1]
        values = torch.from_numpy(np.array(cases.world.values))
        self.register_buffer("values", values.float(), persistent=False)
        self.register_buffer("taught", torch.from_numpy(~cases.held.pairs), persistent=False)
        self.holds, self.asks = (nn.Linear(width, values.shape[1]) for _ in range(2))
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for head in (self.holds, self.asks):
                head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / width**0.5)
                head.bias.zero_()

    def forward(self, middle: Tensor, lesson: Lesson) -> Tensor:
        """Summed loss of both: mean over taught pairs, and mean over questions for a property."""
        batch = lesson.batch
        states = functional.rms_norm(middle.float(), middle.shape[-1:])
        ends = states[batch.sources[: len(lesson.rows)]]
        holding = self._holding(states[batch.ends], lesson.rows[:: batch.shape.prompts])
        holding = (holding + self._holding(ends, lesson.rows)) / 2
        # Sums over counts, and no rows picked by a mask: a GPU is not waited for.
        asking = functional.cross_entropy(
            self.asks(ends), lesson.columns, ignore_index=-1, reduction="sum"
        )
        return holding + asking / (lesson.columns >= 0).sum().clamp(min=1)

    def _holding(self, states: Tensor, rows: Tensor) -> Tensor:
        taught = self.taught[rows]
        losses = functional.binary_cross_entropy_with_logits(
            self.holds(states), self.values[rows], reduction="none"
        )
        return (losses * taught).sum() / taught.sum()


@contextmanager
def _only(inner: nn.Module, sources: Tensor) -> Iterator[None]:
    """Compute the last feed-forward layer for the tokens that are read, and for no others.

    A model whose parts have other names than usual computes them all.
    """
    layers: Any = getattr(inner, "layers", None)
    last: Any = getattr(layers[-1], "mlp", None) if layers else None
    if last is None:
        yield
        return
    whole = last.forward

    def some(states: Tensor) -> Tensor:
        read = whole(states[:, sources])
        return torch.zeros_like(states, dtype=read.dtype).index_copy(1, sources, read)

    last.forward = some
    try:
        yield
    finally:
        del last.forward


def _optimizer(modules: list[nn.Module], settings: TeachSettings) -> torch.optim.AdamW:
    """Over what is trainable; an adapter's base is not."""
    parameters = [w for module in modules for w in module.parameters() if w.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=fused)
