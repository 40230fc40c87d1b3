"""What a step reads: questions, as the judge's own prompts, with the table's answers.

The lesson of a step is a function of the settings and the step's number, so processes can prepare
lessons ahead and the result is the same for any number of them.

Legend: ``S`` groups of ``K`` questions each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.judge.prompts import judge_messages
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.processes import data_processes
from delta_belief_rl.trainer.teach.cases import Case, CaseMaker
from delta_belief_rl.trainer.teach.settings import TeachSettings
from delta_belief_rl.trainer.teach.tree import TreeBatch, tree_batch
from delta_belief_rl.types import Message

_AHEAD = 4
"""Lessons that each process prepares ahead."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The questions of one step.

    Attributes:
        batch: The prompts and what is trained on.
        rows: ``[S * K]``, the thing that each question is about.
        columns: ``[S * K]``, the property that it asks for; -1 where there is none.
    """

    batch: TreeBatch
    rows: Tensor
    columns: Tensor

    def to(self, device: torch.device) -> Lesson:
        """The same on another device."""
        return replace(
            self,
            batch=self.batch.to(device),
            rows=self.rows.to(device),
            columns=self.columns.to(device),
        )


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


def lesson(
    prompts: PromptEncoder,
    cases: CaseMaker,
    groups: list[list[Case]],
    with_history: bool,
    with_rules: bool = True,
) -> Lesson:
    """Questions as the judge's own prompts, with their answers, on the CPU."""
    batch = tree_batch(
        [
            [
                (prompts(case.request, with_history, with_rules), prompts.answer(case.answer))
                for case in group
            ]
            for group in groups
        ]
    )
    flat = [case for group in groups for case in group]
    rows = [cases.world.index(case.request.task.secret) for case in flat]
    return Lesson(batch, torch.tensor(rows), torch.tensor([case.column for case in flat]))


def lessons(cases: CaseMaker, chat: ChatFormat, settings: TeachSettings) -> Iterator[Lesson]:
    """One lesson after another without end, from this process or from ``settings.workers``."""
    options: dict[str, Any] = {}
    if settings.workers:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        context = data_processes([__name__])
        options = {"multiprocessing_context": context, "prefetch_factor": _AHEAD}
    return iter(
        DataLoader(
            _Lessons(cases, PromptEncoder(chat), settings),
            batch_size=None,
            sampler=_Turns(settings),
            num_workers=settings.workers,
            collate_fn=_as_it_is,
            **options,
        )
    )


class _Turns:
    """Which step comes next and whether its prompts have the rules; asked in the main process."""

    def __init__(self, settings: TeachSettings) -> None:
        self._settings = settings

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        start = time.perf_counter()
        for step in count():
            share = self._settings.share(step, time.perf_counter() - start)
            yield step, share >= self._settings.bare_share


class _Lessons(Dataset[Lesson]):
    """Lessons by their turn."""

    def __init__(self, cases: CaseMaker, prompts: PromptEncoder, settings: TeachSettings) -> None:
        self._cases, self._prompts, self._settings = cases, prompts, settings

    def __getitem__(self, turn: tuple[int, bool]) -> Lesson:
        step, with_rules = turn
        groups, with_history = step_cases(self._cases, self._settings, step)
        return lesson(self._prompts, self._cases, groups, with_history, with_rules)


def _as_it_is(one: Any) -> Any:
    return one
