"""The warm-up of the small agent of the environment errands.

Supervised learning on games of a mediocre teacher: a command's tokens have the teacher's exact
distribution as their target, and the environment's replies are predicted with a small weight,
because a reply repeats what the model has to keep in mind. The agent then speaks the language,
looks around and often knows what to do; it wanders and forgets as its teacher does. That is what
reinforcement learning improves.

Legend: ``B`` games, ``L`` tokens of the longest, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from delta_belief_rl.envs.errands.game import Errand
from delta_belief_rl.envs.errands.tasks import make_tasks
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.warmup.errand_games import (
    ErrandTeacher,
    TeacherGame,
    errand_tokenizer,
    teacher_games,
)
from delta_belief_rl.trainer.warmup.evaluate import MAX_TURN_TOKENS, cache_keyword, draw_tokens
from delta_belief_rl.trainer.warmup.model import ModelSizes, build_model
from delta_belief_rl.trainer.warmup.train import (
    Clock,
    WarmupLog,
    WarmupSettings,
    learning_rate,
    optimizer_of,
    pick_device,
    print_line,
)
from delta_belief_rl.types import IntArray, Task, UserError, Verdict

SIZES = ModelSizes(hidden=64, layers=3, heads=4, kv_heads=4, head_dim=16, mlp=192)
"""About 180,000 parameters, 0.7 MB."""
_SORTED_TOGETHER = 8
"""Batches whose games are sorted by length before they are cut."""


@dataclass(frozen=True, slots=True)
class ErrandWarmup:
    """Settings that the warm-up of the embedded world does not have.

    Attributes:
        common: Those that both have; ``batch_games`` games are one step.
        games: Different teacher games; all are seen before one is seen again.
        reply_weight: Weight of the environment's replies in the loss.
        first_length: Tokens that the first games are cut to, as a share of the longest game. The
            cut moves on evenly and is at the end when half of the training is done: what stands in
            few tokens is learnt soonest, and costs least.
        eval_games: Games to measure with, one for each validation task in turn.
    """

    common: WarmupSettings
    games: int = 4000
    reply_weight: float = 0.2
    first_length: float = 0.3
    teacher: ErrandTeacher = field(default_factory=ErrandTeacher)
    eval_games: int = 320

    def __post_init__(self) -> None:
        if self.games < self.common.batch_games:
            raise UserError(
                f"The warm-up has {self.games} teacher games and {self.common.batch_games} in a "
                "step: ask for more of them with --teacher-games, or a smaller --batch-games."
            )
        if not 0.0 <= self.teacher.wander <= 1.0:
            raise UserError(f"--wander is {self.teacher.wander}: give a share from 0 to 1.")
        if not 0.0 < self.first_length <= 1.0:
            raise UserError(f"first_length is {self.first_length}: give a share above 0, up to 1.")
        if self.eval_games < 1 or self.common.max_turns < 1:
            raise UserError("The warm-up needs at least one turn and one game to measure with.")


@dataclass(frozen=True, slots=True)
class ErrandReport:
    """What was measured on validation tasks at temperature 1; shares between 0 and 1."""

    games: int
    teacher_win: float
    """Of the teacher, on its own tasks."""
    strict_win: float
    goals_reached: float
    """Mean share of an errand's goals that hold at the end."""
    invalid_turns: float
    no_effect_turns: float
    repeated_turns: float
    mean_turns: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def warm_up_errands(
    settings: ErrandWarmup, log: Callable[[WarmupLog], None] = print_line
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[WarmupLog], ErrandReport]:
    """Make a tokenizer and a model, train it on teacher games and measure it.

    Raises:
        UserError: Settings do not fit.
    """
    common = settings.common
    device = pick_device(common.device)
    tokenizer = errand_tokenizer()
    chat = ChatFormat.from_tokenizer(tokenizer, {})
    model: PreTrainedModel = build_model(common.sizes, tokenizer, common.seed)
    model.to(device)  # type: ignore[arg-type]
    games = teacher_games(chat, settings.games, common.max_turns, settings.teacher, common.seed)
    logs = train_on(model, games, settings, log)
    tasks = make_tasks("val", 64, 0, False)
    played = play_errands(
        model, chat, [tasks[i % len(tasks)] for i in range(settings.eval_games)],
        common.max_turns, common.seed,
    )  # fmt: skip
    return model, tokenizer, logs, _report(played, float(np.mean([game.won for game in games])))


def train_on(
    model: PreTrainedModel,
    games: Sequence[TeacherGame],
    settings: ErrandWarmup,
    log: Callable[[WarmupLog], None],
) -> list[WarmupLog]:
    """Train a model in place; returns the logged lines, the last one at the end.

    The lines' ``policy_kl`` is the KL of the model from the teacher per token of a command, and
    ``posterior_kl`` the loss per token of a reply.
    """
    common = settings.common
    device = next(model.parameters()).device
    torch.manual_seed(common.seed)
    optimizer = optimizer_of([model], common)
    rng = np.random.default_rng([common.seed, 1])
    logs: list[WarmupLog] = []
    clock, meter = Clock(common), _Meter()
    order: list[IntArray] = []
    longest = max(len(game.token_ids) for game in games)
    model.train()
    clock.restart()
    step = 0
    while (share := clock.share(step)) < 1.0:
        order = order or _epoch(games, common.batch_games, rng)
        length = _length(settings.first_length, share, longest)
        batch = [games[int(index)].cut(length) for index in order.pop()]
        rate = learning_rate(common, step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        policy, replies = batch_losses(model, batch, device)
        (policy + settings.reply_weight * replies).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        meter.add(float(policy.detach()), float(replies.detach()), batch)
        done = clock.share(step)
        if done >= 1.0 or clock.elapsed() - meter.since >= common.log_seconds:
            logs.append(meter.line(step, done, clock.elapsed(), rate))
            log(logs[-1])
    model.eval()
    return logs


def _length(first: float, share: float, longest: int) -> int:
    """Tokens of a game that are trained on, after a share of the training."""
    return math.ceil(longest * min(1.0, first + (1.0 - first) * 2.0 * share))


def _epoch(games: Sequence[TeacherGame], batch: int, rng: np.random.Generator) -> list[IntArray]:
    """All games once, those of similar length together, what does not fill a batch left out."""
    numbers = rng.permutation(len(games))[: len(games) // batch * batch]
    lengths = np.array([len(game.token_ids) for game in games])
    batches: list[IntArray] = []
    for start in range(0, len(numbers), batch * _SORTED_TOGETHER):
        part = numbers[start : start + batch * _SORTED_TOGETHER]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += list(part.reshape(-1, batch))
    return [batches[int(index)] for index in rng.permutation(len(batches))]


def batch_losses(
    model: PreTrainedModel, games: Sequence[TeacherGame], device: torch.device
) -> tuple[Tensor, Tensor]:
    """KL from the teacher per token of a command, and loss per token of a reply, in nats.

    Padding stands on the right, where a causal model cannot see it from the trained places. A loss
    is 0 where the games, which may be cut, have no such token.
    """
    longest = max(len(game.token_ids) for game in games)
    ids = torch.zeros((len(games), longest), dtype=torch.long)
    spoken = torch.zeros((len(games), longest), dtype=torch.bool)
    for row, game in enumerate(games):
        ids[row, : len(game.token_ids)] = torch.from_numpy(game.token_ids)
        spoken[row, : len(game.token_ids)] = torch.from_numpy(game.replies)
    rows = np.repeat(np.arange(len(games)), [len(game.position) for game in games])
    row = torch.from_numpy(rows).to(device)
    place, token, share = (
        torch.from_numpy(np.concatenate([getattr(game, name) for game in games])).to(device)
        for name in ("position", "token", "share")
    )
    ids, spoken = ids.to(device), spoken.to(device)
    logp = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    share = share.float()
    places = torch.unique(row * longest + place).numel()
    policy = (share * (share.log() - logp[row, place - 1, token])).sum() / max(places, 1)
    told = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    replies = -(told * spoken[:, 1:]).sum() / spoken.sum().clamp(min=1)
    return policy, replies


class _Meter:
    """Means since the last line."""

    def __init__(self) -> None:
        self.since = 0.0
        self._losses: list[tuple[float, float]] = []
        self._tokens = 0

    def add(self, policy: float, replies: float, batch: Sequence[TeacherGame]) -> None:
        self._losses.append((policy, replies))
        self._tokens += sum(len(game.token_ids) for game in batch)

    def line(self, step: int, share: float, seconds: float, lr: float) -> WarmupLog:
        policy, replies = np.mean(self._losses, axis=0).tolist()
        rate = self._tokens / max(seconds - self.since, 1e-9)
        self.since, self._losses, self._tokens = seconds, [], 0
        return WarmupLog(step, share, seconds, lr, policy, replies, rate)


# --- measuring ----------------------------------------------------------------------------------


@dataclass(slots=True)
class PlayedErrand:
    """A game of the model: what the environment said of each command."""

    env: Errand
    forced: list[int]
    action: list[int] = field(default_factory=list[int])
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    in_vain: int = 0
    done: bool = False

    @property
    def won(self) -> bool:
        """Whether the last command won it."""
        return self.verdicts[-1:] == [Verdict.WIN]

    def advance(self, sampled: int, chat: ChatFormat) -> int:
        """The token that follows: given, or the sampled one, which may end a command."""
        if self.done:
            return chat.eot_id
        if self.forced:
            return self.forced.pop(0)
        self.action.append(sampled)
        ended = sampled == chat.eot_id
        if ended or len(self.action) >= MAX_TURN_TOKENS:
            text = chat.decode(self.action[:-1] if ended else self.action)
            outcome = self.env.apply(self.env.parse(text), None)
            self.verdicts.append(outcome.verdict)
            self.in_vain += "no_effect" in outcome.diagnostics
            self.done, self.action = outcome.done, []
            self.forced = [*([] if ended else [chat.eot_id]), *chat.reply_ids(outcome.reply)]
        return sampled


@torch.no_grad()
def play_errands(
    model: PreTrainedModel,
    chat: ChatFormat,
    tasks: Sequence[Task],
    max_turns: int,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[PlayedErrand]:
    """One game for every task, in lock step with one key-value cache.

    All rows advance by one token at a time, each by its own next given or sampled one, so no row is
    padded.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    games = [
        PlayedErrand(Errand(task, max_turns), list(chat.open_ids(task.messages))) for task in tasks
    ]
    rows = list(games)
    cache, keyword = DynamicCache(config=model.config), cache_keyword(model)
    feed = torch.tensor([[game.forced.pop(0)] for game in rows], device=device)
    model.eval()
    while rows:
        logits = model(input_ids=feed, use_cache=True, **{keyword: cache}).logits[:, -1]
        sampled = draw_tokens(logits.float(), temperature, generator).tolist()
        fed = [game.advance(token, chat) for game, token in zip(rows, sampled, strict=True)]
        going = [index for index, game in enumerate(rows) if not game.done]
        if len(going) <= 0.75 * len(rows):
            rows, fed = [rows[i] for i in going], [fed[i] for i in going]
            if rows:
                cache.batch_select_indices(torch.tensor(going, device=device, dtype=torch.long))
        feed = torch.tensor(fed, device=device)[:, None]
    return games


def _report(games: Sequence[PlayedErrand], teacher_win: float) -> ErrandReport:
    verdicts = [verdict for game in games for verdict in game.verdicts]
    return ErrandReport(
        games=len(games),
        teacher_win=teacher_win,
        strict_win=float(np.mean([game.won for game in games])),
        goals_reached=float(np.mean([g.env.progress() / len(g.env.goals) for g in games])),
        invalid_turns=verdicts.count(Verdict.INVALID) / len(verdicts),
        no_effect_turns=sum(game.in_vain for game in games) / len(verdicts),
        repeated_turns=verdicts.count(Verdict.REPEATED) / len(verdicts),
        mean_turns=len(verdicts) / len(games),
    )


def record_of(
    settings: ErrandWarmup, logs: Sequence[WarmupLog], measured: ErrandReport
) -> dict[str, object]:
    """What ``warmup.json`` says."""
    return {
        "env": "errands",
        "seed": settings.common.seed,
        "settings": asdict(settings),
        "measured": measured.as_dict(),
        "log": [asdict(line) for line in logs[:: max(1, len(logs) // 50)]],
    }
