"""What a judge of an embedded world is taught: questions and the table's answers, and what is held
out of them.

Two things are held out, each to be measured apart. A held-out *phrasing* is never seen with any
thing; its words are, in other phrasings, because a model without other knowledge cannot know what
a word means that it never saw. A held-out *pair* of a thing and a property is never asked in any
words; to answer it, a model must tell from what is alike.

Legend: ``N`` things, ``P`` properties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.players import sentence
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.envs.worlds.tasks import SOURCE
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.types import BoolArray, Task

GUESSES = (
    "Is it {article} {name}?",
    "Is it the {name}?",
    "Is it '{name}'?",
    "Could it be {article} {name}?",
)
INVALID = (
    "What is it?",
    "How big is it?",
    "Where do people find it?",
    "Tell me about it.",
    "Why?",
    "Is it {article} {name} or {other_article} {other}?",
    "Is it not {article} {name}?",
    "What color does it have?",
    "Do you like it?",
)
"""Kinds of questions that the table cannot answer; every kind is taught."""
INVALID_HELD = ("What does it do?", "How long is it?", "Where is it?", "Do you have it?")
"""Further ones, made of the same words, that are only measured."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the judge, and the word that it has to say.

    Attributes:
        column: The property that is asked for; -1 where none is.
    """

    request: JudgeRequest
    answer: str
    column: int = -1


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What is never taught.

    Attributes:
        phrasings: At most one for each property, by its key.
        pairs: ``[N, P]``, true where thing and property are never brought together.
    """

    phrasings: Mapping[str, str]
    pairs: BoolArray


def hold_out(world: World, pair_share: float, seed: int) -> HeldOut:
    """Choose what is held out; a function of the arguments.

    A property gives up one phrasing, never its first, if each word of it also stands in a phrasing
    that is taught.

    Args:
        pair_share: Chance of every pair to be held out.
        seed: Names the draws.
    """
    rng = np.random.default_rng(named_seed("teach", "held", seed))
    taught = Counter(
        word
        for prop in world.properties
        for text in prop.phrasings
        for word in set(sentence(text).rstrip("?").split())
    )
    phrasings: dict[str, str] = {}
    for prop in world.properties:
        others = prop.phrasings[1:]
        for number in rng.permutation(len(others)):
            words = set(sentence(others[number]).rstrip("?").split())
            if all(taught[word] > 1 for word in words):
                phrasings[prop.key] = others[number]
                taught.subtract(words)
                break
    pairs = rng.random(world.values.shape) < pair_share
    return HeldOut(phrasings, pairs)


class CaseMaker:
    """Draws cases; every answer is the table's own.

    Args:
        world: The table.
        held: What is never taught.
    """

    def __init__(self, world: World, held: HeldOut) -> None:
        self.world = world
        self.held = held
        self._judge = WorldJudge(world, Grammar(world))
        self._tasks = [
            Task(f"teach_{thing.name}", SOURCE, thing.name, (), aliases=thing.aliases)
            for thing in world.things
        ]
        self._taught = [
            [text for text in prop.phrasings if held.phrasings.get(prop.key) != text]
            for prop in world.properties
        ]
        columns = np.arange(len(world.properties))
        self._yes, self._no = (
            [columns[row & ~out] for row, out in zip(values, held.pairs, strict=True)]
            for values in (world.values, ~world.values)
        )

    def case(self, thing: int, question: str, history: tuple[tuple[str, str], ...] = ()) -> Case:
        """The case of one question about a thing (its row)."""
        request = JudgeRequest(self._tasks[thing], question, history)
        key = self._judge.grammar.parse(question).property_key
        column = -1 if key is None else self.world.property_index(key)
        return Case(request, self._judge.answer([request])[0].text, column)

    def openings(self, thing: int, count: int, rng: np.random.Generator) -> list[Case]:
        """Cases without a history.

        About one in eight is a guess, half of these right; one in sixteen is invalid. The others
        ask for different properties, half of them such as hold, as far as there are so many.
        """
        kinds = rng.random(count)
        texts = [self._guess(thing, kind < 1 / 16, rng) for kind in kinds if kind < 1 / 8]
        texts += [self.invalid(INVALID, rng) for kind in kinds if 1 / 8 <= kind < 3 / 16]
        texts += [
            self._question(column, rng) for column in self._balanced(thing, count - len(texts), rng)
        ]
        return [self.case(thing, text) for text in texts]

    def game(self, thing: int, length: int, count: int, rng: np.random.Generator) -> list[Case]:
        """Cases behind one history of ``length`` answered questions, one in four a repetition.

        The history is that of a game: the table's answers, now and then to a wrong guess or an
        invalid question.
        """
        history: tuple[tuple[str, str], ...] = ()
        asked: list[int] = []
        for column in self._balanced(thing, length, rng):
            kind = rng.random()
            if kind < 0.1:
                text = self._guess(thing, False, rng)
            elif kind < 0.15:
                text = self.invalid(INVALID, rng)
            else:
                text = self._question(column, rng)
                asked.append(column)
            history = (*history, (text, self.case(thing, text, history).answer))
        fresh = [case.request.action for case in self.openings(thing, count, rng)]
        repeats = min(count // 4, len(asked))
        again = rng.choice(asked, repeats) if repeats else ()
        texts = [self._question(int(column), rng) for column in again]
        return [self.case(thing, text, history) for text in [*texts, *fresh][:count]]

    def measured(self, count: int, rng: np.random.Generator) -> dict[str, list[Case]]:
        """Cases to measure a judge with, by kind, ``count`` of each kind where there are so many.

        Things take turns. ``taught`` asks taught pairs in taught words, ``phrasings`` taught pairs
        in held-out words, ``pairs`` held-out pairs in taught words; of these, questions to be
        answered yes and no take turns as far as there are both. ``guesses`` are right and wrong in
        turn, ``invalid`` are of held-out forms. ``history`` and ``repeats`` show 1 to 19 earlier
        questions; the latter ask one of them again.
        """
        order = [int(thing) for _ in range(count) for thing in rng.permutation(len(self._tasks))]
        held, out = self.held.pairs, dict[str, list[Case]]()
        worded = np.array([prop.key in self.held.phrasings for prop in self.world.properties])
        for kind, allowed in (("taught", ~held), ("phrasings", ~held & worded), ("pairs", held)):
            found: list[Case] = []
            for number, thing in enumerate(order[: 2 * count]):
                sides = [allowed[thing] & (self.world.values[thing] == s) for s in (True, False)]
                columns = np.flatnonzero(sides[number % 2])
                if not len(columns) or len(found) == count:
                    continue
                column = int(rng.choice(columns))
                key = self.world.properties[column].key
                text = (
                    sentence(self.held.phrasings[key])
                    if kind == "phrasings"
                    else self._question(column, rng)
                )
                found.append(self.case(thing, text))
            out[kind] = found
        some = list(enumerate(order[:count]))
        out["guesses"] = [
            self.case(thing, self._guess(thing, number % 2 == 0, rng)) for number, thing in some
        ]
        out["invalid"] = [self.case(thing, self.invalid(INVALID_HELD, rng)) for _, thing in some]
        games = [self.game(thing, int(rng.integers(1, 20)), 16, rng) for _, thing in some]
        for kind, again in (("repeats", True), ("history", False)):
            out[kind] = [
                case
                for game in games
                for case in [one for one in game if (one.answer == "Repeated") == again][-1:]
            ]
        return out

    def invalid(self, forms: Sequence[str], rng: np.random.Generator) -> str:
        """A question of one of the forms."""
        form = forms[int(rng.integers(len(forms)))]
        name, other = (self._name(int(rng.integers(len(self._tasks))), rng) for _ in range(2))
        return form.format(
            article=_article(name), name=name, other_article=_article(other), other=other
        )

    def _question(self, column: int, rng: np.random.Generator) -> str:
        """A property in one of its taught phrasings."""
        texts = self._taught[column]
        return sentence(texts[rng.integers(len(texts))])

    def _guess(self, thing: int, right: bool, rng: np.random.Generator) -> str:
        others = len(self._tasks)
        named = thing if right else (thing + int(rng.integers(1, others))) % others
        name = self._name(named, rng)
        return GUESSES[rng.integers(len(GUESSES))].format(article=_article(name), name=name)

    def _name(self, thing: int, rng: np.random.Generator) -> str:
        names = (self.world.things[thing].name, *self.world.things[thing].aliases)
        return names[rng.integers(len(names))]

    def _balanced(self, thing: int, count: int, rng: np.random.Generator) -> list[int]:
        """Different taught properties of a thing in random order, half of them true if possible."""
        yes, no = (rng.permutation(side[thing]) for side in (self._yes, self._no))
        half = count // 2 + (count % 2 and int(rng.integers(2)))
        held = min(max(half, count - len(no)), len(yes))
        chosen = np.concatenate([yes[:held], no[: count - held]])
        return [int(column) for column in rng.permutation(chosen)]


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"
