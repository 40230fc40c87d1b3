"""Teacher games of the environment errands, as tokens with exact targets.

Legend: ``B`` games, ``L`` tokens of the longest, ``E`` entries of the targets of all games.

A teacher (``envs.errands.players.Mediocre``) knows the probability of every command in a state. The
target of each token of a command is the share of that token among the commands that begin with the
tokens before it: the expectation of drawn commands, without their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from delta_belief_rl.envs.errands.game import NOT_UNDERSTOOD, WON, Errand
from delta_belief_rl.envs.errands.players import Mediocre, Random, Walk
from delta_belief_rl.envs.errands.reading import Command
from delta_belief_rl.envs.errands.tasks import COMMANDS, make_tasks
from delta_belief_rl.envs.errands.vocabulary import vocabulary
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.text.word_tokenizer import build_word_tokenizer
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, Task

TASK_SEED = 1_000_000
"""Tasks of the warm-up are those of this seed and of the split ``train``: others than a run with
``multi_turn.env_kwargs.seed=0`` plays, and in no house with an errand of another split."""
_CORPUS_TASKS = 240


@dataclass(frozen=True, slots=True)
class ErrandTeacher:
    """How the teacher plays; see ``Mediocre``."""

    wander: float = 0.1
    forgetful: float = 0.3


@dataclass(frozen=True, slots=True)
class TeacherGame:
    """One game.

    Attributes:
        token_ids: The whole stream.
        position: ``[E]``, place in the stream of the token that an entry is about.
        token: ``[E]``, a token that may stand there.
        share: ``[E]``, its probability; those of a place add up to 1.
        replies: ``[L]``, true where the environment speaks after the opening.
        won: Whether the teacher won it.
    """

    token_ids: IntArray
    position: IntArray
    token: IntArray
    share: FloatArray
    replies: BoolArray
    won: bool

    def cut(self, length: int) -> TeacherGame:
        """Its first tokens, with what is known of them."""
        if len(self.token_ids) <= length:
            return self
        kept = self.position < length
        return TeacherGame(
            token_ids=self.token_ids[:length],
            position=self.position[kept],
            token=self.token[kept],
            share=self.share[kept],
            replies=self.replies[:length],
            won=self.won,
        )


def errand_tokenizer() -> PreTrainedTokenizerBase:
    """The word tokenizer of all errands: every word that can be said or read in them."""
    return build_word_tokenizer(_corpus())


def _corpus() -> Iterator[str]:
    known = vocabulary()
    yield from (COMMANDS, NOT_UNDERSTOOD, WON, "Is it 'it'?", "on in the")
    yield from (*known.rooms, *known.kind_of, *known.items, *known.verbs.values())
    for number, task in enumerate(make_tasks("train", _CORPUS_TASKS, TASK_SEED, False)):
        yield task.messages[0].content
        env = Errand(task, 16)
        rng = np.random.default_rng(number)
        walk, teacher = Walk(env.house, env.goals, 16), Mediocre(rng)
        while not walk.done:
            command = teacher.next_command(walk)
            yield str(command)
            yield walk.take(command).text
        # Words for what has no effect.
        random = Random(rng)
        for _ in range(16):
            change = walk.take(random.next_command(walk))
            yield change.text
        for verb in dict.fromkeys(known.verbs.values()):
            for name in (*env.house.items, *env.house.fixtures):
                if verb not in ("go", "put", "look", "hands"):
                    yield Walk(env.house, env.goals, 1).take(Command(verb, name)).text


def teacher_game(
    task: Task, chat: ChatFormat, max_turns: int, teacher: ErrandTeacher, rng: np.random.Generator
) -> TeacherGame:
    """Let the teacher play a task through the environment."""
    env = Errand(task, max_turns)
    walk = Walk(env.house, env.goals, max_turns)
    player = Mediocre(rng, teacher.wander, teacher.forgetful)
    ids = list(chat.open_ids(task.messages))
    replies = [False] * len(ids)
    entries: list[tuple[int, int, float]] = []
    won = False
    while not walk.done:
        chances = player.chances(walk)
        commands = tuple(chances)
        command = commands[int(rng.choice(len(commands), p=list(chances.values())))]
        said = chat.assistant_ids(str(command))
        entries += _targets(chances, said, len(ids), chat)
        walk.take(command)
        outcome = env.apply(env.parse(str(command)), None)
        won = outcome.strict_win
        answer = chat.reply_ids(outcome.reply)
        ids += [*said, *answer]
        replies += [False] * len(said) + [True] * len(answer)
    return TeacherGame(
        token_ids=np.array(ids, dtype=np.int64),
        position=np.array([entry[0] for entry in entries], dtype=np.int64),
        token=np.array([entry[1] for entry in entries], dtype=np.int64),
        share=np.array([entry[2] for entry in entries], dtype=np.float64),
        replies=np.array(replies, dtype=np.bool_),
        won=won,
    )


def _targets(
    chances: dict[Command, float], said: Sequence[int], start: int, chat: ChatFormat
) -> Iterator[tuple[int, int, float]]:
    """(position, token, share) of each token of a command that was given at ``start``."""
    open_ones = [(chat.assistant_ids(str(command)), chance) for command, chance in chances.items()]
    for at, token in enumerate(said):
        shares: dict[int, float] = {}
        for ids, chance in open_ones:
            shares[ids[at]] = shares.get(ids[at], 0.0) + chance
        total = sum(shares.values())
        yield from ((start + at, other, share / total) for other, share in shares.items())
        open_ones = [(ids, chance) for ids, chance in open_ones if ids[at] == token]


def teacher_games(
    chat: ChatFormat, count: int, max_turns: int, teacher: ErrandTeacher, seed: int
) -> list[TeacherGame]:
    """Games of as many tasks, a function of ``seed``."""
    tasks = make_tasks("train", count, TASK_SEED + seed, False)
    return [
        teacher_game(task, chat, max_turns, teacher, np.random.default_rng([seed, number]))
        for number, task in enumerate(tasks)
    ]
