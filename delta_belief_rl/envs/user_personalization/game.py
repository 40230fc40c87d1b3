"""User personalization: ask a stranger what matters to them, then give the answer that suits them.

A user with a hidden persona makes an open request. The agent asks one clarifying question in each
message; a role-player who knows the persona replies. A message that begins with "Answer:", or the
last one in any case, is the answer. A rater who knows the persona grades it from 1 to 10, and the
game is over.

Role-player and rater are one judge: the environment sends an answer with ``MARK`` in front of it,
and a question never begins so. Its grade is ``JudgeReply.score``, ``(rating - 1) / 9``. There is no
published win: a rating of at least ``threshold`` wins under both win rules.

Source: the setting of STaR-GATE (Andukuri et al., 2024), in which ΔBelief-RL reports the mean
rating; all details are this project's own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from delta_belief_rl.envs import answers
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.single_use import (
    SingleUseGame,
    check_choice,
    digest,
    judge_request,
    question_text,
)
from delta_belief_rl.types import Task, UserError, Verdict

Duplicates = Literal["code", "judge"]

MARK = "Answer: "
"""Begins the action of a judge's request that is to be rated."""
BEST, WORST = 10.0, 1.0
"""Ends of the scale of ratings."""

NOTICES: Mapping[str, str] = {
    "empty": "You have not said anything. Ask me one question, or send your answer.",
    "invalid": "Please ask me one short question at a time.",
    "repeated": "You have asked me this already.",
    "refused": "I would rather not say. Please ask me about one thing that matters for my request.",
    "error": "I cannot reply just now. Please go on.",
    "rated": "Thank you. I rate this answer {rating} of 10.",
}
"""Replies of the environment itself; ``{rating}`` in ``rated`` stands for the number."""

_MARKED = re.compile(
    r"[\s*_#>`\"'(\[-]*(?:(?:here(?: is|'s)|this is|my|the|final|full|best|complete)[\s*_]+){0,4}"
    r"answer[\s*_`\"')\]]*(?:[:\uff1a][\s*_]*|\n+|\Z)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class UserPersonalizationSettings:
    """Rules of a game.

    Attributes:
        max_turns: Messages of the agent; the last one is taken as its answer.
        threshold: A rating of at least this wins, from 1 to 10.
        verify_methods: Rules that make a question invalid, of ``answers.VALIDITY_METHODS``. They do
            not apply to an answer.
        duplicates: ``code``: a question that was asked before, in normal form, is repeated.
            ``judge``: it is answered again.
        judge_history: Send earlier questions and replies to the judge.
        question_tag: The message stands in ``<question>`` tags; text without them is none.
        notices: Replies by name, ``NOTICES`` where missing.
    """

    max_turns: int = 5
    threshold: float = 8.0
    verify_methods: tuple[str, ...] = ("multiple_questions",)
    duplicates: Duplicates = "code"
    judge_history: bool = True
    question_tag: bool = False
    notices: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise UserError(f"max_turns is {self.max_turns}: a game needs at least one turn.")
        if not WORST < self.threshold <= BEST:
            raise UserError(
                f"threshold is {self.threshold:g}: ratings go from 1 to 10, and 1 must not win."
            )
        for method in self.verify_methods:
            check_choice("verify_methods", method, answers.VALIDITY_METHODS)
        check_choice("duplicates", self.duplicates, get_args(Duplicates))
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
    """Questions that were answered, and the replies."""
    asked: tuple[str, ...] = ()
    """Normal forms of all questions that had a reply, refusals included."""
    feedback: str = ""


def answer_of(text: str) -> str | None:
    """What stands behind the mark of an answer; None for any other text.

    Accepted are "Answer:", "Final answer:", "Here is my answer:" and the like, in any case and
    markup, and the bare word as a line of its own.

    Example:
        >>> answer_of("**Answer:** Soup."), answer_of("What would be a good answer?")
        ('Soup.', None)
    """
    visible = "".join(c for c in text if unicodedata.category(c) != "Cf")
    match = _MARKED.match(visible)
    return visible[match.end() :].strip() if match else None


class UserPersonalization(SingleUseGame[GameState]):
    """One game with one user.

    Raises:
        UserError: For a task without decisive facts to be found.
    """

    def __init__(self, task: Task, settings: UserPersonalizationSettings) -> None:
        if not answers.normalise(task.secret):
            raise UserError(f"The task {task.id!r} has no secret: write the user's decisive facts.")
        self.task = task
        self.settings = settings
        self._state = GameState()

    def parse(self, text: str) -> Action:
        """Read the agent's text; ``needs_judge`` is false where code decides."""
        message = question_text(text, self.settings.question_tag)
        answer = answer_of(message)
        if answer is None and self._is_last():
            answer = message
        if not answers.normalise(message if answer is None else answer):
            return Action(text, None, needs_judge=False)
        if answer is not None:
            return Action(text, MARK + answer)
        decided = self._decide(message)
        return Action(text, message, needs_judge=decided is None)

    def judge_request(self, action: Action) -> JudgeRequest:
        """What the role-player, or for an answer the rater, is to be asked.

        Raises:
            ValueError: For an action that the judge must not see.
        """
        if action.question is None or not action.needs_judge:
            raise ValueError("An action that code decides is not sent to the judge.")
        history = self._state.history if self.settings.judge_history else ()
        name = f"{self.task.id}/{digest(action.question)}"
        return judge_request(self.task, action, name, history)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Advance the game by one message.

        The score is set on the message that ends the game: 0 where that is no answer.

        Raises:
            ValueError: When the game is over, or a judge's reply is missing or was not asked for.
        """
        self._check_call(action, reply)
        outcome = self._outcome(action, reply)
        self._advance(action, outcome)
        return outcome

    def state_key(self) -> str:
        """Name of what is known: the answered questions and their replies, in any order."""
        return digest("\n".join(sorted(f"{asked}={reply}" for asked, reply in self._state.history)))

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same action."""
        question = self.parse(text).question
        return "invalid" if question is None else answers.normalise(question)

    def reference(self) -> str:
        """The decisive facts of the user."""
        return self.task.secret

    def _is_last(self) -> bool:
        return self._state.turns + 1 >= self.settings.max_turns

    def _decide(self, question: str) -> Verdict | None:
        """The verdict on a question where no judge is needed, else None."""
        methods = self.settings.verify_methods
        if not answers.verify_question(question, "no", "-", methods).valid:
            return Verdict.INVALID
        if self.settings.duplicates == "code":
            return Verdict.REPEATED if self._was_asked(question) else None
        return None

    def _was_asked(self, question: str) -> bool:
        return answers.normalise(question) in self._state.asked

    def _outcome(self, action: Action, reply: JudgeReply | None) -> Outcome:
        question, notice = action.question, self.settings.notice
        if question is None:
            score = 0.0 if self._is_last() else None
            return Outcome(
                Verdict.INVALID,
                notice("empty"),
                done=self._is_last(),
                diagnostics=("no_question",),
                score=score,
            )
        if reply is None and self._decide(question) is Verdict.REPEATED:
            outcome = Outcome(
                Verdict.REPEATED, notice("repeated"), done=False, diagnostics=("repeated",)
            )
        elif reply is None:
            broken = answers.verify_question(question, "no", "-", self.settings.verify_methods)
            outcome = Outcome(
                Verdict.INVALID, notice("invalid"), done=False, diagnostics=broken.diagnostics
            )
        elif question.startswith(MARK):
            outcome = self._rated(reply)
        else:
            outcome = self._replied(reply)
        return replace(outcome, action_key=answers.normalise(question))

    def _replied(self, reply: JudgeReply) -> Outcome:
        """The role-player's reply to a question; it wins nothing, whatever it says."""
        text = " ".join(reply.text.split())
        if reply.verdict is Verdict.INVALID:
            refusal = text or self.settings.notice("refused")
            return Outcome(Verdict.INVALID, refusal, done=False, diagnostics=("invalid_by_judge",))
        if reply.verdict is Verdict.ERROR or not text:
            return self._failed()
        verdict = Verdict.REPEATED if reply.verdict is Verdict.REPEATED else Verdict.OTHER
        return Outcome(verdict, text, done=False)

    def _failed(self) -> Outcome:
        """No usable reply; the last message ends the game without a score all the same."""
        return Outcome(
            Verdict.ERROR,
            self.settings.notice("error"),
            done=self._is_last(),
            diagnostics=("judge_failed",),
        )

    def _rated(self, reply: JudgeReply) -> Outcome:
        """The end of the game, with the rater's grade; without one the agent may answer again."""
        grade = reply.score
        if reply.verdict is Verdict.ERROR or grade is None or not 0.0 <= grade <= 1.0:
            return self._failed()
        rating = WORST + (BEST - WORST) * grade
        won = rating >= self.settings.threshold - 1e-9
        text = f"{rating:.1f}".removesuffix(".0")
        return Outcome(
            Verdict.WIN if won else Verdict.OTHER,
            self.settings.notice("rated").replace("{rating}", text),
            done=True,
            strict_win=won,
            compatible_win=won,
            is_guess=True,
            score=grade,
        )

    def _advance(self, action: Action, outcome: Outcome) -> None:
        state, question = self._state, action.question
        said = "Nothing was said." if question is None else f"Said: {question}"
        notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
        state = replace(
            state,
            turns=state.turns + 1,
            done=outcome.done,
            feedback=f"{said} Reply: {outcome.reply}{notes}",
        )
        if question is not None and action.needs_judge and outcome.verdict is not Verdict.ERROR:
            state = replace(state, asked=(*state.asked, answers.normalise(question)))
            if outcome.verdict is Verdict.OTHER and not outcome.done:
                state = replace(state, history=(*state.history, (question, outcome.reply)))
        self._state = state
