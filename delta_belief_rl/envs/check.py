"""A contract check that any environment can be run through, one's own included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from delta_belief_rl.envs.base import Action, Env, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.types import Task, Verdict

OPTIONAL_HOOKS = (
    "state_key",
    "progress",
    "footprint",
    "belief",
    "uncertainty",
    "snapshot",
    "restore",
    "replayable",
    "reference",
    "feedback",
    "action_key",
)

DEFAULT_ACTIONS = (
    "Is it alive?",
    "Can you eat it?",
    "",
    "\n \u200b",
    "Is it alive?",
    "no question at all " * 60,
)


class EnvContractError(AssertionError):
    """An environment breaks the contract; the message says how in one sentence."""


def available_hooks(env: object) -> frozenset[str]:
    """Names of the optional hooks that an environment has."""
    return frozenset(name for name in OPTIONAL_HOOKS if callable(getattr(env, name, None)))


def is_replayable(env: Env) -> bool | None:
    """What an environment says of itself by ``replayable``; None without that hook."""
    if "replayable" not in available_hooks(env):
        return None
    said = _call(env, "replayable")
    _require(isinstance(said, bool), "'replayable' must return a bool")
    return bool(said)


def check_env(
    factory: Callable[[], Env],
    actions: Sequence[str] = DEFAULT_ACTIONS,
    judge: Callable[[JudgeRequest], JudgeReply] | None = None,
) -> None:
    """Run an environment through its contract.

    Checked are: single use, no state shared between instances, pure ``parse`` and hooks, types of
    what comes back, failures of the judge, determinism, the round trip of ``snapshot`` and
    ``restore``, and, where ``replayable`` says so, that a game can be played again from its actions
    and replies.

    Args:
        factory: Makes a fresh game of one and the same task.
        actions: Texts to play; stay below the turn limit of the game.
        judge: Answers requests; alternating yes and no when None.

    Raises:
        EnvContractError: At the first breach.

    Example:
        >>> from delta_belief_rl.envs.twenty_questions import (
        ...     TwentyQuestions,
        ...     TwentyQuestionsSettings,
        ... )
        >>> task = Task("t", "tw_q", "dog", ())
        >>> check_env(lambda: TwentyQuestions(task, TwentyQuestionsSettings()))
    """
    ask = judge or _alternating
    first, second = factory(), factory()
    _check_shape(first, second)
    untouched = _view(second)
    log = _play(first, actions, ask)
    _require(_view(second) == untouched, "playing one game changed another one: state is shared")
    _require(_play(second, actions, ask) == log, "two games with the same actions went differently")
    _check_judge_failure(factory(), actions)
    _check_call_rules(factory(), actions, ask)
    _check_finished(factory(), actions, ask)
    if {"snapshot", "restore"} & available_hooks(first):
        _check_snapshot(factory, actions, ask)
    if is_replayable(first):
        _check_replay(factory, actions, ask)


def _check_shape(first: Env, second: Env) -> None:
    _require(isinstance(cast(object, first), Env), "the object lacks a member of the Env protocol")
    _require(
        first is not second, "the factory returned the same object twice: a game is single-use"
    )
    _require(isinstance(cast(object, first.task), Task), "'task' must be a Task")
    _require(first.task == second.task, "the factory must make games of one task")
    _require(not hasattr(first, "reset"), "'reset' must not exist: a game is single-use")
    hooks = available_hooks(first)
    both = {"snapshot", "restore"} & hooks
    _require(len(both) != 1, "'snapshot' and 'restore' must come together")


def _play(
    env: Env, actions: Sequence[str], ask: Callable[[JudgeRequest], JudgeReply]
) -> list[tuple[Outcome, dict[str, object]]]:
    """Play the actions until the game is over, checking each step."""
    log: list[tuple[Outcome, dict[str, object]]] = []
    for text in actions:
        outcome = _step(env, text, ask)
        log.append((outcome, _view(env)))
        if outcome.done:
            break
    return log


def _step(env: Env, text: str, ask: Callable[[JudgeRequest], JudgeReply]) -> Outcome:
    before = _view(env)
    action = env.parse(text)
    _check_action(action, text)
    _require(env.parse(text) == action, f"'parse' gave two results for {text!r}")
    reply = None
    if action.needs_judge:
        request = env.judge_request(action)
        _require(
            isinstance(cast(object, request), JudgeRequest),
            "'judge_request' must return a JudgeRequest",
        )
        _require(request.task == env.task, "'judge_request' must carry the game's own task")
        reply = ask(request)
    _require(
        _view(env) == before,
        "'parse', 'judge_request' or a hook changed the game: only 'apply' may",
    )
    outcome = env.apply(action, reply)
    _check_outcome(outcome)
    return outcome


def _check_action(action: object, text: str) -> None:
    _require(isinstance(action, Action), "'parse' must return an Action")
    parsed = cast(Action, action)
    _require(parsed.text == text, "'Action.text' must be the agent's text, unchanged")
    _require(
        parsed.question is not None or not parsed.needs_judge,
        "an action without a question must not need the judge",
    )


def _check_outcome(outcome: object) -> None:
    _require(isinstance(outcome, Outcome), "'apply' must return an Outcome")
    result = cast(Outcome, outcome)
    _require(
        isinstance(cast(object, result.verdict), Verdict), "'Outcome.verdict' must be a Verdict"
    )
    _require(isinstance(cast(object, result.reply), str), "'Outcome.reply' must be text")
    _require(bool(result.reply), "'Outcome.reply' must not be empty: the agent reads it")
    for name in ("done", "strict_win", "compatible_win", "is_guess", "is_list"):
        _require(isinstance(getattr(result, name), bool), f"'Outcome.{name}' must be a bool")
    _require(isinstance(cast(object, result.action_key), str), "'Outcome.action_key' must be text")
    notes = cast(object, result.diagnostics)
    texts = isinstance(notes, tuple) and all(
        isinstance(one, str) for one in cast("tuple[object, ...]", notes)
    )
    _require(texts, "'Outcome.diagnostics' must be a tuple of texts")
    _check_score(result)
    won = result.verdict is Verdict.WIN
    _require(result.done or not won, "a win must end the game")
    _require(
        result.verdict is not Verdict.ERROR or not (result.strict_win or result.compatible_win),
        "an error of the judge must not be a win",
    )


def _check_score(result: Outcome) -> None:
    """A grade is a number in [0, 1] of a game that is over: the last one is paid as its outcome."""
    score = cast(object, result.score)
    if score is None:
        return
    number = isinstance(score, float | int) and not isinstance(score, bool)
    _require(number, "'Outcome.score' must be None or a number")
    _require(0.0 <= cast(float, score) <= 1.0, f"'Outcome.score' must lie in [0, 1] and is {score}")
    _require(result.done, "'Outcome.score' must be None until the game is over")


def _check_judge_failure(env: Env, actions: Sequence[str]) -> None:
    """A failed judge call is an error verdict and teaches nothing."""
    asked = next((text for text in actions if env.parse(text).needs_judge), None)
    if asked is None:
        return
    known = _view(env)
    outcome = env.apply(env.parse(asked), JudgeReply(Verdict.ERROR, reason="no answer"))
    _check_outcome(outcome)
    _require(
        outcome.verdict is Verdict.ERROR,
        "a failed judge call must have the verdict 'error', nothing else",
    )
    after = _view(env)
    for hook in ("state_key", "progress", "belief", "uncertainty"):
        _require(known.get(hook) == after.get(hook), f"a failed judge call changed '{hook}'")


def _check_call_rules(
    env: Env, actions: Sequence[str], ask: Callable[[JudgeRequest], JudgeReply]
) -> None:
    """``apply`` refuses a missing reply."""
    for text in actions:
        action = env.parse(text)
        if not action.needs_judge:
            continue
        try:
            env.apply(action, None)
        except (ValueError, TypeError):
            return
        raise EnvContractError("'apply' must raise a ValueError when the judge's reply is missing.")


def _check_finished(
    env: Env, actions: Sequence[str], ask: Callable[[JudgeRequest], JudgeReply]
) -> None:
    """Nothing can be played after the end; only tried where the actions reach one."""
    if not any(_step(env, text, ask).done for text in actions):
        return
    try:
        action = env.parse(actions[0])
        env.apply(action, ask(env.judge_request(action)) if action.needs_judge else None)
    except (ValueError, RuntimeError):
        return
    raise EnvContractError("'apply' must raise a ValueError after the game is over.")


def _check_snapshot(
    factory: Callable[[], Env], actions: Sequence[str], ask: Callable[[JudgeRequest], JudgeReply]
) -> None:
    """Every state of the game can be returned to, on the same object and on a fresh one."""
    env = factory()
    for at in range(len(actions)):
        state = _call(env, "snapshot")
        here = _view(env)
        log = _play(env, actions[at:], ask)
        for other in (env, factory()):
            _call(other, "restore", state)
            _require(_view(other) == here, "'restore' did not bring back the state of the snapshot")
            again = _play(other, actions[at:], ask)
            _require(
                again == log, "a restored game went differently from the one it was taken from"
            )
        _call(env, "restore", state)
        if _step(env, actions[at], ask).done:
            return


def _check_replay(
    factory: Callable[[], Env], actions: Sequence[str], ask: Callable[[JudgeRequest], JudgeReply]
) -> None:
    """Twice, a fresh game that hears what another one heard goes as that one; no judge is asked."""
    env = factory()
    heard: list[tuple[str, JudgeReply | None]] = []
    seen: list[tuple[Outcome, dict[str, object]]] = []
    for text in actions:
        action = env.parse(text)
        reply = ask(env.judge_request(action)) if action.needs_judge else None
        heard.append((text, reply))
        seen.append((env.apply(action, reply), _view(env)))
        if seen[-1][0].done:
            break
    for _ in range(2):
        again = factory()
        for (text, reply), expected in zip(heard, seen, strict=True):
            got = again.apply(again.parse(text), reply), _view(again)
            _require(
                got == expected,
                "'replayable' is true, but a game went differently with the same actions and "
                "replies",
            )


def _view(env: Env) -> dict[str, object]:
    """Values of all reading hooks, checked."""
    hooks = available_hooks(env)
    view: dict[str, object] = {}
    for name in ("state_key", "reference", "feedback"):
        if name in hooks:
            view[name] = _call(env, name)
            _require(isinstance(view[name], str), f"'{name}' must return text")
    if "progress" in hooks:
        progress = _call(env, "progress")
        _require(isinstance(progress, float | int), "'progress' must return a number")
        _require(math.isfinite(cast(float, progress)), "'progress' must be finite")
        view["progress"] = progress
    if "belief" in hooks:
        belief = dict(cast(Mapping[str, float], _call(env, "belief")))
        total = sum(belief.values())
        _require(
            all(value >= 0.0 for value in belief.values()), "'belief' has a negative probability"
        )
        _require(abs(total - 1.0) < 1e-6, f"'belief' must sum to 1, not to {total:.6g}")
        view["belief"] = belief
    if "uncertainty" in hooks:
        entropy, truth = cast(tuple[float, float], _call(env, "uncertainty"))
        _require(-1e-9 <= entropy <= 1 + 1e-9, "the entropy of 'uncertainty' must lie in [0, 1]")
        _require(
            math.isfinite(truth) and truth <= 1e-9,
            "the second number of 'uncertainty' must be a log-probability",
        )
        view["uncertainty"] = (entropy, truth)
    if "footprint" in hooks:
        parts = cast(tuple[object, ...], _call(env, "footprint"))
        good = len(parts) == 2 and all(isinstance(part, frozenset) for part in parts)
        _require(good, "'footprint' must return two frozensets: what was read, what was written")
        view["footprint"] = parts
    if "action_key" in hooks:
        key = _call(env, "action_key", "Is it alive?")
        _require(isinstance(key, str), "'action_key' must return text")
        view["action_key"] = key
    return view


def _call(env: Env, name: str, *arguments: object) -> object:
    hook = cast(Callable[..., object], getattr(env, name))
    return hook(*arguments)


def _alternating(request: JudgeRequest) -> JudgeReply:
    """Yes and no in a way that depends on the request only."""
    return JudgeReply(Verdict.YES if len(request.action) % 2 else Verdict.NO, "Yes")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise EnvContractError(f"Environment contract: {problem}.")
