"""Guess My City: ask open questions about a hidden city, win by naming it.

A judge answers in free text. Code decides what code can decide, before any judge is asked: an
action without text or with several questions, a question that was asked before, and a strict win.
The judge's word that the goal is reached is corrected by the published rules.

Two win rules exist. ``compatible`` is the published one: the judge says that the goal is reached,
and one word of "City, Country" stands in the action, so that the country alone and a list of
cities may win. ``strict`` asks for one city, guessed alone. Both are recorded on every outcome
whichever of them ends the game; a strict win is always a compatible one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from delta_belief_rl.envs import answers
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.guess_my_city.data import name_key
from delta_belief_rl.envs.guess_my_city.reading import METHODS, CityReading, place_of, read_action
from delta_belief_rl.envs.guess_my_city.slips import joins, secret_words
from delta_belief_rl.envs.single_use import (
    SingleUseGame,
    check_choice,
    digest,
    judge_request,
    question_text,
)
from delta_belief_rl.types import Task, UserError, Verdict

WinRule = Literal["compatible", "strict"]
CandidateLists = Literal["report", "penalise", "refuse"]
Duplicates = Literal["code", "judge"]

NOTICES: Mapping[str, str] = {
    "finished": "Goal reached.",
    "invalid": "Sorry, I cannot answer this question.",
    "multiple_questions": "Please ask one question at a time.",
    "multiple_bets": "Please name one city at a time.",
    "wrong_city": "No, that is not the city.",
    "name_city": "Please guess one city by its name.",
    "repeated": "You have already asked this. Please ask something else.",
    "error": "No answer could be given.",
}
"""Replies that are not the judge's own. The second one marks invalid actions in published files."""

WITHHELD = "(withheld)"
"""Stands for a name of the secret that a judge has let slip."""
MAX_CHARACTERS = 2000
"""Of an action so much is read; a longer one is invalid."""
_MARKS = r"\s,;:()\[\]{}<>?!\"*_`~#|/\\=+\u2010-\u2015\u2026\u201c-\u201f\u00ab\u00bb-"
_WORD = re.compile(rf"[^{_MARKS}]+(?<![.'\u2019\u2018])")
"""Hyphens, slashes and markup stand between words."""
_POSSESSIVE = re.compile(r"['\u2019]s\b")


@dataclass(frozen=True, slots=True)
class GuessMyCitySettings:
    """Rules of a game.

    Attributes:
        max_turns: The game is over after so many actions.
        verify_methods: Published rules that correct the judge (``guess_my_city.reading.METHODS``).
            Empty: the judge's "goal reached" wins under the compatible rule.
        win_rule: Which win ends the game.
        candidate_lists: ``report``: a list of cities is flagged only. ``penalise``: it is answered,
            but its verdict is invalid unless it wins. ``refuse``: it is invalid and never wins.
        duplicates: ``code``: equal questions are found by comparing texts. ``judge``: they are
            answered again.
        judge_history: Send earlier questions and replies to the judge.
        question_tag: The question stands in ``<question>`` tags; text without them is invalid.
        notices: Replies by word, ``NOTICES`` where missing.
    """

    max_turns: int = 20
    verify_methods: tuple[str, ...] = METHODS
    win_rule: WinRule = "compatible"
    candidate_lists: CandidateLists = "report"
    duplicates: Duplicates = "code"
    judge_history: bool = True
    question_tag: bool = False
    notices: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise UserError(f"max_turns is {self.max_turns}: a game needs at least one turn.")
        for method in self.verify_methods:
            check_choice("verify_judge.methods", method, METHODS)
        check_choice("win_rule", self.win_rule, get_args(WinRule))
        check_choice("candidate_lists", self.candidate_lists, get_args(CandidateLists))
        check_choice("duplicates", self.duplicates, get_args(Duplicates))
        for key in self.notices:
            check_choice("the keys of notices", key, tuple(NOTICES))

    def notice(self, word: str) -> str:
        """The reply for a key of ``NOTICES``."""
        return self.notices.get(word, NOTICES[word])


@dataclass(frozen=True, slots=True)
class _Ruling:
    """What becomes of an action: its verdict, the reply, and what was noticed."""

    verdict: Verdict
    reply: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CityState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    turns: int = 0
    done: bool = False
    history: tuple[tuple[str, str], ...] = ()
    asked: tuple[tuple[str, Verdict], ...] = ()
    """Key and verdict of every action that was answered."""
    feedback: str = ""


class GuessMyCity(SingleUseGame[CityState]):
    """One game over any city.

    Raises:
        UserError: For a task without a city.
    """

    def __init__(self, task: Task, settings: GuessMyCitySettings) -> None:
        if not place_of(task).names:
            raise UserError(f"The task {task.id!r} has no city: give every task a golden answer.")
        self.task = task
        self.settings = settings
        self._state = CityState()

    def parse(self, text: str) -> Action:
        """Read the agent's text; ``needs_judge`` is false where code decides."""
        question = question_text(text, self.settings.question_tag)
        if not answers.normalise(question):
            return Action(text, None, needs_judge=False)
        return Action(text, question, needs_judge=self._decide(question) is None)

    def judge_request(self, action: Action) -> JudgeRequest:
        """The judge's view of an action.

        Raises:
            ValueError: For an action that the judge must not see.
        """
        name = f"{self.task.secret}/{answers.normalise(action.question or '')}"
        history = self._state.history if self.settings.judge_history else ()
        return judge_request(self.task, action, name, history)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Advance the game by one action.

        ``Outcome.done`` is true after a win and after the last turn; ``verdict`` tells them apart.

        Raises:
            ValueError: When the game is over, or a judge's reply is missing or was not asked for.
        """
        self._check_call(action, reply)
        outcome = self._outcome(action.question, reply)
        self._advance(action, outcome)
        return outcome

    def state_key(self) -> str:
        """Name of the set of answered questions with their replies, in any order."""
        known = {
            f"{answers.normalise(question)}={reply}"
            for (question, reply), (_, verdict) in zip(
                self._state.history, self._state.asked, strict=True
            )
            if verdict is Verdict.OTHER
        }
        return digest("\n".join(sorted(known)))

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same action; a guess is known by the city."""
        question = self.parse(text).question
        return "invalid" if question is None else self._key(question)

    def reference(self) -> str:
        """The city and its country."""
        return self.task.secret

    def _read(self, question: str) -> CityReading:
        return read_action(question, self.task.secret, self.task.aliases)

    def _key(self, question: str) -> str:
        guess = self._read(question).guess
        return f"guess:{guess}" if guess else answers.normalise(question)

    def _decide(self, question: str) -> _Ruling | None:
        """What becomes of an action where no judge is needed, else None."""
        reading, rules = self._read(question), self.settings
        if len(question) > MAX_CHARACTERS:
            return self._notice("invalid", "too_long_action")
        if reading.questions > 1 and "multiple_questions" in rules.verify_methods:
            return self._notice("multiple_questions", "multiple_questions")
        if reading.is_list and rules.candidate_lists == "refuse":
            return self._notice("multiple_bets", "multiple_bets")
        if reading.strict:
            return _Ruling(Verdict.WIN, rules.notice("finished"))
        if rules.duplicates == "code":
            key = self._key(question)
            earlier = [verdict for asked, verdict in self._state.asked if asked == key]
            if Verdict.INVALID in earlier:
                return self._notice("invalid", "repeated")
            if earlier:
                return _Ruling(Verdict.REPEATED, rules.notice("repeated"), ("repeated",))
        return None

    def _notice(self, word: str, note: str) -> _Ruling:
        return _Ruling(Verdict.INVALID, self.settings.notice(word), (note,))

    def _outcome(self, question: str | None, reply: JudgeReply | None) -> Outcome:
        last = self._state.turns + 1 >= self.settings.max_turns
        if question is None:
            ruling = self._notice("invalid", "no_question")
            return Outcome(ruling.verdict, ruling.reply, last, diagnostics=ruling.notes)
        reading = self._read(question)
        ruling = self._decide(question) if reply is None else self._corrected(question, reply)
        if ruling is None:
            raise ValueError("This action needs the judge: its reply is missing.")
        verdict, notes = ruling.verdict, list(ruling.notes)
        if reading.is_list:
            notes.append("candidate_list")
            if self.settings.candidate_lists == "penalise" and verdict is Verdict.OTHER:
                verdict = Verdict.INVALID
        won = verdict is Verdict.WIN
        return Outcome(
            verdict=verdict,
            reply=ruling.reply,
            done=won or last,
            strict_win=won and reading.strict,
            compatible_win=won or "compatible_win" in notes,
            is_guess=bool(reading.guess),
            is_list=reading.is_list,
            action_key=self._key(question),
            diagnostics=tuple(dict.fromkeys(note for note in notes if note != "compatible_win")),
        )

    def _corrected(self, question: str, reply: JudgeReply) -> _Ruling:
        """The judge's reply after the published rules."""
        rules, reading = self.settings, self._read(question)
        if reply.verdict is Verdict.WIN:
            return self._confirmed(reading)
        if reply.verdict is Verdict.INVALID:
            return self._notice("invalid", "invalid_by_judge")
        if reply.verdict is not Verdict.OTHER or not reply.text.strip():
            return _Ruling(Verdict.ERROR, rules.notice("error"), ("judge_failed",))
        text = withhold(reply.text, question, self.task)
        return _Ruling(Verdict.OTHER, text, () if text == reply.text else ("judge_leak",))

    def _confirmed(self, reading: CityReading) -> _Ruling:
        """What becomes of the judge's "goal reached" for what is no strict win.

        Where the published rules cancel it the action is refused, which is a fine, except for a
        list of cities. The strict rule does not fine the agent for the judge's mistake.
        """
        rules = self.settings
        if "multiple_bets" in rules.verify_methods and reading.bets:
            word, verdict, notes = "multiple_bets", Verdict.OTHER, ("multiple_bets",)
        elif rules.win_rule == "strict":
            won = reading.exact or "exact" not in rules.verify_methods
            word = "wrong_city" if reading.guess and not reading.exact else "name_city"
            verdict, notes = Verdict.OTHER, ("compatible_win",) if won else ()
        elif "exact" in rules.verify_methods and not reading.exact:
            word, verdict, notes = "invalid", Verdict.INVALID, ()
        else:
            return _Ruling(Verdict.WIN, rules.notice("finished"))
        return _Ruling(verdict, rules.notice(word), (*notes, "false_positive"))

    def _advance(self, action: Action, outcome: Outcome) -> None:
        state = replace(
            self._state,
            turns=self._state.turns + 1,
            done=outcome.done,
            feedback=_feedback(action, outcome),
        )
        if action.question is not None and outcome.verdict is not Verdict.ERROR:
            state = replace(
                state,
                history=(*state.history, (action.question, outcome.reply)),
                asked=(*state.asked, (outcome.action_key, outcome.verdict)),
            )
        self._state = state


def withhold(text: str, question: str, task: Task) -> str:
    """A judge's text with what gives the city or its country away taken out.

    That is their names, the country's adjectives, the city's hidden words, and what is derived from
    the city's name ("Parisian"). What the player used in the question stays: it tells nothing new.

    Example:
        >>> withhold("Paris lies on the Seine.", "Which river?", Task("", "", "Paris, France", ()))
        '(withheld) lies on the Seine.'
    """
    secret = secret_words(task.secret, task.aliases)
    asked, lower = f" {name_key(question)} ", text.islower()
    words = list(_WORD.finditer(text))
    out, at, shown = "", 0, 0
    while at < len(words):
        for size in range(min(6, len(words) - at), 0, -1):
            start, end = words[at].start(), words[at + size - 1].end()
            span = _POSSESSIVE.sub("", text[start:end])
            key = name_key(span)
            if joins(key):
                # "North America" is no name of a country.
                at += size
                break
            if f" {key} " not in asked and secret.holds(key, span, lower):
                out, shown = out + text[shown:start] + WITHHELD, end
                at += size
                break
        else:
            at += 1
    return out + text[shown:]


def _feedback(action: Action, outcome: Outcome) -> str:
    question = "No question was asked." if action.question is None else f"Asked: {action.question}"
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{question} Reply: {outcome.reply}{notes}"
