"""Murder Mystery: one action per turn, and one accusation, which ends the game.

Two win rules exist. ``compatible`` is the published one: the judge says that the goal is reached.
``strict`` is decided by code alone: the text accuses exactly one person, who is the culprit, and
proves it. A proof names enough of the decisive clues that were *found* in this game (``need`` of
the case, 2 of 3 as a rule), or one of them with the motive and the means. To accuse several people
is to accuse the wrong one, and a text that speaks the goal phrase itself wins nothing.

The score of a game is 0 without an accusation of the culprit alone; else one half, and the other
half times the share of the decisive clues that were both found and named.

What has been found is read off the actions of the game, whichever judge speaks: an action that was
answered finds the clue that it asks for, where the case has it and everything before it was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.goal_phrase import has_goal_phrase
from delta_belief_rl.envs.murder_mystery.accusations import Accusation
from delta_belief_rl.envs.murder_mystery.actions import Reading, read_action
from delta_belief_rl.envs.murder_mystery.data import Case, case_of
from delta_belief_rl.envs.murder_mystery.published import mentioned, published_case
from delta_belief_rl.envs.single_use import SingleUseGame, check_choice, digest, question_text
from delta_belief_rl.types import Task, UserError, Verdict

WinRule = Literal["compatible", "strict"]
WrongAccusation = Literal["ends", "continues"]

VERIFY_METHODS = ("accusation",)
"""``accusation``: a goal that the judge declares counts only where code reads an accusation of one
person. The published experiments correct nothing here."""

NOTICES: Mapping[str, str] = {
    "empty": "You have not said what you do. Take one action, or accuse one person.",
    "error": "Nothing comes of it for now. You may try again.",
    "unproven": "That settles nothing. Take another action, or accuse one person.",
    "silent": "Nothing comes of it.",
}
"""Replies of the environment itself; all others are the judge's."""


@dataclass(frozen=True, slots=True)
class MurderMysterySettings:
    """Rules of a game.

    Attributes:
        max_turns: The game is over after so many actions.
        verify_methods: Corrections of the judge, of ``VERIFY_METHODS``.
        win_rule: Which win ends the game as one.
        wrong_accusation: ``ends``: an accusation that is no win ends the game. ``continues``: the
            published game, which only a win or the last turn ends.
        question_tag: The action stands in ``<question>`` tags; text without them is no action.
        notices: Replies by name, ``NOTICES`` where missing.
    """

    max_turns: int = 20
    verify_methods: tuple[str, ...] = ()
    win_rule: WinRule = "compatible"
    wrong_accusation: WrongAccusation = "ends"
    question_tag: bool = False
    notices: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise UserError(f"max_turns is {self.max_turns}: a game needs at least one turn.")
        check_choice("win_rule", self.win_rule, get_args(WinRule))
        check_choice("wrong_accusation", self.wrong_accusation, get_args(WrongAccusation))
        for method in self.verify_methods:
            check_choice("verify_methods", method, VERIFY_METHODS)
        for key in self.notices:
            check_choice("the keys of notices", key, tuple(NOTICES))

    def notice(self, name: str) -> str:
        """The environment's own reply of a name."""
        return self.notices.get(name, NOTICES[name])


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    turns: int = 0
    done: bool = False
    history: tuple[tuple[str, str], ...] = ()
    found: frozenset[str] = frozenset()
    """Keys of the clues that were brought to light."""
    tried: frozenset[str] = frozenset()
    """Answered actions that brought no clue to light."""
    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    feedback: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What code makes of an accusation.

    Attributes:
        alone: It accuses the culprit and nobody else.
        proven: Decisive clues that it names and that were found.
        strict: It is a strict win.
        score: In [0, 1].
    """

    alone: bool
    proven: tuple[str, ...]
    strict: bool
    score: float


class MurderMystery(SingleUseGame[GameState]):
    """One game over a packaged mystery, or over a row of the published files.

    Of a published row only the solution is known: its culprit and key evidence are read out of the
    text, and evidence counts as found once a reply has mentioned it.

    Raises:
        UserError: For a task without a solution.
    """

    def __init__(self, task: Task, settings: MurderMysterySettings) -> None:
        if not normalise(task.secret):
            raise UserError(f"The task {task.id!r} has no solution: give it a golden answer.")
        self.task = task
        self.settings = settings
        self.case: Case = case_of(task) or published_case(task)
        self._state = GameState()

    def parse(self, text: str) -> Action:
        """Read the agent's text; every action goes to the judge."""
        question = question_text(text, self.settings.question_tag)
        if not normalise(question):
            return Action(text, None, needs_judge=False)
        return Action(text, question)

    def judge_request(self, action: Action) -> JudgeRequest:
        """The judge's view of an action; the history says what has been found.

        Raises:
            ValueError: For an action without a text.
        """
        if action.question is None:
            raise ValueError("An action without a text is not sent to the judge.")
        said = "\n".join(part for pair in self._state.history for part in pair)
        name = digest(self.task.secret)
        key = f"{self.task.source}/{name}/{normalise(action.question)}/{digest(said)}"
        return JudgeRequest(self.task, action.question, self._state.history, key)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Advance the game by one action.

        Raises:
            ValueError: When the game is over, or a judge's reply is missing or was not asked for.
        """
        self._check_call(action, reply)
        last = self._state.turns + 1 >= self.settings.max_turns
        if action.question is None or reply is None:
            notes = ("no_action",)
            score = 0.0 if last else None
            outcome = Outcome(
                Verdict.INVALID, self.settings.notice("empty"), last, score=score, diagnostics=notes
            )
        elif reply.verdict is Verdict.ERROR:
            notes = ("judge_failed",)
            outcome = Outcome(Verdict.ERROR, self.settings.notice("error"), last, diagnostics=notes)
        else:
            outcome = self._outcome(action.question, reply, last)
        self._advance(action.question, outcome)
        return outcome

    def judged(self, reading: Reading) -> Judgement:
        """What an accusation is worth after what was found so far."""
        case = self.case
        said = reading.accusation or Accusation(())
        alone = said.accused == (case.culprit,)
        proven = tuple(key for key in said.named if key in self._state.found)
        why = bool(proven) and said.motive and said.means
        strict = alone and (len(proven) >= case.need or why)
        share = len(proven) / len(case.decisive) if case.decisive else 1.0
        return Judgement(alone, proven, strict, 0.5 + 0.5 * share if alone else 0.0)

    def state_key(self) -> str:
        """Name of the set of clues found and of vain actions, in any order."""
        return digest("\n".join((*sorted(self._state.found), "", *sorted(self._state.tried))))

    def progress(self) -> float:
        """Share of the decisive clues that were found, in [0, 1]."""
        decisive = self.case.decisive.keys()
        return len(decisive & self._state.found) / len(decisive) if decisive else 0.0

    def footprint(self) -> tuple[frozenset[str], frozenset[str]]:
        """Clues that the last action built on, and the clue that it found."""
        return self._state.read, self._state.written

    def action_key(self, text: str) -> str:
        """Equal for texts that ask for the same clue or accuse the same people."""
        question = self.parse(text).question
        return "invalid" if question is None else self._key(question, self._read(question))

    def reference(self) -> str:
        """The solution."""
        return self.task.secret

    def _read(self, question: str) -> Reading:
        return read_action(self.case, question)

    def _key(self, question: str, reading: Reading) -> str:
        if reading.kind == "clue":
            return reading.key
        if reading.kind == "accuse":
            return "accuse " + ", ".join(sorted(reading.accused))
        return normalise(question)

    def _outcome(self, question: str, reply: JudgeReply, last: bool) -> Outcome:
        """What becomes of an action that the judge has answered."""
        reading = self._read(question)
        spoken = has_goal_phrase(question)
        judgement = Judgement(False, (), False, 0.0) if spoken else self.judged(reading)
        accuses = reading.kind == "accuse"
        notes = ("goal_phrase",) if spoken else _notes(reading, judgement)
        compatible = not spoken and (reply.verdict is Verdict.WIN or judgement.strict)
        if "accusation" in self.settings.verify_methods:
            compatible = compatible and bool(reading.accused) and not reading.several
        won = judgement.strict if self.settings.win_rule == "strict" else compatible
        claimed = reply.verdict is Verdict.WIN and not won
        if claimed:
            notes = (*notes, "false_positive")
        ends = accuses and self.settings.wrong_accusation == "ends"
        done = won or ends or last
        key = self._key(question, reading)
        if any(key == self._key(asked, self._read(asked)) for asked, _ in self._state.history):
            notes = (*notes, "repeated")
        verdict = Verdict.INVALID if reply.verdict is Verdict.INVALID else Verdict.OTHER
        # A goal that was not reached must not be read in the reply.
        text = self.settings.notice("unproven") if claimed else reply.text.strip()
        return Outcome(
            verdict=Verdict.WIN if won else verdict,
            reply=text or self.settings.notice("silent"),
            done=done,
            strict_win=judgement.strict,
            compatible_win=compatible,
            is_guess=accuses,
            is_list=reading.several,
            action_key=key,
            diagnostics=notes,
            score=judgement.score if done and self.case.culprit else None,
        )

    def _advance(self, question: str | None, outcome: Outcome) -> None:
        state = self._state
        feedback = _feedback(question, outcome)
        after = replace(
            state,
            turns=state.turns + 1,
            done=outcome.done,
            feedback=feedback,
            read=frozenset(),
            written=frozenset(),
        )
        if question is not None and outcome.verdict is not Verdict.ERROR:
            after = replace(after, history=(*state.history, (question, outcome.reply)))
            new, built_on = self._found(question, outcome)
            after = replace(
                after,
                found=state.found | new,
                tried=state.tried if new else state.tried | {outcome.action_key},
                read=built_on,
                written=new - state.found,
            )
        self._state = after

    def _found(self, question: str, outcome: Outcome) -> tuple[frozenset[str], frozenset[str]]:
        """The clues that an answered action shows, and those that it built on."""
        if outcome.verdict is Verdict.INVALID:
            return frozenset(), frozenset()
        if not self.case.clues:
            return mentioned(self.case, outcome.reply), frozenset()
        clue = self.case.clues.get(self._read(question).key)
        if clue is None or not self._state.found.issuperset(clue.after):
            return frozenset(), frozenset()
        return frozenset({clue.key}), frozenset(clue.after)


def _notes(reading: Reading, judgement: Judgement) -> tuple[str, ...]:
    """Diagnostics of a reading."""
    if reading.kind != "accuse":
        return () if reading.kind in ("clue", "nothing") else (f"action_{reading.kind}",)
    if reading.several:
        return ("several_accused",)
    if not judgement.alone:
        return ("wrong_accusation",)
    return () if judgement.strict else ("unproven_accusation",)


def _feedback(question: str | None, outcome: Outcome) -> str:
    did = "No action was taken." if question is None else f"Action: {question}"
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{did} Reply: {outcome.reply}{notes}"
