"""Customer Service: find out what is wrong with a customer's product and say how to mend it.

The agent works at a support desk, the judge plays the customer. Two win rules exist.
``compatible`` is the published one: the customer says the goal phrase, which a judge does when the
cause or the fix is right, and the message asked no more than one question. ``strict`` asks for both
in one message: the one cause and its fix. It is decided by code from the scenario's rubric, so no
judge can be talked into it. A message that offers several causes or remedies is no strict win, and
one that speaks the goal phrase itself is no win at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from delta_belief_rl.envs import answers
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.customer_service.data import Rubric, scenario_of
from delta_belief_rl.envs.customer_service.derived import derived_rubric
from delta_belief_rl.envs.customer_service.reading import (
    Kind,
    Named,
    Reading,
    read_message,
    read_named,
)
from delta_belief_rl.envs.goal_phrase import has_goal_phrase
from delta_belief_rl.envs.single_use import SingleUseGame, digest, judge_request, question_text
from delta_belief_rl.types import Task, UserError, Verdict

WinRule = Literal["compatible", "strict"]

CAUSE_SHARE, FIX_SHARE, FACTS_SHARE = 0.4, 0.3, 0.3
"""What the cause, the fix and the needed facts count in the score."""

PUBLISHED_NOTICES: Mapping[str, str] = {
    "finished": "Goal reached",
    "invalid": "You asked too many questions at once. Please ask one question at a time.",
    "empty": "You have not said anything. Please ask me a question.",
    "partial": "That may well be. What exactly is wrong, and what am I to do about it?",
    "silent": "I do not know what to say to that.",
    "error": "No answer could be given.",
}
"""Replies that are not the customer's own, by the occasion."""

_ASKED: tuple[Kind, ...] = ("fact", "topic", "advice", "remedy")
_ADVISED: tuple[Kind, ...] = ("advice", "remedy")


@dataclass(frozen=True, slots=True)
class CustomerServiceSettings:
    """Rules of a game.

    Attributes:
        max_turns: The game is over after so many messages.
        verify_methods: Published rules that make a message invalid (``answers.VALIDITY_METHODS``).
            Rules that look for the secret are accepted and do nothing, as published.
        win_rule: Which win ends the game.
        judge_history: Send the earlier messages and replies to the judge.
        question_tag: The message stands in ``<question>`` tags; text without them is invalid.
        notices: Replies by occasion, ``PUBLISHED_NOTICES`` where missing.
    """

    max_turns: int = 20
    verify_methods: tuple[str, ...] = ("multiple_questions",)
    win_rule: WinRule = "compatible"
    judge_history: bool = True
    question_tag: bool = False
    notices: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        answers.check_methods(self.verify_methods)
        if self.max_turns < 1:
            raise UserError(f"max_turns is {self.max_turns}: a game needs at least one turn.")
        if self.win_rule not in get_args(WinRule):
            known = ", ".join(get_args(WinRule))
            raise UserError(f"win_rule is {self.win_rule!r}; the known values are {known}.")
        for key in self.notices:
            if key not in PUBLISHED_NOTICES:
                known = ", ".join(PUBLISHED_NOTICES)
                raise UserError(f"notices has the key {key!r}; the known keys are {known}.")

    def notice(self, occasion: str) -> str:
        """The reply for an occasion."""
        return self.notices.get(occasion, PUBLISHED_NOTICES[occasion])


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    turns: int = 0
    done: bool = False
    history: tuple[tuple[str, str], ...] = ()
    facts: frozenset[str] = frozenset()
    """Names of the facts that the customer was asked for."""
    tried: frozenset[str] = frozenset()
    """Advice that did not help."""
    cause: bool = False
    fix: bool = False
    feedback: str = ""
    footprint: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())


class CustomerService(SingleUseGame[GameState]):
    """One game.

    A packaged scenario is read by its rubric. For a task from elsewhere the rubric is derived from
    its golden answer, and counts only where the judge says the goal phrase, too; an answer of
    another form can be won under the compatible rule alone.

    Raises:
        UserError: For a task without a golden answer.
    """

    def __init__(self, task: Task, settings: CustomerServiceSettings) -> None:
        if not answers.normalise(task.secret):
            raise UserError(f"The task {task.id!r} has no secret: give every task a golden answer.")
        self.task = task
        self.settings = settings
        self.scenario = scenario_of(task)
        self.rubric: Rubric | None = (
            self.scenario.rubric if self.scenario else derived_rubric(task.secret)
        )
        self._state = GameState()
        self._methods = tuple(m for m in settings.verify_methods if m in answers.VALIDITY_METHODS)

    def parse(self, text: str) -> Action:
        """Read the agent's text; ``needs_judge`` is false where code decides."""
        message = question_text(text, self.settings.question_tag)
        if not answers.normalise(message):
            return Action(text, None, needs_judge=False)
        decided = bool(self._problems(message)) or self._decided_win(message)
        return Action(text, message, needs_judge=not decided)

    def judge_request(self, action: Action) -> JudgeRequest:
        """The judge's view of a message.

        Raises:
            ValueError: For an action without a message.
        """
        name = f"{self.task.id}/{answers.normalise(action.question or '')}"
        history = self._state.history if self.settings.judge_history else ()
        return judge_request(self.task, action, name, history)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Advance the game by one message.

        ``Outcome.done`` is true after a win and after the last turn; ``verdict`` tells them apart.

        Raises:
            ValueError: When the game is over, or a judge's reply is missing or was not asked for.
        """
        self._check_call(action, reply)
        last = self._state.turns + 1 >= self.settings.max_turns
        message = action.question
        if message is None:
            text = self.settings.notice("empty")
            outcome = Outcome(Verdict.INVALID, text, last, diagnostics=("no_question",))
            self._end_turn(outcome, "No message was sent.")
            return self._scored(outcome)
        outcome = self._outcome(message, reply, last)
        if outcome.verdict not in (Verdict.ERROR, Verdict.INVALID):
            self._learn(message)
        if outcome.verdict is not Verdict.ERROR:
            pair = (message, outcome.reply)
            self._state = replace(self._state, history=(*self._state.history, pair))
        self._end_turn(outcome, f"Sent: {message}")
        return self._scored(outcome)

    def state_key(self) -> str:
        """Name of what is known, in any order: facts, advice without effect, cause and fix.

        For a task from elsewhere: of the set of messages and replies.
        """
        state = self._state
        if self.scenario is None:
            known = {f"{answers.normalise(said)}={reply}" for said, reply in state.history}
        else:
            known = {*state.facts, *state.tried, f"cause={state.cause}", f"fix={state.fix}"}
        return digest("\n".join(sorted(known)))

    def progress(self) -> float:
        """The score so far, in [0, 1]."""
        return self._score() or 0.0

    def footprint(self) -> tuple[frozenset[str], frozenset[str]]:
        """What the last message built on, and what it established.

        An attempt at the solution reads the facts gathered before; a question reads nothing.
        """
        return self._state.footprint

    def action_key(self, text: str) -> str:
        """Equal for texts that do the same: name the cause, ask for one fact, give one advice."""
        message = self.parse(text).question
        if message is None:
            return "invalid"
        reading, named = self._read(message), self._named(message)
        if named.cause or named.fix:
            parts = [name for name, holds in (("cause", named.cause), ("fix", named.fix)) if holds]
            return f"{'list' if named.is_list else 'names'}:{'+'.join(parts)}"
        if reading is not None and reading.kind in _ASKED:
            return f"{reading.kind}:{reading.key}"
        return answers.normalise(message)

    def reference(self) -> str:
        """The golden answer."""
        return self.task.secret

    def _named(self, message: str) -> Named:
        if self.scenario is not None:
            return read_message(message, self.scenario).named
        return read_named(message, self.rubric) if self.rubric else Named()

    def _read(self, message: str) -> Reading | None:
        return read_message(message, self.scenario) if self.scenario else None

    def _problems(self, message: str) -> tuple[str, ...]:
        """Published diagnostics of a message that breaks a rule of form; empty for a valid one."""
        if not self._methods:
            return ()
        checked = answers.verify_question(message, "other", self.task.secret, self._methods, None)
        return () if checked.valid else checked.diagnostics

    def _decided_win(self, message: str) -> bool:
        """Whether code alone ends the game with a win."""
        return self.scenario is not None and self._named(message).solved

    def _outcome(self, message: str, reply: JudgeReply | None, last: bool) -> Outcome:
        problems, named, reading = (
            self._problems(message),
            self._named(message),
            self._read(message),
        )
        diagnostics = list(problems)
        if any(answers.is_duplicate(message, [said]) for said, _ in self._state.history):
            diagnostics.append("repeated")
        if named.is_list:
            diagnostics.append("candidate_list")
        strict = compatible = False
        if problems:
            verdict, text = Verdict.INVALID, self.settings.notice("invalid")
        elif reply is None:
            strict = compatible = True
            verdict, text = Verdict.WIN, self.settings.notice("finished")
        elif reply.verdict is Verdict.ERROR:
            verdict, text = Verdict.ERROR, self.settings.notice("error")
            diagnostics.append("judge_failed")
        elif reply.verdict is Verdict.INVALID:
            verdict, text = Verdict.INVALID, reply.text or self.settings.notice("invalid")
            diagnostics.append("invalid_by_judge")
        elif reply.verdict is Verdict.WIN and has_goal_phrase(message):
            verdict, text = Verdict.OTHER, self.settings.notice("silent")
            diagnostics.append("goal_phrase")
        elif reply.verdict is Verdict.WIN:
            compatible, strict = True, named.solved
            ends = strict or self.settings.win_rule == "compatible"
            verdict = Verdict.WIN if ends else Verdict.OTHER
            text = self.settings.notice("finished" if ends else "partial")
        else:
            verdict, text = Verdict.OTHER, reply.text.strip() or self.settings.notice("silent")
        return Outcome(
            verdict=verdict,
            reply=text,
            done=verdict is Verdict.WIN or last,
            strict_win=strict,
            compatible_win=compatible,
            is_guess=named.cause or named.fix or (reading is not None and reading.kind in _ADVISED),
            is_list=named.is_list,
            action_key=self.action_key(message),
            diagnostics=tuple(diagnostics),
        )

    def _learn(self, message: str) -> None:
        """Take in what an answered message established."""
        state, named, reading = self._state, self._named(message), self._read(message)
        before, written = state.facts | state.tried, set[str]()
        if named.any:
            written |= {name for name in ("cause", "fix") if getattr(named, name)}
            state = replace(state, cause=state.cause or named.cause, fix=state.fix or named.fix)
        elif reading is not None and reading.kind == "fact":
            written.add(f"fact:{reading.key}")
            state = replace(state, facts=state.facts | {f"fact:{reading.key}"})
        elif reading is not None and reading.kind in _ADVISED:
            written.add(f"{reading.kind}:{reading.key}")
            state = replace(state, tried=state.tried | {f"{reading.kind}:{reading.key}"})
        read = before if named.any else frozenset[str]()
        self._state = replace(state, footprint=(read, frozenset(written)))

    def _end_turn(self, outcome: Outcome, said: str) -> None:
        notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
        learnt = outcome.verdict not in (Verdict.ERROR, Verdict.INVALID)
        nothing = (frozenset[str](), frozenset[str]())
        self._state = replace(
            self._state,
            turns=self._state.turns + 1,
            done=outcome.done,
            feedback=f"{said} Reply: {outcome.reply}{notes}",
            footprint=self._state.footprint if learnt else nothing,
        )

    def _scored(self, outcome: Outcome) -> Outcome:
        """With the grade where the game is over, but for one that ends with a judge's failure."""
        graded = outcome.done and outcome.verdict is not Verdict.ERROR
        return replace(outcome, score=self._score()) if graded else outcome

    def _score(self) -> float | None:
        """Cause, fix and needed facts; without a scenario cause and fix; None without a rubric."""
        if self.rubric is None:
            return None
        state = self._state
        solution = CAUSE_SHARE * state.cause + FIX_SHARE * state.fix
        if self.scenario is None:
            return solution / (CAUSE_SHARE + FIX_SHARE)
        gathered = sum(f"fact:{name}" in state.facts for name in self.scenario.needed)
        return solution + FACTS_SHARE * gathered / len(self.scenario.needed)
