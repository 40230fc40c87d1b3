"""One errand as an environment: commands in plain text, decided by code.

| what the text is | verdict | |
|---|---|---|
| no command | invalid | ``no_command`` |
| a command that changes nothing | other | ``no_effect``, with the reason where something stood in the way |
| the same command in the same state once more | repeated | ``no_effect``, ``repeated`` |
| a command that changes something | other | |
| the command after which all goals hold | win | strict and compatible alike |

States recur: a state is where everything is, what is true of it and what was seen, not how it came
to be or how many commands it took. Progress is the number of goals that hold. Everything is
deterministic.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.errands.planning import plan
from delta_belief_rl.envs.errands.reading import Command, read
from delta_belief_rl.envs.errands.settings import read_settings
from delta_belief_rl.envs.errands.tasks import make_tasks
from delta_belief_rl.envs.errands.world import (
    Change,
    State,
    first_state,
    holds,
    house_from_json,
    step,
)
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.single_use import SingleUseGame, digest, question_text
from delta_belief_rl.types import Task, UserError, Verdict

NOT_UNDERSTOOD = "That is no command."
WON = "The errand is done."

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    world: State
    turns: int = 0
    done: bool = False
    feedback: str = ""
    tried: frozenset[tuple[State, Command]] = frozenset()
    """Commands that changed nothing, and the states in which they were given."""
    footprint: tuple[frozenset[str], frozenset[str]] = (_NOTHING, _NOTHING)


class Errand(SingleUseGame[GameState]):
    """One game of a task.

    Raises:
        UserError: The task does not describe a house and an errand in it.
    """

    def __init__(self, task: Task, max_turns: int, question_tag: bool = False) -> None:
        try:
            self.house, self.goals = house_from_json(task.scenario or "")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The task {task.id!r} has no house that errands can be run in ({error}): use "
                "tasks that the environment errands made."
            ) from error
        self.task = task
        self._max_turns = max_turns
        self._question_tag = question_tag
        self._state = GameState(first_state(self.house))

    @property
    def world(self) -> State:
        """Where everything is, what is true of it and what was seen."""
        return self._state.world

    @property
    def turns(self) -> int:
        """Commands given so far."""
        return self._state.turns

    def parse(self, text: str) -> Action:
        """Read the agent's text as one command; no judge is asked."""
        command = read(question_text(text, self._question_tag)).command
        return Action(text, None if command is None else str(command), needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """No action of these games needs a judge.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No command of an errand is sent to a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Carry out a command.

        Raises:
            ValueError: The game is over, or a judge's reply was given.
        """
        self._check_call(action, reply)
        state = self._state
        last = state.turns + 1 >= self._max_turns
        reading = read(question_text(action.text, self._question_tag))
        if reading.command is None:
            notes = ("no_command",)
            outcome = Outcome(Verdict.INVALID, NOT_UNDERSTOOD, last, diagnostics=notes)
            after = replace(state, footprint=(_NOTHING, _NOTHING))
        else:
            change = step(self.house, state.world, reading.command)
            outcome = self._outcome(reading.command, change, reading.several, last)
            after = replace(
                state,
                world=change.state,
                tried=state.tried | self._in_vain(reading.command, change),
                footprint=(change.reads, change.writes),
            )
        if outcome.done and not outcome.strict_win:
            outcome = replace(outcome, score=self._reached(after.world) / len(self.goals))
        self._state = replace(
            after,
            turns=state.turns + 1,
            done=outcome.done,
            feedback=_feedback(reading.command, outcome),
        )
        return outcome

    def state_key(self) -> str:
        """Name of where the agent and the seen things are, what was changed and what was seen."""
        world = self.world
        places = zip(self.house.items, world.where, strict=True)
        seen = [f"{item} {at}" for item, at in places if item in world.seen]
        parts = (world.room, *sorted(seen), "", *sorted(world.facts), "", *sorted(world.seen))
        return digest("\n".join(parts))

    def progress(self) -> float:
        """Goals that hold."""
        return float(self._reached(self.world))

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same command."""
        return self.parse(text).question or "invalid"

    def footprint(self) -> tuple[frozenset[str], frozenset[str]]:
        """Variables that the last command needed, or that stood in its way, and those that it
        changed.
        """
        return self._state.footprint

    def reference(self) -> str:
        """The next command of a shortest plan that knows where everything is; empty where the game
        is over or the errand cannot be run any more.
        """
        if self._state.done:
            return ""
        steps = plan(self.house, self.world, self.goals, self.house.items)
        return str(steps[0]) if steps else ""

    def _reached(self, world: State) -> int:
        return sum(holds(self.house, world, goal) for goal in self.goals)

    def _in_vain(self, command: Command, change: Change) -> frozenset[tuple[State, Command]]:
        world = self._state.world
        return frozenset(((world, command),)) if change.state is world else frozenset()

    def _outcome(self, command: Command, change: Change, several: bool, last: bool) -> Outcome:
        state = self._state
        won = self._reached(change.state) == len(self.goals)
        repeated = (state.world, command) in state.tried
        notes = ("no_effect",) if change.state is state.world else ()
        notes += ("repeated",) if repeated else ()
        notes += ("several_commands",) if several else ()
        verdict = Verdict.REPEATED if repeated else Verdict.OTHER
        return Outcome(
            verdict=Verdict.WIN if won else verdict,
            reply=f"{change.text} {WON}" if won else change.text,
            done=won or last,
            strict_win=won,
            compatible_win=won,
            action_key=str(command),
            diagnostics=notes,
        )


def game_factory(options: EnvOptions) -> Callable[[Task], Errand]:
    """A function that makes one game of a task.

    Raises:
        UserError: The options do not fit.
    """
    read_settings(options.kwargs)
    if options.max_turns < 1:
        raise UserError(f"max_turns is {options.max_turns}: a game needs at least one turn.")
    return lambda task: Errand(task, options.max_turns, options.question_tag)


def tasks_of(split: str, options: EnvOptions) -> Sequence[Task]:
    """The tasks of a split.

    Raises:
        UserError: The options do not fit.
    """
    settings = read_settings(options.kwargs)
    count = dict(settings.tasks)[split]
    return make_tasks(split, count, settings.seed, settings.prompt == "full")


def _feedback(command: Command | None, outcome: Outcome) -> str:
    did = "No command was understood." if command is None else f"Command: {command}."
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{did} Reply: {outcome.reply}{notes}"
