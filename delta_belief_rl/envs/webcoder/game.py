"""One project as an environment: files in plain text, judged by what the application does.

| what a message is | verdict | notes |
|---|---|---|
| it has no block and no command, or cannot be carried out | invalid | why: ``no_block``, ... |
| a message that changed nothing in this state, once more | repeated | ``repeated`` |
| it changes nothing | other | ``no_change`` |
| it changes the project | other | ``build_failed`` where it is not built then |
| the end of the last task, all tasks with the reward 1 | win | strict and compatible alike |

A project passes through the tasks of ``KINDS``. A task ends with ``done``, or with the last of its
messages (note ``task_over``), and is then paid as ``algo.shapers.requirements_met`` says; before
the repair something is broken in the project, whatever the agent made of it. The grade of a game is
the mean over its tasks, clamped to [0, 1].

The reply says whether the project is built, what is seen on its page, and what clicks on it do. It
never says what is checked, nor how much of it holds. Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from delta_belief_rl.algo.shapers.requirements_met import (
    grade,
    regressed_share,
    satisfied_share,
    task_reward,
)
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.single_use import SingleUseGame, digest, question_text
from delta_belief_rl.envs.webcoder.app import build
from delta_belief_rl.envs.webcoder.faults import broken
from delta_belief_rl.envs.webcoder.footprint import NOTHING, Footprint, footprint
from delta_belief_rl.envs.webcoder.project import (
    Operation,
    Project,
    Refused,
    Show,
    Write,
    canonical,
    changed,
    fingerprint,
)
from delta_belief_rl.envs.webcoder.reading import Reading, read
from delta_belief_rl.envs.webcoder.requirements import Examined, examine
from delta_belief_rl.envs.webcoder.settings import WebCoderSettings, read_settings
from delta_belief_rl.envs.webcoder.tasks import (
    Blueprint,
    Job,
    begin,
    blueprint_from_json,
    make_tasks,
)
from delta_belief_rl.types import FloatArray, Task, UserError, Verdict

KEEPS = frozenset({"modify", "repair"})
"""Tasks in which nothing that worked may break."""
CLOSED = "The project is finished."
SHOWN = 1500
"""Characters of a file that ``show`` shows."""


@dataclass(frozen=True, slots=True)
class Result:
    """A project as it stands in a task.

    Attributes:
        built: Whether the build succeeded.
        examined: What the checks of the task's requirements said.
        says: What the agent is told of the build and of what is seen.
    """

    built: bool
    examined: Examined
    says: str


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    files: tuple[tuple[str, str], ...]
    before: Result
    """The project at the beginning of the task."""
    now: Result
    stage: int = 0
    used: int = 0
    """Messages of this task."""
    turns: int = 0
    done: bool = False
    feedback: str = ""
    rewards: tuple[float, ...] = ()
    """Of the tasks that are over."""
    tried: frozenset[tuple[str, str]] = frozenset()
    """States and messages that changed nothing in them."""
    footprint: Footprint = NOTHING

    @property
    def project(self) -> Project:
        """The files."""
        return dict(self.files)


class WebCoder(SingleUseGame[GameState]):
    """One game of a task.

    Raises:
        UserError: The task does not describe a project.
    """

    def __init__(
        self,
        task: Task,
        max_turns: int,
        settings: WebCoderSettings | None = None,
        question_tag: bool = False,
    ) -> None:
        try:
            self.blueprint: Blueprint = blueprint_from_json(task.scenario or "")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The task {task.id!r} has no project that can be written ({error}): use tasks "
                "that the environment webcoder made."
            ) from error
        self.task = task
        self._max_turns = max_turns
        self._settings = settings or WebCoderSettings()
        self._question_tag = question_tag
        start = self._result({}, 0)
        self._state = GameState((), start, start)

    @property
    def project(self) -> Project:
        """The files as they are."""
        return self._state.project

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the tasks that are over, in their order."""
        return self._state.rewards

    def parse(self, text: str) -> Action:
        """Read the agent's message; no judge is asked."""
        said = question_text(text, self._question_tag)
        return Action(text, None if read(said).note else said, needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """No action of these games needs a judge.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No message about a project is sent to a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Carry out a message.

        Raises:
            ValueError: The game is over, or a judge's reply was given.
        """
        self._check_call(action, reply)
        state = self._state
        reading = read(question_text(action.text, self._question_tag))
        key = _message_key(reading)
        verdict, notes, says, after = self._carried_out(reading, key)
        last = state.turns + 1 >= self._max_turns
        # What is not carried out is not done either.
        said_done = reading.done and verdict is not Verdict.INVALID
        finished = last or said_done or state.used + 1 >= self._settings.turns_per_task
        after = replace(after, turns=state.turns + 1, used=state.used + 1)
        report = self._report(after)
        if finished:
            notes += ("task_over", *self._end_notes(after))
            after, more = self._next_task(after, last)
            says = f"{says} {more}"
        won = after.done and len(after.rewards) == self._number and min(after.rewards) >= 1.0
        if won:
            verdict = Verdict.WIN
        outcome = Outcome(
            verdict=verdict,
            reply=says,
            done=after.done,
            strict_win=won,
            compatible_win=won,
            action_key=key,
            diagnostics=notes,
            score=self._grade(after.rewards) if after.done else None,
        )
        self._state = replace(after, feedback=_feedback(reading, notes, report))
        return outcome

    def state_key(self) -> str:
        """Name of the files in canonical form, and of the task that is on.

        The same files ask for other actions in another task.
        """
        return digest(f"{self._state.stage} {fingerprint(self._state.project)}")

    def progress(self) -> float:
        """Satisfied share of the requirements of the task that is on; 0 where the gate is shut."""
        state = self._state
        if not state.now.built and self._settings.gate:
            return 0.0
        return float(satisfied_share(self._weights(state.stage), state.now.examined.array()))

    def action_key(self, text: str) -> str:
        """Equal for messages that ask for the same."""
        return _message_key(read(question_text(text, self._question_tag)))

    def footprint(self) -> Footprint:
        """Files and elements that the last message read, and those that it wrote."""
        return self._state.footprint

    def reference(self) -> str:
        """A message that solves the task that is on; empty where the game is over."""
        if self._state.done:
            return ""
        files = self._job(self._state.stage).solution
        blocks = [f"```{path}\n{files[path]}```" for path in sorted(files, reverse=True)]
        return "\n".join([*blocks, "done"])

    @property
    def _number(self) -> int:
        return len(self.blueprint.jobs)

    def _job(self, stage: int) -> Job:
        return self.blueprint.jobs[stage]

    def _weights(self, stage: int) -> FloatArray:
        required = self.blueprint.required(self._job(stage).kind)
        return np.array([one.weight for one in required], dtype=np.float64)

    def _result(self, project: Project, stage: int) -> Result:
        """Build a project and check what its task requires."""
        made = build(project)
        app = made.app or (None if self._settings.gate else made.rest)
        says = f"Build failed: {made.problem}."
        if made.app is not None:
            says = f"Build ok. Page: {made.app.outline()}. Behaviour: {made.app.walk()}."
        required = self.blueprint.required(self._job(stage).kind)
        return Result(made.app is not None, examine(required, app), says)

    def _carried_out(
        self, reading: Reading, key: str
    ) -> tuple[Verdict, tuple[str, ...], str, GameState]:
        """Verdict, notes, reply and state after a message, before its task may end."""
        state = replace(self._state, footprint=NOTHING)
        project = state.project
        try:
            if reading.note:
                raise Refused(reading.note, reading.problem)
            operations = reading.operations
            wanted = changed(project, operations)
        except Refused as refused:
            return Verdict.INVALID, (refused.note,), f"Nothing is changed: {refused}.", state
        shown = _shown(wanted, operations)
        state = replace(state, footprint=footprint(project, wanted, operations))
        if wanted == project:
            here = (self.state_key(), key)
            repeated = here in state.tried
            state = replace(state, tried=state.tried | {here})
            notes = ("no_change", "repeated") if repeated else ("no_change",)
            says = shown or f"Nothing is changed. {state.now.says}"
            return Verdict.REPEATED if repeated else Verdict.OTHER, notes, says, state
        now = self._result(wanted, state.stage)
        notes = () if now.built else ("build_failed",)
        notes += ("check_error",) if now.examined.errors else ()
        says = f"{now.says} {shown}".strip()
        return Verdict.OTHER, notes, says, replace(state, files=_files(wanted), now=now)

    def _next_task(self, state: GameState, last: bool) -> tuple[GameState, str]:
        """Pay the task that is on, and begin the next one or end the game."""
        rewards = (*state.rewards, self._reward(state))
        state = replace(state, rewards=rewards)
        stage = state.stage + 1
        if last or stage == self._number:
            return replace(state, done=True), CLOSED
        job = self._job(stage)
        project = broken(state.project, job.fault) if job.fault else state.project
        start = self._result(project, stage)
        state = replace(state, files=_files(project), before=start, now=start, stage=stage, used=0)
        return state, begin(job.kind, stage, self._number, job.text)

    def _reward(self, state: GameState) -> float:
        reward = task_reward(
            self._weights(state.stage),
            state.before.examined.array(),
            state.now.examined.array(),
            built=np.array(state.now.built),
            keeps=np.array(self._job(state.stage).kind in KEEPS),
            settings=self._settings.reward,
        )
        return float(reward)

    def _end_notes(self, state: GameState) -> tuple[str, ...]:
        """What is to be counted about a task that is over."""
        if self._job(state.stage).kind not in KEEPS:
            return ()
        before, now = state.before.examined.array(), state.now.examined.array()
        lost = regressed_share(self._weights(state.stage), before, now)
        return ("regression",) if lost > 0.0 else ()

    def _grade(self, rewards: Sequence[float]) -> float:
        return grade(np.array(rewards, dtype=np.float64), self._number)

    def _report(self, state: GameState) -> str:
        """How much holds, in words and without what is checked."""
        met = state.now.examined.met
        holds = sum(one >= 1.0 for one in met)
        return f"{holds} of {len(met)} requirements of the task hold."


def game_factory(options: EnvOptions) -> Callable[[Task], WebCoder]:
    """A function that makes one game of a task.

    Raises:
        UserError: The options do not fit.
    """
    settings = read_settings(options.kwargs)
    if options.max_turns < 1:
        raise UserError(f"max_turns is {options.max_turns}: a game needs at least one turn.")
    return lambda task: WebCoder(task, options.max_turns, settings, options.question_tag)


def tasks_of(split: str, options: EnvOptions) -> Sequence[Task]:
    """The tasks of a split.

    Raises:
        UserError: The options do not fit.
    """
    settings = read_settings(options.kwargs)
    return make_tasks(
        split,
        dict(settings.tasks)[split],
        settings.seed,
        settings.kinds,
        settings.turns_per_task,
        settings.prompt == "full",
    )


def _files(project: Project) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(project.items()))


def _shown(project: Project, operations: Sequence[Operation]) -> str:
    """The files that a message asks to see."""
    parts: list[str] = []
    for operation in operations:
        if isinstance(operation, Show):
            text = project.get(operation.path, "")
            more = "\n..." if len(text) > SHOWN else ""
            parts.append(f"{operation.path}:\n{text[:SHOWN]}{more}")
    return "\n".join(parts)


def _message_key(reading: Reading) -> str:
    """Name of what a message asks for."""
    if reading.note:
        return "invalid"
    parts: list[Any] = ["done"] if reading.done else []
    for one in reading.operations:
        if isinstance(one, Write):
            parts.append(("write", one.path, canonical(one.path, one.text)))
        else:
            parts.append(repr(one))
    return digest(repr(parts))


def _feedback(reading: Reading, notes: Sequence[str], report: str) -> str:
    did = ", ".join(f"{type(one).__name__.lower()} {one.path}" for one in reading.operations)
    did += " and done" if did and reading.done else "done" if reading.done else ""
    remarks = f" ({', '.join(notes)})" if notes else ""
    return f"Message: {did or 'nothing'}.{remarks} {report}"
