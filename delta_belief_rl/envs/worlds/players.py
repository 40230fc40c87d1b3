"""Players of the embedded world: a random one, the warm-up's teacher, and the ceiling.

All of them reason exactly from the table; they differ in which questions they choose. Every random
choice comes from the generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from delta_belief_rl.envs.base import JudgeReply
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar, answer
from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.types import BoolArray, IntArray, Task, UserError, Verdict

GUESS_FORMS = ("Is it {article} {name}?", "Is it '{name}'?")
"""With an article, and as the belief is elicited."""


class Player(Protocol):
    """One player of one game."""

    def next_action(self, rng: np.random.Generator) -> str:
        """The text of the next action."""
        ...

    def observe(self, action: str, verdict: Verdict) -> None:
        """Learn the verdict on an action."""
        ...


PlayerFactory = Callable[[Grammar, int], Player]
"""Makes a player from the world's parser and the number of turns."""


@dataclass(frozen=True, slots=True)
class GameRecord:
    """A finished game.

    Attributes:
        turns: Actions taken.
        won: Whether the last one was a direct guess of the secret.
        texts: (action, reply) pairs.
        verdicts: One for each action.
    """

    secret: str
    turns: int
    won: bool
    texts: tuple[tuple[str, str], ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class WinRate:
    """Games won, and turns per game (lost games count with all their turns)."""

    wins: int
    games: int
    mean_turns: float

    @property
    def rate(self) -> float:
        """Share of games won."""
        return self.wins / self.games


class _TablePlayer:
    """What the three players share: exact knowledge, what was asked, and how things are said.

    Args:
        grammar: The world's parser.
        max_turns: Actions in a game; the last one is always a guess.
        candidates: Names of the possible secrets; all things when None.
        quoted: Share of guesses in the form "Is it 'NAME'?".
    """

    def __init__(
        self,
        grammar: Grammar,
        max_turns: int,
        candidates: Sequence[str] | None = None,
        quoted: float = 0.3,
    ) -> None:
        self.grammar = grammar
        self.world = grammar.world
        self.knowledge = Knowledge.start(self.world, candidates)
        self.turns_left = max_turns
        self.quoted = quoted
        self.asked: BoolArray = np.zeros(len(self.world.properties), dtype=np.bool_)

    def next_action(self, rng: np.random.Generator) -> str:
        """A guess where the player wants one or has nothing left to ask, else a question."""
        open_questions = np.flatnonzero(~self.asked)
        count = self.knowledge.num_consistent
        forced = count <= 1 or self.turns_left <= 1 or len(open_questions) == 0
        if count and (forced or self._wants_guess(count, rng)):
            return self._guess(rng)
        if len(open_questions) == 0:
            raise UserError("No thing of the world fits the answers, and every question was asked.")
        chosen = self._choose(open_questions, rng)
        phrasings = self.world.properties[chosen].phrasings
        return sentence(phrasings[int(rng.integers(len(phrasings)))])

    def observe(self, action: str, verdict: Verdict) -> None:
        """Take in the verdict; a question counts as asked whatever became of it."""
        self.turns_left -= 1
        parsed = self.grammar.parse(action)
        if parsed.kind == "property" and parsed.property_key is not None:
            self.asked[self.world.property_index(parsed.property_key)] = True
            if verdict in (Verdict.YES, Verdict.NO):
                self.knowledge = self.knowledge.learn(parsed.property_key, verdict is Verdict.YES)
        elif parsed.kind == "guess" and parsed.thing is not None and verdict is Verdict.NO:
            self.knowledge = self.knowledge.rule_out(parsed.thing)

    def _wants_guess(self, count: int, rng: np.random.Generator) -> bool:
        raise NotImplementedError

    def _choose(self, open_questions: IntArray, rng: np.random.Generator) -> int:
        raise NotImplementedError

    def _guess(self, rng: np.random.Generator) -> str:
        names = self.knowledge.names()
        name = names[int(rng.integers(len(names)))]
        form = GUESS_FORMS[int(rng.random() < self.quoted)]
        return form.format(article="an" if name[0] in "aeiou" else "a", name=name)

    def _splitting(self, open_questions: IntArray) -> IntArray:
        """Those questions whose answer is not known already."""
        share = self.knowledge.split()[open_questions]
        return open_questions[(share > 0.0) & (share < 1.0)]


class RandomPlayer(_TablePlayer):
    """Asks any question that was not asked; guesses when one thing is left or on the last turn."""

    def _wants_guess(self, count: int, rng: np.random.Generator) -> bool:
        return False

    def _choose(self, open_questions: IntArray, rng: np.random.Generator) -> int:
        return int(rng.choice(open_questions))


class MediocrePlayer(_TablePlayer):
    """The teacher of the warm-up: makes no mistakes, and chooses its questions poorly.

    It never repeats a question and guesses only what fits the answers. A question is informative
    with probability ``informative`` and any unasked one otherwise. With ``n`` things left it
    guesses with probability ``eagerness / n``.

    Args:
        informative: Share of questions chosen among those whose answer is not known already.
        eagerness: Numerator of the guessing probability.
    """

    def __init__(
        self,
        grammar: Grammar,
        max_turns: int,
        candidates: Sequence[str] | None = None,
        quoted: float = 0.3,
        informative: float = 1.0 / 3.0,
        eagerness: float = 0.8,
    ) -> None:
        super().__init__(grammar, max_turns, candidates, quoted)
        self.informative = informative
        self.eagerness = eagerness

    def _wants_guess(self, count: int, rng: np.random.Generator) -> bool:
        return bool(rng.random() < self.eagerness / count)

    def _choose(self, open_questions: IntArray, rng: np.random.Generator) -> int:
        if rng.random() < self.informative:
            splitting = self._splitting(open_questions)
            if len(splitting):
                return int(rng.choice(splitting))
        return int(rng.choice(open_questions))


class SplitterPlayer(_TablePlayer):
    """The ceiling: asks what halves the consistent things best; guesses among one or two."""

    def _wants_guess(self, count: int, rng: np.random.Generator) -> bool:
        return count <= 2 or len(self._splitting(np.flatnonzero(~self.asked))) == 0

    def _choose(self, open_questions: IntArray, rng: np.random.Generator) -> int:
        imbalance = np.abs(self.knowledge.split()[open_questions] - 0.5)
        best = open_questions[imbalance <= imbalance.min() + 1e-9]
        return int(rng.choice(best))


def sentence(phrasing: str) -> str:
    """A phrasing of the table as a question: first letter capital, question mark at the end."""
    return f"{phrasing[:1].upper()}{phrasing[1:]}?"


def play(
    player: Player,
    world: World,
    secret: str,
    max_turns: int,
    rng: np.random.Generator,
    grammar: Grammar | None = None,
) -> GameRecord:
    """Play one game through the environment itself, with the table as judge.

    Args:
        secret: Name of a thing.
        grammar: The world's parser; built when None, which costs more than a game.
    """
    grammar = grammar or Grammar(world)
    task = Task(id="game", source="tw_q", secret=secret, messages=())
    env = WorldTwentyQuestions(task, world_settings(max_turns), grammar)
    texts: list[tuple[str, str]] = []
    verdicts: list[Verdict] = []
    done = False
    while not done:
        text = player.next_action(rng)
        action = env.parse(text)
        reply = None
        if action.needs_judge:
            reply = JudgeReply(answer(world, grammar.parse(text), env.secret))
        outcome = env.apply(action, reply)
        player.observe(text, outcome.verdict)
        texts.append((text, outcome.reply))
        verdicts.append(outcome.verdict)
        done = outcome.done
    won = verdicts[-1] is Verdict.WIN
    return GameRecord(env.secret, len(texts), won, tuple(texts), tuple(verdicts))


def win_rate(
    player_factory: PlayerFactory,
    world: World,
    secrets: Sequence[str],
    max_turns: int,
    games: int,
    seed: int,
) -> WinRate:
    """Play ``games`` games in all, over the secrets in turn.

    Game ``i`` has its own random stream, a function of (seed, i).

    Raises:
        UserError: Without a secret or a game.
    """
    if not secrets or games < 1:
        raise UserError("A win rate needs at least one secret and one game.")
    grammar = Grammar(world)
    wins = turns = 0
    for number in range(games):
        rng = np.random.default_rng([seed, number])
        secret = secrets[number % len(secrets)]
        record = play(player_factory(grammar, max_turns), world, secret, max_turns, rng, grammar)
        wins += record.won
        turns += record.turns
    return WinRate(wins, games, turns / games)
