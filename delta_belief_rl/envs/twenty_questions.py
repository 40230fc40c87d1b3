"""20 Questions: ask yes/no questions about a secret noun, win by naming it.

Code decides what code can decide, before any judge is asked: an action that breaks a validity rule,
a question that was asked before, and a win. The judge only says yes or no (and may call a question
invalid).

Two win rules exist. ``compatible`` is the published one: the secret stands as a word in a valid
question. It can be exploited by naming many candidates at once. ``strict`` asks for one candidate,
guessed directly. Both are recorded on every outcome whichever of them ends the game; a strict win
is always a compatible one, also where the secret has several words, which the published rule alone
never finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
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
from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.types import Task, UserError, Verdict

WinRule = Literal["compatible", "strict"]
CandidateLists = Literal["report", "penalise", "refuse"]
Duplicates = Literal["code", "judge"]

PUBLISHED_NOTICES: Mapping[str, str] = {
    "yes": "yes",
    "no": "no",
    "finished": "finished",
    "invalid": "You have not asked a valid question. Please ask one short yes/no question.",
    "repeated": "You have already asked this. Please ask a new yes/no question.",
    "error": "No answer could be given.",
}
"""Replies of the published setting: bare lower-case words, and sentences for the rest."""

_WORDS = {
    Verdict.YES: "yes",
    Verdict.NO: "no",
    Verdict.REPEATED: "repeated",
    Verdict.INVALID: "invalid",
    Verdict.WIN: "finished",
}
_VERDICTS = {word: verdict for verdict, word in _WORDS.items()}


@dataclass(frozen=True, slots=True)
class TwentyQuestionsSettings:
    """Rules of a game.

    Attributes:
        max_turns: The game is over after so many actions.
        verify_methods: Published rules that correct the judge (``answers.verify_question``). Empty:
            the judge's word stands, and its "finished" wins under the compatible rule.
        false_positive_behavior: What an unconfirmed "finished" of the judge becomes; None keeps it.
        short_circuit: Report only the first broken validity rule.
        win_rule: Which win ends the game.
        candidate_lists: ``report``: a list of candidates is flagged only. ``penalise``: it is
            answered, but its verdict is invalid unless it wins. ``refuse``: it is invalid,
            unanswered, and never wins.
        duplicates: ``code``: equal questions are found by comparing texts (and, in a known world,
            meanings).
            ``judge``: only the judge finds them.
        judge_history: Send earlier questions and replies to the judge. Without it a reply is a
            function of (secret, question), so it may be cached over games.
        question_tag: The question stands in ``<question>`` tags; text without them is invalid.
        notices: Replies by word, ``PUBLISHED_NOTICES`` where missing.
    """

    max_turns: int = 20
    verify_methods: tuple[str, ...] = ("exact", *answers.VALIDITY_METHODS)
    false_positive_behavior: str | None = "yes"
    short_circuit: bool = False
    win_rule: WinRule = "compatible"
    candidate_lists: CandidateLists = "report"
    duplicates: Duplicates = "code"
    judge_history: bool = True
    question_tag: bool = False
    notices: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        answers.check_methods(self.verify_methods)
        if self.max_turns < 1:
            raise UserError(f"max_turns is {self.max_turns}: a game needs at least one turn.")
        check_choice("win_rule", self.win_rule, get_args(WinRule))
        check_choice("candidate_lists", self.candidate_lists, get_args(CandidateLists))
        check_choice("duplicates", self.duplicates, get_args(Duplicates))
        if self.false_positive_behavior is not None:
            check_choice(
                "false_positive_behavior", self.false_positive_behavior, answers.JUDGE_WORDS
            )
        for key in self.notices:
            check_choice("the keys of notices", key, tuple(PUBLISHED_NOTICES))
        if self.duplicates == "judge" and not self.judge_history:
            raise UserError(
                "duplicates='judge' needs judge_history=true: the judge must see what was asked."
            )

    def notice(self, word: str) -> str:
        """The reply that the policy reads for a word of the judge, or for ``error``."""
        return self.notices.get(word, PUBLISHED_NOTICES[word])

    def word(self, reply: str) -> str:
        """The judge's word that ``notice`` made a reply of; any other reply as it is."""
        return next((word for word in PUBLISHED_NOTICES if self.notice(word) == reply), reply)


@dataclass(frozen=True, slots=True)
class Reading:
    """What code alone finds out about a question, before any judge."""

    valid: bool
    positive: bool
    strict: bool
    is_guess: bool
    is_list: bool
    action_key: str
    diagnostics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    turns: int = 0
    done: bool = False
    history: tuple[tuple[str, str], ...] = ()
    asked: tuple[tuple[str, Verdict], ...] = ()
    """Repeat key and verdict of every action that was answered."""
    feedback: str = ""
    last_key: str = ""
    """Key of the last action when it was answered, else empty."""
    known_before: Knowledge | None = None
    """What was known before the last action."""
    knowledge: Knowledge | None = None


@lru_cache(maxsize=1 << 16)
def read_question(
    question: str,
    secret: str,
    aliases: tuple[str, ...],
    methods: tuple[str, ...],
    short_circuit: bool,
) -> Reading:
    """What the text rules say about a question; a group's games ask the same ones all the time."""
    checked = answers.verify_question(question, "no", secret, methods, short_circuit=short_circuit)
    positive = checked.positive
    if not set(methods) & set(answers.POSITIVE_METHODS):
        positive = answers.exact_match(question, secret)
    strict = answers.strict_guess(question, secret, aliases)
    return Reading(
        valid=checked.valid,
        positive=positive,
        strict=strict,
        is_guess=strict or answers.guess_form(question),
        is_list=not strict and answers.candidate_list(question),
        action_key=answers.normalise(question),
        diagnostics=checked.diagnostics,
    )


class TwentyQuestions(SingleUseGame[GameState]):
    """One game over any secret, judged by a model.

    Raises:
        UserError: For a task without a secret, or with one that the rules cannot use.
    """

    def __init__(self, task: Task, settings: TwentyQuestionsSettings) -> None:
        if not answers.normalise(task.secret):
            raise UserError(f"The task {task.id!r} has no secret: give every task a golden answer.")
        self.task = task
        self.settings = settings
        self._state = GameState()
        # A secret that is no regular expression must stop the run before its first game.
        answers.verify_question("?", "no", task.secret, settings.verify_methods)

    def parse(self, text: str) -> Action:
        """Read the agent's text; ``needs_judge`` is false where code decides."""
        question = question_text(text, self.settings.question_tag)
        if not question:
            return Action(text, None, needs_judge=False)
        decided = self._decide(question, self._read(question))
        return Action(text, question, needs_judge=decided is None)

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
        reading = self._read(action.question) if action.question is not None else None
        outcome = self._outcome(action.question, reading, reply)
        self._advance(action, reading, outcome)
        return outcome

    def state_key(self) -> str:
        """Name of the set of answered questions, in any order."""
        known = {pair for pair in self._state.asked if pair[1] in (Verdict.YES, Verdict.NO)}
        return digest("\n".join(f"{key}={verdict}" for key, verdict in sorted(known)))

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same action."""
        question = self.parse(text).question
        return "invalid" if question is None else self._read(question).action_key

    def reference(self) -> str:
        """The secret."""
        return self.task.secret

    def _read(self, question: str) -> Reading:
        return read_question(
            question,
            self.task.secret,
            self.task.aliases,
            self.settings.verify_methods,
            self.settings.short_circuit,
        )

    def _repeat_key(self, question: str, reading: Reading) -> str:
        """What must be equal for a question to count as asked before."""
        return answers.normalise(question)

    def _wins(self, reading: Reading) -> bool:
        """Whether code alone ends the game with a win."""
        if self.settings.win_rule == "strict" or not self.settings.verify_methods:
            return reading.strict
        confirmed = set(self.settings.verify_methods) & set(answers.POSITIVE_METHODS)
        return reading.strict or (reading.positive and bool(confirmed))

    def _decide(self, question: str, reading: Reading) -> Verdict | None:
        """The verdict where no judge is needed, else None."""
        if not reading.valid or (reading.is_list and self.settings.candidate_lists == "refuse"):
            return Verdict.INVALID
        if self._wins(reading):
            return Verdict.WIN
        if self.settings.duplicates == "code":
            key = self._repeat_key(question, reading)
            earlier = [verdict for asked, verdict in self._state.asked if asked == key]
            # A repeated bad question stays bad: repeating it must not be the cheaper mistake.
            if earlier:
                return Verdict.INVALID if Verdict.INVALID in earlier else Verdict.REPEATED
        return None

    def _outcome(
        self, question: str | None, reading: Reading | None, reply: JudgeReply | None
    ) -> Outcome:
        last = self._state.turns + 1 >= self.settings.max_turns
        if question is None or reading is None:
            return Outcome(
                Verdict.INVALID, self.settings.notice("invalid"), last, diagnostics=("no_question",)
            )
        diagnostics = list(reading.diagnostics)
        if reply is None:
            verdict = self._decide(question, reading) or Verdict.INVALID
        else:
            verdict = self._corrected(question, reply, diagnostics)
        if verdict is Verdict.REPEATED and "repeated" not in diagnostics:
            diagnostics.append("repeated")
        text = self.settings.notice(_WORDS.get(verdict, "error"))
        refused = reading.is_list and self.settings.candidate_lists == "refuse"
        if reading.is_list:
            diagnostics.append("candidate_list")
            if self.settings.candidate_lists == "penalise" and verdict in (Verdict.YES, Verdict.NO):
                verdict = Verdict.INVALID
        won = verdict is Verdict.WIN
        named = reading.valid and not refused and (reading.positive or reading.strict)
        return Outcome(
            verdict=verdict,
            reply=text,
            done=won or last,
            strict_win=reading.valid and reading.strict,
            compatible_win=won or named,
            is_guess=reading.is_guess,
            is_list=reading.is_list,
            action_key=reading.action_key,
            diagnostics=tuple(diagnostics),
        )

    def _corrected(self, question: str, reply: JudgeReply, diagnostics: list[str]) -> Verdict:
        """The judge's verdict after the published rules; appends to ``diagnostics``."""
        word = _WORDS.get(reply.verdict)
        if word is None:
            failed = reply.verdict is Verdict.ERROR
            diagnostics.append("judge_failed" if failed else answers.UNRECOGNISED)
            return Verdict.ERROR
        if reply.reason == answers.UNRECOGNISED:
            diagnostics.append(answers.UNRECOGNISED)
        replacement = self.settings.false_positive_behavior
        if self.settings.win_rule == "strict":
            # Only a direct guess wins, so a mention that the judge took for a win is at most a yes.
            if word == "finished":
                diagnostics.append("false_positive")
                word = replacement if replacement not in (None, "finished") else "yes"
            methods: Iterable[str] = answers.VALIDITY_METHODS
            rules = [method for method in self.settings.verify_methods if method in methods]
        else:
            rules = list(self.settings.verify_methods)
        if rules:
            checked = answers.verify_question(
                question, word, self.task.secret, rules, replacement, self.settings.short_circuit
            )
            diagnostics += [name for name in checked.diagnostics if name not in diagnostics]
            diagnostics += [checked.outcome] if checked.outcome.startswith("false") else []
            word = checked.answer
        return _VERDICTS[word]

    def _advance(self, action: Action, reading: Reading | None, outcome: Outcome) -> None:
        state = replace(self._state, turns=self._state.turns + 1, done=outcome.done)
        state = replace(
            state,
            feedback=_feedback(action, outcome),
            last_key="",
            known_before=state.knowledge,
        )
        if (
            action.question is not None
            and reading is not None
            and outcome.verdict is not Verdict.ERROR
        ):
            key = self._repeat_key(action.question, reading)
            state = replace(
                state,
                history=(*state.history, (action.question, self.settings.word(outcome.reply))),
                # What broke a rule of form was not answered: mended, it is a new question.
                asked=(*state.asked, (key, outcome.verdict)) if reading.valid else state.asked,
            )
        self._state = state


def _feedback(action: Action, outcome: Outcome) -> str:
    question = "No question was asked." if action.question is None else f"Asked: {action.question}"
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{question} Reply: {outcome.reply}{notes}"
