"""Stored games in a light form, whatever wrote them.

Three forms of a line are read, and each is told by its fields:

``published``  the rollout and validation files of the published experiments: the conversation is
               the text of ``output``, beliefs are ``log_prob_reward``.
``val_only``   their evaluation runs: the conversation is ``history``; all zeros are missing from
               ``log_prob_reward`` and ``log_prob_diff``, so changes of belief have lost their turns
               and a won last turn cannot be told from ``finished_at``.
``own``        this project's files: the published fields, ``strict_status`` and, where they were
               kept, the turns themselves.

A line that cannot be trusted is skipped under its number and never changes another one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from delta_belief_rl.algo.shapers.channels import FAILED_STOPS
from delta_belief_rl.envs.answers import exact_match, strict_guess
from delta_belief_rl.rollout.store import DamagedLine, read_rows
from delta_belief_rl.types import UserError, Verdict

_TAGGED = re.compile(r"<question>(.*?)</question>", re.DOTALL)


class Form(StrEnum):
    """What wrote a line; see the module's head."""

    PUBLISHED = "published"
    VAL_ONLY = "val_only"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its reply.

    Attributes:
        repeated: The reply says that the question was asked before.
        invalid: The reply says that it was no valid question.
        failed: The judge failed; None where the line does not keep its turns.
        strict_win, compatible_win: As the file says where it does, else by the rules of
            ``envs.answers``.
    """

    question: str
    reply: str
    repeated: bool = False
    invalid: bool = False
    failed: bool | None = None
    strict_win: bool = False
    compatible_win: bool = False


@dataclass(frozen=True, slots=True)
class StoredGame:
    """One line of a file.

    Attributes:
        line: Its number, counted from 1.
        won: The compatible outcome, as stored in ``game_status``.
        strict: One candidate was guessed directly and it was the secret.
        failed: The judge or the engine gave up; None where the form cannot tell.
        invalid, repeated: Counts as stored.
        score: Sum of rewards; None where rewards are unknown.
        reward: Must equal ``score``; validation files only.
        beliefs: ``k + 1`` log-probabilities of the secret in nats; None where beliefs were off or
            their places are lost.
        stored_beliefs, stored_diffs: As they stand in the file, padding included.
    """

    line: int
    form: Form
    secret: str
    exchanges: tuple[Exchange, ...]
    won: bool
    strict: bool
    failed: bool | None
    invalid: int
    repeated: int
    step: int | None = None
    score: float | None = None
    reward: float | None = None
    beliefs: tuple[float, ...] | None = None
    stored_beliefs: tuple[float, ...] | None = None
    stored_diffs: tuple[float, ...] | None = None

    @property
    def num_turns(self) -> int:
        """``k``, the questions asked."""
        return len(self.exchanges)

    def win_turn(self, strict: bool = False) -> int | None:
        """Number of the winning turn from 1; None for a game that is not won by that rule."""
        if not (self.strict if strict else self.won):
            return None
        if self.form is not Form.OWN and not strict:
            return self.num_turns  # such a win always ends the game
        for number, turn in enumerate(self.exchanges, start=1):
            if turn.strict_win if strict else turn.compatible_win:
                return number
        return self.num_turns

    def void(self, strict: bool = False) -> bool:
        """No outcome: the judge or the engine gave up before a win."""
        return bool(self.failed) and not (self.strict if strict else self.won)


@dataclass(frozen=True, slots=True)
class StoredGames:
    """The games of a file in its order, and the lines that hold none."""

    path: Path
    games: tuple[StoredGame, ...]
    damaged: tuple[DamagedLine, ...]


class _Damage(ValueError):
    """Why a row is no game."""


def read_games(path: str | os.PathLike[str]) -> StoredGames:
    """Read a file of games, ``.jsonl`` or ``.jsonl.gz``; forms may be mixed.

    Raises:
        UserError: There is no such file, or no line of it is a game.
    """
    report = read_rows(path)
    games: list[StoredGame] = []
    damaged = list(report.damaged)
    for number, row in zip(report.numbers, report.rows, strict=True):
        try:
            games.append(read_game(row, number))
        except _Damage as problem:
            damaged.append(DamagedLine(number, str(problem)))
    damaged.sort(key=lambda line: line.number)
    if not games:
        first = "".join(f" (line {line.number}: {line.reason})" for line in damaged[:1])
        raise UserError(
            f"{path} holds no game{first or ' because it is empty'}: name a file of a rollout or "
            "validation folder."
        )
    return StoredGames(Path(path), tuple(games), tuple(damaged))


def read_game(row: Mapping[str, Any], line: int = 0) -> StoredGame:
    """The game of one row.

    Raises:
        ValueError: The row is damaged; the message says how.
    """
    secret = _text(row, "secret")
    if not secret.strip():
        raise _Damage("secret is empty")
    form = _form(row)
    won = _flag(row, "game_status")
    if "turns" in row:
        exchanges = _own_turns(row, secret)
    else:
        pairs = _history(row) if form is Form.VAL_ONLY else _pairs(_text(row, "output"))
        exchanges = tuple(_judged(question, reply, secret) for question, reply in pairs)
    _check_count(row, len(exchanges), won)
    need_counts = form is not Form.OWN
    invalid, repeated = (
        _whole(row, name, needed=need_counts) for name in ("invalid_count", "repeated_count")
    )
    stored, beliefs = _beliefs(row, form, len(exchanges))
    strict = any(turn.strict_win for turn in exchanges)
    failed = None
    if "strict_status" in row:
        strict = _flag(row, "strict_status")
        if strict and not exchanges:
            raise _Damage("strict_status is 1 but there is no question")
    if form is Form.OWN and ("turns" in row or "stop" in row):
        failed = row.get("stop") in list(FAILED_STOPS) or bool(exchanges and exchanges[-1].failed)
    return StoredGame(
        line=line,
        form=form,
        secret=secret,
        exchanges=exchanges,
        won=won,
        strict=strict,
        failed=failed,
        invalid=sum(turn.invalid for turn in exchanges) if invalid is None else invalid,
        repeated=sum(turn.repeated for turn in exchanges) if repeated is None else repeated,
        step=_whole(row, "step"),
        score=_number(row, "score", needed=need_counts),
        reward=_number(row, "reward"),
        beliefs=beliefs,
        stored_beliefs=stored,
        stored_diffs=_diffs(row, form, len(exchanges)),
    )


def _form(row: Mapping[str, Any]) -> Form:
    if "turns" in row or "strict_status" in row:
        return Form.OWN
    return Form.VAL_ONLY if "history" in row and "output" not in row else Form.PUBLISHED


# ---------------------------------------------------------------------------------------- exchanges


def _pairs(output: str) -> list[tuple[str, str]]:
    """Question and reply of each turn of a conversation in plain text.

    Messages may have several lines. A line that is nothing but a role always opens a message, so a
    question with such a line breaks the alternation or the count and the row is refused.
    """
    messages: list[tuple[str, list[str]]] = []
    for text in output.removesuffix("\n").split("\n"):
        if text in ("assistant", "user"):
            messages.append((text, []))
        elif messages:
            messages[-1][1].append(text)
        elif text:
            raise _Damage("output does not begin with a question")
    return _alternating([(role, "\n".join(lines)) for role, lines in messages], "output")


def _history(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same from a list of messages; entries that are no messages are padding."""
    messages: list[tuple[str, str]] = []
    for entry in _list(row, "history"):
        if not isinstance(entry, dict):
            continue
        role, text = _text(entry, "role"), _text(entry, "content")
        if messages or role == "assistant":
            messages.append((role, text))
    return _alternating(messages, "history")


def _alternating(messages: Sequence[tuple[str, str]], where: str) -> list[tuple[str, str]]:
    roles = [role for role, _ in messages]
    if roles != ["assistant", "user"] * (len(messages) // 2):
        raise _Damage(f"questions and replies do not alternate in {where}")
    texts = [text for _, text in messages]
    return list(zip(texts[::2], texts[1::2], strict=True))


def _judged(text: str, reply: str, secret: str) -> Exchange:
    """An exchange without stored verdicts, read by the published rules."""
    tagged = _TAGGED.search(text)
    question = tagged.group(1) if tagged else text
    said = reply.strip().lower()
    notice = "not asked a valid" in said or said.rstrip(".") == "invalid"
    invalid = notice or question.count("?") > 1
    return Exchange(
        question=question,
        reply=reply,
        repeated="already asked" in said or "repeated" in said,
        invalid=invalid,
        strict_win=not invalid and strict_guess(question, secret),
        compatible_win=not invalid and exact_match(question, secret),
    )


def _own_turns(row: Mapping[str, Any], secret: str) -> tuple[Exchange, ...]:
    exchanges: list[Exchange] = []
    for entry in _list(row, "turns"):
        if not isinstance(entry, dict):
            raise _Damage("turns has an entry that is no object")
        question = _text(entry, "question" if entry.get("question") else "action")
        judged = _judged(question, _text(entry, "reply"), secret)
        verdict = entry.get("verdict")
        if verdict not in list(Verdict):
            raise _Damage(f"a turn has the unknown verdict {verdict!r}")
        exchanges.append(
            Exchange(
                question=question,
                reply=judged.reply,
                repeated=verdict == Verdict.REPEATED,
                invalid=verdict == Verdict.INVALID,
                failed=verdict == Verdict.ERROR,
                strict_win=bool(entry.get("strict_win", judged.strict_win)),
                compatible_win=bool(entry.get("compatible_win", judged.compatible_win)),
            )
        )
    return tuple(exchanges)


def _check_count(row: Mapping[str, Any], found: int, won: bool) -> None:
    if won and not found:
        raise _Damage("game_status is 1 but there is no question")
    stored = _whole(row, "num_questions")
    if stored is not None and stored != found:
        raise _Damage(f"{found} pairs of question and reply, but num_questions is {stored}")


# ------------------------------------------------------------------------------------------ beliefs


def _beliefs(
    row: Mapping[str, Any], form: Form, turns: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """The stored list, and its first ``k + 1`` values where each is known to be in its place.

    The belief is never exactly 0 before a game ends. So where zeros were removed, ``k + 1`` values
    that are left are all of them, in order; fewer have lost their places.
    """
    name = "beliefs" if form is Form.OWN and row.get("log_prob_reward") is None else None
    stored = _numbers(row, name or "log_prob_reward")
    if stored is None:
        return None, None
    if form is Form.VAL_ONLY:
        if len(stored) > turns + 1:
            raise _Damage(f"log_prob_reward has {len(stored)} values for {turns} turns")
        return stored, stored if len(stored) == turns + 1 else None
    if len(stored) < turns + 1:
        raise _Damage(f"log_prob_reward has {len(stored)} values for {turns} turns")
    if "num_questions" not in row and any(stored[turns + 1 :]):
        raise _Damage(f"log_prob_reward goes on after the {turns} turns of the conversation")
    return stored, stored[: turns + 1]


def _diffs(row: Mapping[str, Any], form: Form, turns: int) -> tuple[float, ...] | None:
    stored = _numbers(row, "log_prob_diff")
    if stored is None:
        return None
    if len(stored) > turns if form is Form.VAL_ONLY else len(stored) < turns:
        raise _Damage(f"log_prob_diff has {len(stored)} values for {turns} turns")
    return stored


# ------------------------------------------------------------------------------------------- fields


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _needed(row, name)
    if not isinstance(value, str):
        raise _Damage(f"{name} is not text")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _Damage(f"{name} has half of a surrogate pair")
    return value


def _flag(row: Mapping[str, Any], name: str) -> bool:
    value = _needed(row, name)
    if value not in (0, 1) or isinstance(value, float):
        raise _Damage(f"{name} is neither 0 nor 1")
    return bool(value)


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = _needed(row, name)
    if not isinstance(value, list):
        raise _Damage(f"{name} is not a list")
    return value


def _whole(row: Mapping[str, Any], name: str, *, needed: bool = False) -> int | None:
    value = _needed(row, name) if needed else row.get(name)
    if value is None and not needed:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Damage(f"{name} is not a whole number from 0")
    return value


def _number(row: Mapping[str, Any], name: str, *, needed: bool = False) -> float | None:
    value = _needed(row, name) if needed else row.get(name)
    if value is None and not needed:
        return None
    return _finite(value, name)


def _numbers(row: Mapping[str, Any], name: str) -> tuple[float, ...] | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise _Damage(f"{name} is not a list")
    return tuple(_finite(entry, f"an entry of {name}") for entry in value)


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Damage(f"{name} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Damage(f"{name} is not finite")
    return number


def _needed(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise _Damage(f"{name} is missing")
    return row[name]
