"""Everything that a file of stored games says, and how files compare.

Rates are fractions of 1, beliefs are nats, turns count from 1. Every rate has a 95 % interval by
bootstrap over secrets. Its standard error is that of 2,000 draws; the published column of such
errors (1.43, 1.79, 1.52, ... points) comes out to the digit when one generator with seed 0 serves
the nine published files in the order of their table. Here each file has a generator of its own, so
that a file's numbers do not depend on what is analysed beside it; both differ by up to 0.05 points,
which is the error of 2,000 draws.

A game whose judge or engine failed has no outcome: it is left out of the rates and counted as lost
in those named ``errors_as_losses``. Only our own files can tell such games.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from delta_belief_rl.envs.parquet import read_secrets
from delta_belief_rl.eval.game_statistics import (
    BeliefStats,
    QuestionStats,
    Relation,
    WinKind,
    answer_agreement,
    belief_stats,
    prior_noise,
    question_stats,
    relations,
    win_kinds,
)
from delta_belief_rl.eval.metrics import pass_at_k_curve
from delta_belief_rl.eval.published import Form, StoredGame, StoredGames, read_games
from delta_belief_rl.eval.statistics import (
    Interval,
    cluster_bootstrap,
    mean_at_n,
    paired_difference,
    std_at_n,
)
from delta_belief_rl.types import FloatArray, UserError

DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Wins of a file under one rule.

    Attributes:
        counts: Secret to (wins, games with an outcome).
        errors_as_losses: The rate when games without an outcome count as lost.
        mean, std: ``mean@n`` and ``std@n``; NaN unless every secret has the same number of games.
        pass_at_k: For every ``k`` that each secret has games for.
        by_turn: Share won within ``t`` turns, ``t = 0 .. T``.
    """

    wins: int
    rate: Interval
    errors_as_losses: float
    mean: float
    std: float
    pass_at_k: Mapping[int, float]
    by_turn: tuple[float, ...]
    counts: Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Subset:
    """A part of a file's secrets, e.g. those that are training secrets too."""

    secrets: int
    games: int
    compatible: Interval
    strict: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """A file against the first one, over the secrets of both.

    Attributes:
        compatible, strict: Differences of rates, this file minus the first, paired over secrets.
        agreement: Share of equal yes/no replies to one question about one secret.
        answer_pairs: Pairs of replies behind it.
    """

    first: str
    secrets: int
    compatible: Interval
    strict: Interval
    agreement: float
    answer_pairs: int


@dataclass(frozen=True, slots=True)
class FileAnalysis:
    """One file.

    Attributes:
        label: Short name, unique among the files of a call.
        stored: The games and the damaged lines.
        n: Games of each secret; None where secrets differ.
        subsets: ``overlap`` and ``clean`` where training secrets are given.
        same_priors: Labels of earlier files whose first beliefs are equal bit by bit, with the
            number of games compared: the same weights played both.
        notes: What a reader must know to read the numbers right, a sentence each.
    """

    label: str
    stored: StoredGames
    n: int | None
    compatible: Outcome
    strict: Outcome
    kinds: Mapping[WinKind, int]
    questions: QuestionStats
    beliefs: Mapping[str, BeliefStats | None]
    noise: tuple[float, float]
    relations: tuple[Relation, ...]
    subsets: Mapping[str, Subset]
    comparison: Comparison | None = None
    same_priors: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def games(self) -> tuple[StoredGame, ...]:
        """The games in the order of the file."""
        return self.stored.games

    @property
    def secrets(self) -> int:
        """Different secrets."""
        return len(self.compatible.counts)

    @property
    def failed_games(self) -> int | None:
        """Games without an outcome; None where the form of some line cannot tell."""
        if any(game.failed is None for game in self.games):
            return None
        return sum(game.void() for game in self.games)


def analyze_files(
    paths: Sequence[str | os.PathLike[str]],
    *,
    train_secrets: Set[str] = frozenset(),
    draws: int = DRAWS,
    seed: int = 0,
) -> list[FileAnalysis]:
    """Read and analyse files; every one but the first is also compared with the first.

    Args:
        paths: Files of games, ``.jsonl`` or ``.jsonl.gz``.
        train_secrets: Secrets of the training data, compared without regard to case.
        draws: Bootstrap samples.
        seed: Names the draws.

    Raises:
        UserError: A file is missing, holds no game, or is named twice.
    """
    labels = label_files(paths)
    files: list[FileAnalysis] = []
    for path, label in zip(paths, labels, strict=True):
        file = analyze(read_games(path), label, train_secrets=train_secrets, draws=draws, seed=seed)
        if files:
            same = {one.label: n for one in files if (n := _same_priors(one, file))}
            compared = compare(files[0], file, draws=draws, seed=seed)
            file = replace(file, comparison=compared, same_priors=same)
            file = replace(file, notes=(*file.notes, *_pair_notes(files[0], file)))
        files.append(file)
    return files


def analyze(
    stored: StoredGames,
    label: str,
    *,
    train_secrets: Set[str] = frozenset(),
    draws: int = DRAWS,
    seed: int = 0,
) -> FileAnalysis:
    """The numbers of one file; arguments as for ``analyze_files``."""
    games = stored.games
    compatible, strict = (
        outcome(games, strict=rule, draws=draws, seed=seed) for rule in (False, True)
    )
    sizes = {count for _, count in compatible.counts.values()}
    chosen = {
        "all": games,
        "won": [game for game in games if game.won],
        "lost": [game for game in games if not game.won and not game.void()],
    }
    file = FileAnalysis(
        label=label,
        stored=stored,
        n=sizes.pop() if len(sizes) == 1 else None,
        compatible=compatible,
        strict=strict,
        kinds=win_kinds(games),
        questions=question_stats(games),
        beliefs={name: belief_stats(part) for name, part in chosen.items()},
        noise=prior_noise(games),
        relations=relations(games),
        subsets=split_by_training(games, train_secrets, draws=draws, seed=seed),
    )
    return replace(file, notes=tuple(_notes(file)))


def outcome(
    games: Sequence[StoredGame], *, strict: bool, draws: int = DRAWS, seed: int = 0
) -> Outcome:
    """Wins by the strict or the compatible rule."""
    matrix = win_matrix(games, strict=strict)
    counts = _counts(games, strict)
    rate = _rate(counts, draws, seed)
    equal = len({count for _, count in counts.values()}) == 1 and not np.isnan(matrix).any()
    wins = sum(count for count, _ in counts.values())
    longest = max(game.num_turns for game in games)
    won_at = np.zeros(longest + 1)
    for game in games:
        if (turn := game.win_turn(strict)) is not None:
            won_at[turn] += 1
    played = sum(count for _, count in counts.values())
    return Outcome(
        wins=int(wins),
        rate=rate,
        errors_as_losses=wins / len(games),
        mean=mean_at_n(matrix) if equal else float("nan"),
        std=std_at_n(matrix) if equal else float("nan"),
        pass_at_k=pass_at_k_curve(matrix),
        by_turn=tuple(float(share) for share in np.cumsum(won_at) / max(played, 1)),
        counts=counts,
    )


def win_matrix(games: Sequence[StoredGame], *, strict: bool) -> FloatArray:
    """1 won, 0 lost, NaN without an outcome or without a game.

    Shape ``[S, n]``: secrets in the order of their first games, games of a secret in theirs, ``n``
    the games of the secret that has most.
    """
    rows: dict[str, list[float]] = {}
    for game in games:
        won = game.strict if strict else game.won
        value = float("nan") if game.void(strict) else float(won)
        rows.setdefault(game.secret, []).append(value)
    width = max(map(len, rows.values()), default=0)
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in rows.values()])


def split_by_training(
    games: Sequence[StoredGame], train_secrets: Set[str], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Subset]:
    """Rates on secrets that are training secrets (``overlap``) and on the others (``clean``)."""
    if not train_secrets:
        return {}
    known = {secret.strip().lower() for secret in train_secrets}
    parts: dict[str, list[StoredGame]] = {"overlap": [], "clean": []}
    for game in games:
        parts["overlap" if game.secret.strip().lower() in known else "clean"].append(game)
    return {
        name: Subset(
            secrets=len({game.secret for game in part}),
            games=len(part),
            compatible=_rate(_counts(part, strict=False), draws, seed),
            strict=_rate(_counts(part, strict=True), draws, seed),
        )
        for name, part in parts.items()
    }


def compare(
    first: FileAnalysis, second: FileAnalysis, *, draws: int = DRAWS, seed: int = 0
) -> Comparison | None:
    """``second`` minus ``first``, paired over secrets; None where they share none."""
    shared = [
        secret
        for secret, (_, games) in first.compatible.counts.items()
        if games and second.compatible.counts.get(secret, (0.0, 0))[1]
    ]
    if not shared:
        return None
    compatible, strict = (
        paired_difference(one.counts, two.counts, draws=draws, seed=seed)
        for one, two in ((first.compatible, second.compatible), (first.strict, second.strict))
    )
    agreement, pairs = answer_agreement(first.games, second.games)
    return Comparison(first.label, len(shared), compatible, strict, agreement, pairs)


def training_secrets(path: Path) -> frozenset[str]:
    """The secrets of a parquet file in the published schema.

    Raises:
        UserError: No such file, or none that holds a secret.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}: name a parquet file of training secrets.")
    secrets = frozenset(read_secrets(str(path)))
    if not secrets:
        raise UserError(
            f"{path} is no parquet file with text in a column 'golden_answers': name one of the "
            "published schema."
        )
    return secrets


def label_files(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Short names: the file's stem with as many folders as tell the files apart, at least one.

    Raises:
        UserError: A file is named twice.

    Example:
        >>> label_files(["out/paper/validation/0.jsonl.gz", "out/awq/validation/0.jsonl.gz"])
        ['paper/validation/0', 'awq/validation/0']
    """
    parts = [Path(path).parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path in paths if parts.count(Path(path).parts) > 1)
        raise UserError(f"{twice} is named twice: name every file once.")
    for depth in range(2, max(2, *map(len, parts)) + 1):
        labels = [_stem("/".join(names[-depth:])) for names in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("//")


def _counts(games: Sequence[StoredGame], strict: bool) -> dict[str, tuple[float, int]]:
    out: dict[str, tuple[float, int]] = {}
    for game in games:
        wins, played = out.get(game.secret, (0.0, 0))
        won = game.strict if strict else game.won
        out[game.secret] = (wins + won, played + (not game.void(strict)))
    return out


def _rate(counts: Mapping[str, tuple[float, int]], draws: int, seed: int) -> Interval:
    wins, games = [c[0] for c in counts.values()], [float(c[1]) for c in counts.values()]
    return cluster_bootstrap(wins, games, draws=draws, seed=seed)


def _same_priors(first: FileAnalysis, second: FileAnalysis) -> int:
    """Games compared when the first beliefs of both files are equal bit by bit, else 0."""
    one, two = _priors(first.games), _priors(second.games)
    shared = one.keys() & two.keys()
    compared = sum(min(one[secret].total(), two[secret].total()) for secret in shared)
    equal = sum((one[secret] & two[secret]).total() for secret in shared)
    return compared if equal == compared else 0


def _priors(games: Sequence[StoredGame]) -> dict[str, Counter[float]]:
    """First beliefs by secret, each with the games that have it."""
    out: dict[str, Counter[float]] = {}
    for game in games:
        if game.beliefs is not None:
            out.setdefault(game.secret, Counter())[game.beliefs[0]] += 1
    return out


def _notes(file: FileAnalysis) -> list[str]:
    games, notes = file.games, list[str]()
    if file.n is None:
        counts = [count for _, count in file.compatible.counts.values()]
        notes.append(
            f"secrets have {min(counts)} to {max(counts)} games with an outcome, so there is no "
            "mean@n, std@n and pass@n of one n"
        )
    lost_places = sum(game.stored_beliefs is not None and game.beliefs is None for game in games)
    if any(game.form is Form.VAL_ONLY for game in games):
        notes.append(
            "lines of the val_only form have no zeros in log_prob_reward and log_prob_diff: their "
            "changes of belief have lost their turns, and beliefs are used only where k + 1 values "
            f"are left ({lost_places} games are left out)"
        )
    if file.kinds[WinKind.SINGLE] != file.strict.wins:
        notes.append(
            f"the published class of single direct guesses has {file.kinds[WinKind.SINGLE]} wins, "
            f"the strict rule {file.strict.wins}"
        )
    if file.failed_games:
        notes.append(
            f"{file.failed_games} games have no outcome because the judge or the engine failed: "
            "rates leave them out, errors_as_losses counts them as lost"
        )
    for name in ("overlap", "clean"):
        if name in file.subsets and not file.subsets[name].games:
            notes.append(f"no secret is in the part '{name}'")
    return notes


def _pair_notes(first: FileAnalysis, file: FileAnalysis) -> list[str]:
    notes = [
        f"the first beliefs of {count} games equal those of {label} bit by bit: the same weights "
        "played both files"
        for label, count in (file.same_priors or {}).items()
    ]
    if file.comparison is None:
        notes.append(f"no secret is also in {first.label}, so there is nothing to compare")
    if first.n != file.n:
        notes.append(
            f"{file.n or 'differing numbers of'} games a secret against {first.n or 'differing'} "
            f"in {first.label}: compare rates and intervals, not mean@n, std@n or pass@n"
        )
    return notes
