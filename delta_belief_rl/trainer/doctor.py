"""Does a configuration give numbers that can be trusted? Asked before a run, without Ray.

A check is a number and its bound. What engine and trainer are compared on is in
``trainer.doctor_engine``; here are the checks around it, and the order of all.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence

import torch

from delta_belief_rl.config.availability import JUDGES
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import installed, needed, version_lines
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.eval.judge_trial import ask_judge, report, world_questions
from delta_belief_rl.judge.api_judge import ApiJudge
from delta_belief_rl.judge.build import JudgeSettings, WorldJudgeSettings, build_judge
from delta_belief_rl.judge.selftest import self_test
from delta_belief_rl.judge.vllm_judge import VllmJudge
from delta_belief_rl.trainer.doctor_engine import (
    Check,
    DoctorSettings,
    NoAnswer,
    Patient,
    admitted,
    engine_checks,
)
from delta_belief_rl.trainer.judge_settings import judge_settings
from delta_belief_rl.trainer.policy_engine import ENGINES
from delta_belief_rl.trainer.settings import number_format
from delta_belief_rl.types import UserError

WORLD_QUESTIONS = 128
LONG = 4000
"""Repetitions of a short question that no tokenizer may cut."""
ENGINE_CHECKS = ("adapter", "sampled", "belief", "prefix")
CHECKS = ("versions", "templates", *ENGINE_CHECKS, "judge")
"""Groups of checks; the name of a check begins with its group's."""
SILENT = "sampled_tokens"
"""The check that stands in for the others when the engine has stopped answering."""


def examine(cfg: RunConfig, device: str, threads: int, settings: DoctorSettings) -> list[Check]:
    """Make every check of a configuration.

    Args:
        cfg: A valid configuration whose model path can be loaded.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads.
        settings: How much is looked at.

    Raises:
        UserError: A model, a task file or a judge cannot be loaded, or a check has no such name.
    """
    odd = sorted({*settings.skip} - {*CHECKS})
    if odd:
        raise UserError(f"There is no check {odd[0]!r}: choose from {', '.join(CHECKS)}.")
    if settings.games < 1 or settings.turns < 1:
        raise UserError("The doctor needs at least one game and one turn.")
    wanted = [name for name in CHECKS if name not in settings.skip]
    judge = cfg.judge_rollout.name
    # What can be refused at once comes before anything is loaded.
    tested = judge in JUDGES and judge != "rules"
    asked = judge_settings(cfg, threads) if "judge" in wanted and tested else None
    found = list(_versions(cfg, device)) if "versions" in wanted else []
    found += _policy(cfg, device, threads, settings, wanted)
    if device == "cuda":
        # The judge may need what the policy has left.
        torch.cuda.empty_cache()
    if asked is not None:
        found.append(_judge(cfg, asked))
    elif "judge" in wanted:
        found.append(_unknown("judge", f"judge_rollout.name={judge}"))
    found += [Check(name, None, note="left out by --skip") for name in CHECKS if name not in wanted]
    return found


def _policy(
    cfg: RunConfig, device: str, threads: int, settings: DoctorSettings, wanted: Sequence[str]
) -> list[Check]:
    """The checks of trainer and engine, which are gone when they are made."""
    names = [name for name in ("templates", *ENGINE_CHECKS) if name in wanted]
    engine = cfg.actor_rollout_ref.rollout.name
    if cfg.actor_rollout_ref.model.api_model_name:
        return [_unknown(name, "actor_rollout_ref.model.api_model_name") for name in names]
    if engine not in ENGINES:
        return [_unknown(name, f"actor_rollout_ref.rollout.name={engine}") for name in names]
    if not names:
        return []
    found: list[Check] = []
    with admitted(cfg, device, threads, settings) as patient:
        if "templates" in names:
            found += _templates(patient)
        if {*ENGINE_CHECKS} & {*names}:
            # The others need what an earlier one has left behind, so all are made.
            found += [
                one for one in _engine(patient) if _group(one.name) in names or one.name == SILENT
            ]
    return found


def _unknown(name: str, setting: str) -> Check:
    return Check(name, None, note=f"the doctor has no check of {setting}")


def _engine(patient: Patient) -> Iterator[Check]:
    try:
        yield from engine_checks(patient)
    except (NoAnswer, EngineFailure) as error:
        yield Check(SILENT, False, note=str(error))


def _group(name: str) -> str:
    return name.split("_")[0]


# --- versions, templates, judge ------------------------------------------------------------------


def _versions(cfg: RunConfig, device: str) -> Iterator[Check]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    wrong = [
        window.text()
        for window in needed(cfg)
        if (version := installed(window)) is None or not window.holds(version)
    ]
    note = "; ".join(version_lines(cfg))
    yield Check("versions_libraries", not wrong, float(len(wrong)), 0.0, "outside", note)
    found = device == "cpu" or torch.cuda.is_available()
    dtype = number_format(cfg.actor_rollout_ref.actor.dtype, device)
    python = platform.python_version()
    yield Check("versions_device", found, note=f"{device} ({name}), {dtype}, Python {python}")


def _templates(patient: Patient) -> Iterator[Check]:
    """T2, T8: what the policy reads is what the template says, and nothing is cut."""
    chat = patient.chat
    # Only thoughts may differ: a template drops those of earlier turns, a stream keeps them.
    equal = not chat.difference or "think" in chat.difference
    policy = patient.cfg.actor_rollout_ref.actor.thinking_history
    same = "a conversation built turn by turn equals its full render"
    yield Check("templates_render", equal, note=f"{chat.difference or same} ({policy})")
    rows = patient.actor.model.get_input_embeddings().weight.shape[0]
    highest = max(chat.tokenizer.get_vocab().values())
    note = "the tokenizer's last token, the model's last row"
    yield Check(
        "templates_vocabulary", highest < rows, float(highest), float(rows - 1), "token id", note
    )
    kept = len(chat.encode("Is it alive? " * LONG))
    yield Check("templates_length", kept >= LONG, float(kept), float(LONG), "tokens at least")


def _judge(cfg: RunConfig, settings: JudgeSettings) -> Check:
    """Plain facts for a model; for the judge of a world, questions of its table."""
    judge = build_judge(settings)
    if isinstance(settings, WorldJudgeSettings):
        world = load_world(settings.world)
        questions = world_questions(world, min(WORLD_QUESTIONS, world.values.size), cfg.seed)
        found = report(ask_judge(judge, questions, rounds=1), draws=1)
        right = found.accuracy.value if found.accuracy else 0.0
        note = f"{found.replies} questions of the table, {found.errors} without an answer"
        passed = right == 1.0 and not found.errors
        return Check("judge_table", passed, 1.0 - right, 0.0, "wrong", note)
    least = cfg.judge_rollout.self_test.min_accuracy
    try:
        tested = self_test(judge)
    finally:
        if isinstance(judge, VllmJudge | ApiJudge):
            judge.close()
    wrong, note = 1.0 - tested.accuracy, tested.sentence()
    if isinstance(judge, VllmJudge):
        note = f"{note}; {judge.kernels}"
    return Check("judge_facts", tested.passes(least), wrong, 1.0 - least, "wrong", note)
