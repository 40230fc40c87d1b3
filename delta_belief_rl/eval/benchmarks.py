"""The benchmarks that a policy can be measured on: named settings over an experiment.

An entry says what is played, not whether it can be: what an environment or a judge still lacks is
told by ``config.availability``, what a machine lacks by the plan. Adding one is an experiment in
``configs/experiment`` and a line in ``BENCHMARKS``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark.

    Attributes:
        about: What is played, in a few words.
        experiment: An option of the group ``experiment``; None where the settings are all.
        settings: Further settings, ``key=value``.
    """

    about: str
    experiment: str | None
    settings: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """The settings as on a command line."""
        experiment = [f"experiment={self.experiment}"] if self.experiment else []
        return [*experiment, *self.settings]


FIXED_TURNS = "user_personalization"
"""The environment whose games cannot be longer: a longer one is not the same game going on."""


def _packaged(name: str, about: str) -> Benchmark:
    """An environment over this project's own test tasks, with the judge that answers from them."""
    return Benchmark(
        f"{about} of this project's own, with their exact judge",
        f"eval_{name}",
        (f"env={name}_packaged", "judge=rules", f"data.val_files=[package:{name}/test]"),
    )


BENCHMARKS: Mapping[str, Benchmark] = {
    "twenty_questions": Benchmark(
        "20 Questions, the 433 published test secrets", "eval_twenty_questions"
    ),
    "twenty_questions_packaged": Benchmark(
        "20 Questions, this project's own 440 test secrets",
        "eval_twenty_questions",
        ("env=twenty_questions_packaged", "data.val_files=[package:twenty_questions/test]"),
    ),
    "everyday": Benchmark(
        "20 Questions over the embedded world, with its exact judge", "eval_everyday"
    ),
    "guess_my_city": Benchmark("Guess My City, the 185 published cities", "eval_guess_my_city"),
    "guess_my_city_packaged": _packaged("guess_my_city", "Guess My City, 48 cities"),
    "murder_mystery": Benchmark("Murder Mystery, the 50 published cases", "eval_murder_mystery"),
    "murder_mystery_packaged": _packaged("murder_mystery", "Murder Mystery, 11 cases"),
    "customer_service": Benchmark(
        "Customer Service, the 200 published scenarios", "eval_customer_service"
    ),
    "customer_service_packaged": _packaged("customer_service", "Customer Service, 22 scenarios"),
    "user_personalization": Benchmark(
        "User Personalization, this project's own 14 test profiles", "eval_user_personalization"
    ),
    "errands": Benchmark("Errands in 64 generated houses, decided by code", "eval_errands"),
}
"""By name."""


def own_benchmark(env: str) -> Benchmark:
    """The environment of a plug-in, over its validation tasks and with its own judge."""
    return Benchmark(f"{env}, of a plug-in", None, ("judge=rules", f"multi_turn.env={env}"))


def find_benchmarks(text: str, own: Collection[str] = ()) -> dict[str, Benchmark]:
    """The benchmarks of a list with commas, in its order.

    Args:
        text: The list.
        own: Environments of plug-ins, each of which is a benchmark, too.

    Raises:
        UserError: One of them does not exist, or is two, or none is named.
    """
    known = {**{env: own_benchmark(env) for env in own}, **BENCHMARKS}
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise UserError(f"There is no benchmark {name!r}: choose from {', '.join(known)}{hint}")
        if name in own and name in BENCHMARKS:
            raise UserError(
                f"{name!r} is a benchmark and an environment of a plug-in: rename the latter."
            )
    if not names:
        raise UserError(f"No benchmark is named: choose from {', '.join(known)}.")
    return {name: known[name] for name in names}


def turn_words(config: RunConfig, turns: int, given: Sequence[str]) -> list[str]:
    """Settings for games of so many turns; the token limits grow with the number of turns.

    Args:
        config: The benchmark as it stands.
        turns: Most turns of a game.
        given: Settings of the command line, ``key=value``; what they set stays.

    Raises:
        UserError: No turn at all, or more than the benchmark can have.

    Example:
        >>> from delta_belief_rl.config.compose import load_config
        >>> turn_words(load_config(["experiment=eval_everyday"])[0], 50, ())[1:]
        ['data.max_prompt_length=960']
    """
    if turns < 1:
        raise UserError(f"A game needs at least one turn, not --turns {turns}.")
    own, judge = config.multi_turn.max_turns.val, config.judge_rollout
    if config.multi_turn.env == FIXED_TURNS and turns > own:
        raise UserError(
            f"--turns {turns} is more than the {own} of {FIXED_TURNS}, whose opening names that "
            "number and whose last message is taken as the answer: leave --turns out."
        )
    limits = {"data.max_prompt_length": config.data.max_prompt_length}
    if judge.repeated_prompt and judge.name != "world":
        # This judge is shown the questions so far.
        limits["judge_rollout.rollout.prompt_length"] = judge.rollout.prompt_length
    keys = {word.lstrip("+").split("=", 1)[0] for word in given}
    grown = [
        f"{name}={math.ceil(limit * turns / own)}"
        for name, limit in limits.items()
        if turns > own and name not in keys
    ]
    return [f"multi_turn.max_turns.val={turns}", *grown]
