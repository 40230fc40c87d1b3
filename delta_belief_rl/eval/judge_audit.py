"""What stored games say of the judge that answered them.

Only "yes" and "no" are compared: whether a question is repeated depends on the game, and wins are
found by rules. Questions are equal when their normal forms are (``envs.answers.normalise``). The
published nine files give 5.1 to 7.1 % contradictions by ``Consistency.rate`` of each file, and
93.7 and 92.5 % agreement of the two judges by ``Agreement.rate`` at the two steps that have equal
weights. The agreement of the full-precision judge with itself is published as 93.3 to 93.9 %: these
are the neighbouring files of steps 4, 5, 8 and 9; over all pairs of its five files it is 93.1 to
94.6 %.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.eval.agreement import (
    DRAWS,
    Agreement,
    AnswerTable,
    Consistency,
    Said,
    agreement,
    consistency,
)
from delta_belief_rl.eval.analyze import label_files
from delta_belief_rl.eval.published import StoredGame, StoredGames, read_games

_COMPARED = ("yes", "no")


@dataclass(frozen=True, slots=True)
class FileAudit:
    """One file.

    Attributes:
        label: Short name, unique among the files of a call.
        turns: Questions of all games.
        errors: Turns that the judge failed; None where the form of some line cannot tell.
        invalid: Turns whose reply says that the question was not valid.
        flagged: Turns whose reply says that the question was asked before.
        repeats: Questions whose normal form was asked before in the same game.
        unflagged: Repeats that the reply does not call repeated.
        consistency: Over the yes/no answers; ``within`` and ``between`` games.
    """

    label: str
    games: int
    secrets: int
    damaged: int
    turns: int
    errors: int | None
    invalid: int
    flagged: int
    repeats: int
    unflagged: int
    consistency: Consistency

    @property
    def error_rate(self) -> float | None:
        """Share of turns that the judge failed."""
        return None if self.errors is None else self.errors / max(self.turns, 1)


@dataclass(frozen=True, slots=True)
class PairAudit:
    """Two files on the questions that both have."""

    first: str
    second: str
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class GamesAudit:
    """Some files, every pair of them, and all together.

    Attributes:
        together: Consistency of all answers, ``within`` and ``between`` files; None for one file.
    """

    files: tuple[FileAudit, ...]
    pairs: tuple[PairAudit, ...]
    together: Consistency | None

    def rates(self) -> Iterator[tuple[str, float]]:
        """Every agreement that a bound can be put on, by name."""
        for file in self.files:
            yield f"the consistency of {file.label}", file.consistency.rate.value
        for pair in self.pairs:
            yield f"the agreement of {pair.first} and {pair.second}", pair.agreement.rate.value

    def error_rates(self) -> Iterator[tuple[str, float]]:
        """Every error rate that is known, by name."""
        for file in self.files:
            if file.error_rate is not None:
                yield f"the error rate of {file.label}", file.error_rate


def audit_files(
    paths: Sequence[str | os.PathLike[str]], *, draws: int = DRAWS, seed: int = 0
) -> GamesAudit:
    """Audit the judges of stored games.

    Args:
        paths: Files of games of this project or of the published schema.
        draws: Bootstrap samples.
        seed: Names the draws.

    Raises:
        UserError: A file is missing, holds no game, or is named twice.
    """
    labels = label_files(paths)
    stored = [read_games(path) for path in paths]
    tables = [answer_table(file.games) for file in stored]
    return GamesAudit(
        files=tuple(
            _audit(file, label, table, draws, seed)
            for file, label, table in zip(stored, labels, tables, strict=True)
        ),
        pairs=tuple(
            PairAudit(labels[i], labels[j], agreement(tables[i], tables[j], draws=draws, seed=seed))
            for i, j in combinations(range(len(tables)), 2)
        ),
        together=consistency(_by_file(tables), draws=draws, seed=seed) if len(tables) > 1 else None,
    )


def answer_table(games: Sequence[StoredGame]) -> AnswerTable:
    """The yes/no answers of some games; the source of an answer is its game's number."""
    out: dict[tuple[str, str], list[Said]] = {}
    for number, game in enumerate(games):
        for turn in game.exchanges:
            word = normalise(turn.reply)
            if word in _COMPARED and not turn.failed:
                key = (game.secret, normalise(turn.question))
                out.setdefault(key, []).append(Said(number, word))
    return out


def count_repeats(game: StoredGame) -> tuple[int, int]:
    """Questions that were asked before in the game, and those of them that no reply calls so."""
    seen: set[str] = set()
    repeats = unflagged = 0
    for turn in game.exchanges:
        key = normalise(turn.question)
        repeats += key in seen
        unflagged += key in seen and not turn.repeated
        seen.add(key)
    return repeats, unflagged


def _audit(stored: StoredGames, label: str, table: AnswerTable, draws: int, seed: int) -> FileAudit:
    games = stored.games
    turns = [turn for game in games for turn in game.exchanges]
    repeats = [count_repeats(game) for game in games]
    known = all(turn.failed is not None for turn in turns)
    return FileAudit(
        label=label,
        games=len(games),
        secrets=len({game.secret for game in games}),
        damaged=len(stored.damaged),
        turns=len(turns),
        errors=sum(bool(turn.failed) for turn in turns) if known else None,
        invalid=sum(turn.invalid for turn in turns),
        flagged=sum(turn.repeated for turn in turns),
        repeats=sum(count for count, _ in repeats),
        unflagged=sum(count for _, count in repeats),
        consistency=consistency(table, draws=draws, seed=seed),
    )


def _by_file(tables: Sequence[AnswerTable]) -> AnswerTable:
    """All answers in one table; the source of an answer is its file's number."""
    out: dict[tuple[str, str], list[Said]] = {}
    for number, table in enumerate(tables):
        for key, said in table.items():
            out.setdefault(key, []).extend(Said(number, one.word) for one in said)
    return out
