"""What a comparison will run: methods as settings, one budget, room on the machine, the cost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from delta_belief_rl.algo import CREDITS, TRANSFORMS
from delta_belief_rl.algo.catalogue import CATALOGUE, GROUPS, Entry, Label, listed, needs_of
from delta_belief_rl.cli.compare_cells import Cell, Record, Slot, file_digest, read_record
from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.verb import Result
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import group_options, load_config
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.gpus import read_gpus
from delta_belief_rl.config.paths import PACKAGE, PLUGIN_FILE, config_dir
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import find_plugin, load_methods
from delta_belief_rl.eval.compare_results import Budget
from delta_belief_rl.eval.compare_text import Rows, aligned
from delta_belief_rl.obs.events import config_diff
from delta_belief_rl.trainer.own_credit import find_credit, make_credit
from delta_belief_rl.types import UserError

BASELINE = "grpo"
OURS = {
    "seed": "--seeds",
    "algorithm": "--methods",
    "algorithm.adv_estimator": "--methods",
    "trainer.total_training_steps": "--steps",
    "trainer.output_dir": "--out",
    "trainer.experiment_name": "--out",
    "trainer.default_local_dir": "--out",
    "trainer.rollout_data_dir": "--out",
    "trainer.validation_data_dir": "--out",
    "trainer.resume_mode": "the same command, which goes on with what was cut",
}
"""Settings that a comparison makes itself, and what to write instead."""
SHARED = (
    *("data.", "multi_turn.env", "multi_turn.max_turns.", "multi_turn.train.", "multi_turn.val."),
    *("multi_turn.logprob_sampling.", "multi_turn.win_rule", "trainer.test_freq"),
    *("trainer.total_epochs", "trainer.val_before_train", "actor_rollout_ref.rollout.val_kwargs."),
    *("multi_turn.candidate_lists", "multi_turn.duplicates", "multi_turn.verify_judge."),
    *("judge_rollout.", "actor_rollout_ref.model.path"),
)
"""Settings that decide what is played and what counts: the same for every method."""


@dataclass(frozen=True, slots=True)
class Study:
    """A comparison before it runs.

    Attributes:
        plan: Of one run of the baseline.
        labels: How sure each method's formula is.
        differing: Method to the settings besides ``algorithm`` that differ from the baseline's.
        facts: What is played, for the table.
        beyond: Method to how a step of it may play more, or less, than one batch of games.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    cells: tuple[Cell, ...]
    plan: Plan
    budget: Budget
    labels: Mapping[str, str]
    differing: Mapping[str, Sequence[str]]
    facts: Mapping[str, str]
    beyond: Mapping[str, str]


def make_study(
    overrides: Sequence[str],
    *,
    methods: Sequence[str],
    seeds: Sequence[int],
    steps: int | None,
    baseline: str | None,
    out: Path,
) -> Study:
    """Compose the settings of every method and see that they may be compared.

    Raises:
        UserError: A method is unknown or cannot run here, two would be compared at different
            budgets, or the folder holds runs of other settings or of a plug-in's other state.
    """
    _refuse_ours(overrides)
    base = baseline or (BASELINE if BASELINE in methods else methods[0])
    if base not in methods:
        raise UserError(f"--baseline {base} is not among --methods {','.join(methods)}.")
    words = {method: _words(overrides, method, steps) for method in methods}
    plans = {method: _plan(method, words[method], seeds[0]) for method in methods}
    plan = plans[base]
    budget = _budget(plan)
    diffs = {
        method: config_diff(to_plain(plan.config), to_plain(other.config))
        for method, other in plans.items()
    }
    _check_shared(base, diffs)
    files = {method: _plugin_files(other.config) for method, other in plans.items()}
    cells = tuple(
        Cell(
            method,
            seed,
            (*words[method], f"trainer.experiment_name={method}_seed{seed}", f"seed={seed}"),
            out / "runs" / method / f"seed{seed}",
            files[method],
        )
        # Seeds of a method behind each other: what is cut short has whole methods.
        for method in methods
        for seed in seeds
    )
    for cell in cells:
        read_record(cell)
    return Study(
        methods=tuple(methods),
        seeds=tuple(seeds),
        baseline=base,
        cells=cells,
        plan=plan,
        budget=budget,
        labels={method: label_of(method, other.config) for method, other in plans.items()},
        differing={method: _in_words(diff) for method, diff in diffs.items()},
        facts=_facts(plan, overrides),
        beyond=_beyond({method: other.config for method, other in plans.items()}, budget.steps),
    )


def method_words(name: str) -> list[str]:
    """The settings that a method's name stands for: its group where it has one.

    A transform without a group of its own changes the advantages of the baseline.
    """
    if name in group_options()["algorithm"]:
        return [f"algorithm={name}"]
    if name in TRANSFORMS and name not in CREDITS:
        return [f"algorithm={BASELINE}", f"algorithm.transforms=[{name}]"]
    return [f"algorithm.adv_estimator={name}"]


def label_of(method: str, config: RunConfig) -> str:
    """How sure the formula of a method is; of all elements of a chain."""
    if method in GROUPS:
        return GROUPS[method].label
    return _label((config.algorithm.adv_estimator, *config.algorithm.transforms))


def _label(names: Sequence[str]) -> str:
    labels = [CATALOGUE[name].label if name in CATALOGUE else Label.OWN for name in names]
    return "+".join(dict.fromkeys(labels))


def _words(overrides: Sequence[str], method: str, steps: int | None) -> tuple[str, ...]:
    given = [word.split("=", 1)[0].lstrip("+") for word in overrides]
    own = [*method_words(method), "trainer.resume_mode=auto"]
    if steps is not None:
        own.append(f"trainer.total_training_steps={steps}")
    if "trainer.final_test" not in given:
        # It plays more players than one, which are the same for every method.
        own.append("trainer.final_test=false")
    packaged = {*CREDITS, *TRANSFORMS, *group_options()["algorithm"]}
    # Settings of a plug-in's method are for that method alone.
    theirs = [
        word
        for word, name in zip(overrides, given, strict=True)
        if not (method in packaged and f"{name}.".startswith("algorithm.kwargs."))
    ]
    return (*theirs, *own)


def _refuse_ours(overrides: Sequence[str]) -> None:
    names = [word.split("=", 1)[0].lstrip("+") for word in overrides]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is given twice: leave one of them out.")
    for word in overrides:
        name = word.split("=", 1)[0].lstrip("+")
        if name in OURS:
            raise UserError(f"{word}: a comparison sets {name} itself; use {OURS[name]}.")


def _plan(method: str, words: Sequence[str], seed: int) -> Plan:
    try:
        config, plan, _ = prepare([*words, f"seed={seed}"])
        plan.check()
        for sentence in unavailable(config):
            raise UserError(sentence)
    except UserError as error:
        raise UserError(f"{method} cannot be compared: {error}") from error
    trainer = config.trainer
    if trainer.val_only or trainer.test_freq <= 0:
        raise UserError(
            "A comparison is made of validations while a method trains: leave trainer.val_only "
            "false and trainer.test_freq at 1 or more."
        )
    if not trainer.val_before_train:
        raise UserError(
            "A learning curve begins before training: leave trainer.val_before_train true."
        )
    if plan.machines.count > 1:
        raise UserError("The runs of a comparison are on one machine: set trainer.nnodes=1.")
    return plan


def _budget(plan: Plan) -> Budget:
    if not plan.total_steps:
        raise UserError("How many steps a run has is not known: name them with --steps.")
    config = plan.config
    return Budget(
        plan.total_steps,
        plan.secrets_per_step,
        config.multi_turn.train.n,
        config.multi_turn.max_turns.train,
    )


def _check_shared(base: str, diffs: Mapping[str, Mapping[str, tuple[Any, Any]]]) -> None:
    for method, diff in diffs.items():
        for name, (theirs, own) in diff.items():
            if name.startswith(SHARED):
                raise UserError(
                    f"{method} would be compared with {base} on unequal terms, because {name} is "
                    f"{own} and not {theirs}: set {name} on the command line."
                )


def _plugin_files(config: RunConfig) -> dict[str, str]:
    """Digests of the files of plug-ins, where a run uses an environment or a method of one."""
    if find_plugin(config) is None and find_credit(config) is None:
        return {}
    paths = [Path(name) for name in config.plugins if name.endswith(PLUGIN_FILE)]
    modules = [sys.modules.get(name) for name in config.plugins]
    paths += [Path(module.__file__) for module in modules if module and module.__file__]
    # What the package brings itself is no file that a user edits.
    own = [path.expanduser().resolve() for path in paths]
    return {str(path): file_digest(path) for path in own if not path.is_relative_to(PACKAGE)}


def _beyond(configs: Mapping[str, RunConfig], steps: int) -> dict[str, str]:
    """What ``Study.beyond`` holds, a sentence each."""
    found: dict[str, str] = {}
    for method, config in configs.items():
        groups, rule = config.algorithm.filter_groups, config.algorithm.tree.rule
        if groups.enabled and groups.rule == "differ":
            most = groups.max_num_gen_batches
            earliest = f"step {steps // most + 1}" if most else "any step"
            found[method] = (
                f"{method} plays {f'up to {most} batches' if most else 'batch after batch'} for a "
                "step (algorithm.filter_groups), all of which count: where one is not enough it "
                f"makes fewer than {steps} steps within the budget, which may end in {earliest}."
            )
        elif rule != "none":
            found[method] = (
                f"{method} plays games as trees (algorithm.tree.rule={rule}): what counts is the "
                "turns that are played, a shared one once, so a step may take less or more of the "
                "budget than a batch."
            )
    return found


def _in_words(diff: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [
        f"{name} is {_plain(own)}, not {_plain(theirs)}"
        for name, (theirs, own) in diff.items()
        if not name.startswith("algorithm.")
    ]


def _plain(value: Any) -> str:
    """A value as YAML writes it."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _facts(plan: Plan, overrides: Sequence[str]) -> dict[str, str]:
    config, facts = plan.config, dict[str, str]()
    facts["settings"] = " ".join(overrides) or "defaults"
    facts["environment"] = config.multi_turn.env
    facts["policy"] = config.actor_rollout_ref.model.path or "-"
    facts["judge"] = config.judge_rollout.name
    facts["games of a step"] = f"{plan.secrets_per_step} secrets x {config.multi_turn.train.n}"
    facts["games of a validation"] = str(plan.val_games or "-")
    facts["device"] = f"{plan.gpus} GPUs a run" if plan.gpus else f"CPU, {plan.threads} threads"
    return facts


# -------------------------------------------------------------------------------------------- room


def train_program(given: Path | None) -> Path:
    """The file that a run is started with.

    Raises:
        UserError: There is none.
    """
    places = [given] if given else [PACKAGE.parent / "train.py", Path("train.py")]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise UserError(f"There is no {places[-1]}: name the program of a run with --train.")


def room(plan: Plan, jobs: int | None, environ: Mapping[str, str] = os.environ) -> list[Slot]:
    """One entry for each run that may go on at a time.

    Args:
        plan: Of one run.
        jobs: Asked for; None takes what the machine has room for.
        environ: ``CUDA_VISIBLE_DEVICES`` in it names the GPUs that may be used.

    Raises:
        UserError: More are asked for than there are GPUs for.
    """
    if not plan.gpus:
        cores = plan.facts.cores
        return [{}] * (jobs or max(1, cores // max(plan.threads, 1)))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        names = [str(gpu.index) for gpu in read_gpus(environ) or ()]
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    fits = len(names) // plan.gpus
    if (jobs or 1) > fits:
        raise UserError(
            f"{jobs or 1} runs at a time need {(jobs or 1) * plan.gpus} GPUs and {len(names)} are "
            "there: lower --jobs, or the GPUs of a run."
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[at * plan.gpus : (at + 1) * plan.gpus])}
        for at in range(jobs or fits)
    ]


# ------------------------------------------------------------------------------------------ showing


def dry_run(study: Study, jobs: int) -> Result:
    """The runs, and what they cost at most; seconds where one was measured."""
    records = [read_record(cell) for cell in study.cells]
    left = sum(not record.done for record in records)
    each, plan = study.budget, study.plan
    validations = sum(plan.validates(step) for step in range(each.steps + 1))
    games = each.steps * plan.games_per_step
    tokens = each.total * plan.config.data.max_response_length
    known = [record.seconds for record in records if record.done]
    hours = sum(known) / len(known) / 3600 * left / min(jobs, max(left, 1)) if known else None
    rows: Rows = [["method", "seed", "form", "state"]]
    for cell, record in zip(study.cells, records, strict=True):
        state = _state(record)
        rows.append([cell.method, str(cell.seed), study.labels[cell.method], state])
    cost = {
        "runs_left": left,
        "jobs": jobs,
        "training_games_a_run": games,
        "turns_a_run": each.total,
        "sampled_tokens_a_run": tokens,
        "validation_games_a_run": None if plan.val_games is None else plan.val_games * validations,
        "hours_left": hours,
    }
    time = (
        f"about {hours:.2g} h, from {len(known)} finished runs"
        if hours is not None
        else "not known before the first run is finished"
    )
    lines = [
        aligned(f"{len(study.cells)} runs, {left} to do, {jobs} at a time", rows),
        f"A run plays {games} training games of at most {each.turns} turns ({each.total} turns, at "
        f"most {tokens} sampled tokens)"
        + (f" and {cost['validation_games_a_run']} validation games." if plan.val_games else "."),
        f"Time left: {time}.",
    ]
    lines += [
        f"{method} differs from {study.baseline} in more than credit: {'; '.join(found)}."
        for method, found in study.differing.items()
        if found
    ]
    lines += study.beyond.values()
    cells = [
        {"method": cell.method, "seed": cell.seed, "state": _state(record), "words": cell.words}
        for cell, record in zip(study.cells, records, strict=True)
    ]
    value = {"cells": cells, "cost": cost, "beyond": dict(study.beyond)}
    return Result(value, "\n\n".join(lines))


def _state(record: Record) -> str:
    if record.done:
        return "done"
    if record.cause:
        return "failed, is tried again"
    return "cut, goes on" if record.starts else "to do"


def list_methods(overrides: Sequence[str]) -> Result:
    """Every method: of the package, of groups of settings, and of ``plugins`` where it is given."""
    groups = group_options()["algorithm"]
    rows: Rows = [["method", "form", "needs", "arXiv", "advantage"]]
    found: list[dict[str, object]] = []

    def add(name: str, label: str, needs: Sequence[str], arxiv: str, summary: str) -> None:
        rows.append([name, label, ", ".join(needs) or "-", arxiv or "-", summary])
        found.append(
            {
                "method": name,
                "form": label,
                "needs": list(needs),
                "arxiv": arxiv,
                "summary": summary,
            }
        )

    methods, changing = listed(), listed(transforms=True)
    for name, (entry, needs) in methods.items():
        add(name, entry.label, needs, entry.arxiv, entry.summary)
    for name, (entry, needs) in changing.items():
        if name not in methods:
            label = _label((BASELINE, name))
            needs = tuple(dict.fromkeys((*methods[BASELINE][1], *needs)))
            add(name, label, needs, entry.arxiv, f"behind {BASELINE}: {entry.summary}")
    for name in groups:
        if name not in methods and name not in changing:
            base, *more = _chain_of(name)
            parts = [methods[base]] if base in methods else []
            parts += [changing[one] for one in more if one in changing]
            needs = tuple(dict.fromkeys(need for _, own in parts for need in own))
            entry = GROUPS.get(name) or Entry("settings of one's own", Label.OWN)
            add(name, entry.label, needs, entry.arxiv, entry.summary)
    if overrides:
        config, _ = load_config(overrides)
        for name, plugin in load_methods(config.plugins).items():
            needs = needs_of(make_credit(name, plugin, {}))
            add(name, Label.OWN, needs, "", plugin.summary or "of a plug-in")
    forms = "\n".join(f"  {label}: {text}" for label, text in FORMS.items())
    return Result(found, f"{aligned('Methods', rows)}\n\nForms\n{forms}")


FORMS = {
    Label.CODE: "the formula of the authors' code, or of a faithful public one",
    Label.TEXT: "the formula of the paper's equations",
    Label.ABSTRACT: "the idea of an abstract; the details are ours",
    Label.DIGEST: "the idea of a few sentences; the details are ours",
    Label.OWN: "a method of this package or of a plug-in",
}


def _chain_of(group: str) -> list[str]:
    """The estimator that a group of settings chooses, and the transforms behind it."""
    text = (config_dir() / "algorithm" / f"{group}.yaml").read_text(encoding="utf-8")
    chosen: Mapping[str, Any] = yaml.safe_load(text).get("algorithm", {})
    return [str(chosen.get("adv_estimator", BASELINE)), *chosen.get("transforms", ())]
