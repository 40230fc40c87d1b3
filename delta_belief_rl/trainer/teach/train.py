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
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.judge.prompts import judge_messages
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.teach.cases import Case, CaseMaker
from delta_belief_rl.trainer.teach.tree import TREE_ATTENTION, TreeBatch, tree_batch
from delta_belief_rl.trainer.warmup.model import ModelSizes, backbone
from delta_belief_rl.types import Message, UserError

Size = Literal["tiny", "small"]

SIZES: dict[Size, ModelSizes] = {
    "tiny": ModelSizes(hidden=64, layers=2, heads=2, kv_heads=2, mlp=256, max_positions=2048),
    "small": ModelSizes(
        hidden=128, layers=2, heads=2, kv_heads=2, head_dim=32, mlp=512, max_positions=2048
    ),
}
"""Of a model from scratch: about 0.2 and 1.1 million parameters in the packaged world."""


@dataclass(frozen=True, slots=True)
class TeachSettings:
    """How a judge is taught.

    ``steps`` makes the result a function of the seed; with ``minutes`` it depends on the machine.
    Exactly one of the two is set.

    Attributes:
        secrets: Things of one step; a step with a history has a fourth of them.
        questions: Questions to each of them; behind a history four times as many.
        history_every: One step in so many shows a history.
        longest_history: Earlier questions at most; short histories are more frequent.
        held_pairs: Share of the pairs of a thing and a property that is never taught.
        final_lr: Share of ``lr`` at the end.
        bare_share: Share of the training, at its beginning, in which prompts lack the rules.
        head_weight: Weight of each head's loss; 0 teaches by answers alone.
        measured: Questions of each kind that the taught judge is measured with.
    """

    size: Size = "small"
    base: str | None = None
    seed: int = 0
    device: str = "cpu"
    steps: int | None = 3000
    minutes: float | None = None
    secrets: int = 32
    questions: int = 4
    history_every: int = 8
    longest_history: int = 19
    held_pairs: float = 0.04
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    lr_warmup_steps: int = 50
    final_lr: float = 0.02
    clip_norm: float = 1.0
    head_weight: float = 0.5
    bare_share: float = 0.5
    measured: int = 400
    curve_points: int = 50

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise UserError("Teaching a judge needs either steps or minutes: give one of the two.")
        length = self.steps if self.minutes is None else self.minutes
        if not length or length < 0:
            raise UserError("Teaching a judge needs at least one step, or minutes above 0.")

    def share(self, step: int, seconds: float) -> float:
        """How much of the training is done after so many steps and seconds."""
        return step / self.steps if self.steps else seconds / (60 * (self.minutes or 0.0))


@dataclass(frozen=True, slots=True)
class TeachPoint:
    """One point of the curve; losses and ``right`` are means since the last one.

    Attributes:
        loss: Of the answers, nats of a token.
        heads: Of both heads, nats.
        right: Share of the questions whose first answer token is the most likely one.
    """

    step: int
    share: float
    seconds: float
    lr: float
    loss: float
    heads: float
    right: float
    questions_per_second: float


@dataclass(eq=False)
class _Since:
    """What was seen since the last point."""

    losses: list[float] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    questions: int = 0
    start: float = field(default_factory=time.perf_counter)


def teach(
    model: PreTrainedModel,
    chat: ChatFormat,
    cases: CaseMaker,
    settings: TeachSettings,
    log: Callable[[TeachPoint], None] | None = None,
) -> list[TeachPoint]:
    """Train ``model`` in place.

    Args:
        model: On its device.
        chat: Its chat format, as the judge will use it.
        cases: Where questions come from.
        settings: How.
        log: Called with every point of the curve.

    Returns:
        The curve, about ``curve_points`` points, the last one at the end.
    """
    device = next(model.parameters()).device
    used: Any = model
    before = model.config._attn_implementation
    used.set_attn_implementation(TREE_ATTENTION)
    torch.manual_seed(settings.seed)
    heads = Heads(model, cases, settings.seed).to(device)
    optimizer = _optimizer([model, heads], settings)
    start, curve, since = time.perf_counter(), list[TeachPoint](), _Since()
    step, share, prompts = 0, 0.0, PromptEncoder(chat)
    model.train()
    while share < 1.0:
        rate = learning_rate(settings, step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        groups, with_history = step_cases(cases, settings, step)
        batch = encoded(prompts, groups, with_history, device, share >= settings.bare_share)
        loss, right, middle = answer_loss(model, batch)
        read = heads(middle, batch, groups)
        (loss + settings.head_weight * read).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seconds = time.perf_counter() - start
        since.losses.append(float(loss.detach()))
        since.heads.append(float(read.detach()))
        since.right.append(float(right))
        since.questions += batch.shape.groups * batch.shape.prompts
        share = settings.share(step, seconds)
        if share >= 1.0 or share * settings.curve_points >= len(curve) + 1:
            span = max(time.perf_counter() - since.start, 1e-9)
            curve.append(
                TeachPoint(
                    step=step,
                    share=min(share, 1.0),
                    seconds=seconds,
                    lr=rate,
                    loss=float(np.mean(since.losses)),
                    heads=float(np.mean(since.heads)),
                    right=float(np.mean(since.right)),
                    questions_per_second=since.questions / span,
                )
            )
            since = _Since()
            if log is not None:
                log(curve[-1])
    model.eval()
    used.set_attn_implementation(before)
    return curve


def learning_rate(settings: TeachSettings, step: int, share: float) -> float:
    """Linear warm-up, constant to half of the training, then linear to ``final_lr``."""
    ramp = min(1.0, (step + 1) / max(settings.lr_warmup_steps, 1))
    decay = 1.0 if share < 0.5 else 1.0 - (1.0 - settings.final_lr) * (share - 0.5) / 0.5
    return settings.lr * ramp * max(decay, settings.final_lr)


def step_cases(
    cases: CaseMaker, settings: TeachSettings, step: int
) -> tuple[list[list[Case]], bool]:
    """The questions of a step by secret, and whether its rules speak of a history.

    A function of its arguments. Every thing is drawn once before any is drawn again.
    """
    things = len(cases.world.things)
    secrets = min(settings.secrets, things)
    per_round = things // secrets
    round_, place = divmod(step, per_round)
    order = np.random.default_rng(named_seed("teach", "secrets", settings.seed, round_))
    chosen = order.permutation(things)[place * secrets : (place + 1) * secrets]
    rng = np.random.default_rng(named_seed("teach", "step", settings.seed, step))
    if step % settings.history_every == settings.history_every - 1:
        # Short ones more often: a long history costs as much as many questions without one.
        length = 1 + int(settings.longest_history * rng.random() ** 2)
        chosen, count = chosen[: -(-len(chosen) // 4)], 4 * settings.questions
        groups = [cases.game(int(thing), length, count, rng) for thing in chosen]
        with_history = True
    else:
        groups = [cases.openings(int(thing), settings.questions, rng) for thing in chosen]
        with_history = step % 2 == 0
    fewest = min(len(group) for group in groups)
    return [group[:fewest] for group in groups], with_history


class PromptEncoder:
    """The judge's own prompts as token ids, without reading the same rules again and again.

    What surrounds a question's text in a prompt is found once for each text of the rules. Where a
    tokenizer merges across that border, whole prompts are encoded.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._around: dict[str, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}

    def __call__(
        self, request: JudgeRequest, with_history: bool, with_rules: bool = True
    ) -> tuple[int, ...]:
        """Ids of ``chat.open_ids`` of the judge's messages, or of the second of them alone."""
        system, user = judge_messages(request, "direct", with_history)
        if not with_rules:
            return self._chat.open_ids((user,))
        if system.content not in self._around:
            self._around[system.content] = self._find(system)
        around = self._around[system.content]
        if around is None:
            return self._chat.open_ids((system, user))
        return (*around[0], *self._chat.encode(user.content), *around[1])

    def answer(self, word: str) -> tuple[int, ...]:
        """Ids of an answer, its end included."""
        return self._chat.assistant_ids(word)

    def _find(self, system: Message) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        probes = [f'Secret word: "{word}"\n\nQuestion 1: "Is it {word}?"' for word in ("a", "it")]
        inner = [self._chat.encode(probe) for probe in probes]
        whole = [self._chat.open_ids((system, Message("user", probe))) for probe in probes]
        length, size = len(whole[0]), len(inner[0])
        for at in range(length - size, -1, -1):
            if whole[0][at : at + size] == inner[0]:
                head, tail = whole[0][:at], whole[0][at + size :]
                return (head, tail) if (*head, *inner[1], *tail) == whole[1] else None
        return None


def encoded(
    prompts: PromptEncoder,
    groups: list[list[Case]],
    with_history: bool,
    device: torch.device,
    with_rules: bool = True,
) -> TreeBatch:
    """Cases as the judge's own prompts, with their answers."""
    return tree_batch(
        [
            [
                (prompts(case.request, with_history, with_rules), prompts.answer(case.answer))
                for case in group
            ]
            for group in groups
        ],
        device,
    )


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
        self._world = cases.world
        values = torch.from_numpy(np.array(cases.world.values))
        self.register_buffer("values", values.float(), persistent=False)
        self.register_buffer("taught", torch.from_numpy(~cases.held.pairs), persistent=False)
        self.holds, self.asks = (nn.Linear(width, values.shape[1]) for _ in range(2))
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for head in (self.holds, self.asks):
                head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / width**0.5)
                head.bias.zero_()

    def forward(self, middle: Tensor, batch: TreeBatch, groups: list[list[Case]]) -> Tensor:
        """Summed loss of both: mean over taught pairs, and mean over questions for a property."""
        states = functional.rms_norm(middle.float(), middle.shape[-1:])
        cases = [case for group in groups for case in group]
        rows = [self._world.index(case.request.task.secret) for case in cases]
        columns = torch.tensor([case.column for case in cases], device=middle.device)
        ends, asked = states[batch.sources[: len(cases)]], columns >= 0
        loss = self._holding(states[batch.ends], rows[:: batch.shape.prompts])
        loss = (loss + self._holding(ends, rows)) / 2
        if asked.any():
            loss = loss + functional.cross_entropy(self.asks(ends[asked]), columns[asked])
        return loss

    def _holding(self, states: Tensor, rows: list[int]) -> Tensor:
        taught = self.taught[rows]
        return functional.binary_cross_entropy_with_logits(
            self.holds(states)[taught], self.values[rows][taught]
        )


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
    parameters = [weight for module in modules for weight in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
