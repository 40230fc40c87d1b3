"""``delta-belief eval``: benchmarks played by models, adapters, checkpoints or models of an API.

Each (benchmark, player) cell is a run with ``trainer.val_only`` through the code that trains, in a
folder of its own below ``--out``. A cell that is complete is not played again; one that was cut
short goes on with the games that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.eval_players import Contestant, contestants, plain_lora, setting
from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import from_yaml, group_options, load_config
from delta_belief_rl.config.game_settings import game_settings
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import load_plugins
from delta_belief_rl.eval.benchmarks import BENCHMARKS, Benchmark, find_benchmarks, turn_words
from delta_belief_rl.eval.cells import CELL, Cell, cell_folders, is_complete, read_cell
from delta_belief_rl.eval.eval_page import HTML, JSON, document, write_page
from delta_belief_rl.eval.eval_text import eval_text
from delta_belief_rl.eval.published_results import (
    compare,
    comparison_text,
    published_conditions,
)
from delta_belief_rl.obs.disk import DiskRefused, writing
from delta_belief_rl.obs.events import config_diff
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.types import UserError

OUT = "outputs/eval"
ENDS_ALL = (ExitStatus.TERMINATED, ExitStatus.INTERRUPTED, ExitStatus.DISK_FULL)
"""Ends of a cell after which the others are not played."""


@dataclass(frozen=True, slots=True)
class Job:
    """One cell that is to be complete.

    Attributes:
        words: Settings as on a command line.
    """

    benchmark: str
    contestant: Contestant
    words: tuple[str, ...]
    cfg: RunConfig
    plan: Plan
    folder: Path

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"{self.benchmark}, {self.contestant.player.name}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that is not complete.

    Attributes:
        name: As messages call it.
        status: A value of ``ExitStatus``.
        reason: A sentence, where one is known.
    """

    name: str
    status: int
    reason: str = ""

    @property
    def line(self) -> str:
        """What the output says of it."""
        return f"not complete: {self.name} ({self.reason or f'status {self.status}'})"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="BENCHMARK[,...] [key=value]", help="benchmarks and settings")
    add("--list", action="store_true", help="show the benchmarks and what each needs")
    add("--model", action="append", default=[], metavar="MODEL", help="folder or hub id; repeat")
    add("--adapter", action="append", default=[], type=Path, metavar="DIR", help="PEFT or run's")
    add("--checkpoint", action="append", default=[], type=Path, metavar="DIR", help="a run's")
    add("--api", action="append", default=[], metavar="NAME", help="a model behind an API")
    add("--judge", metavar="OPTION", help=f"one of {', '.join(group_options()['judge'])}")
    add("--turns", type=int, help="most turns of a game; rates of all smaller budgets come along")
    add("--samples", type=int, help="games of each secret, the largest k of pass@k")
    add("--temperature", type=float, help="of the policy; 0 is greedy")
    add("--best-of", type=int, metavar="N", help="play the best of N questions by change of belief")
    add("--beliefs", action="store_true", help="also measure the belief in the secret")
    add("--limit", type=int, metavar="N", help="play the first N secrets only")
    add("--out", type=Path, default=Path(OUT), metavar="DIR", help=f"folder of the cells, {OUT}")
    add("--published", action="store_true", help="put the published numbers beside")
    add("--dry-run", action="store_true", help="show what would be played")


def _run(args: argparse.Namespace) -> Result:
    if args.list:
        return _list()
    settings = [word for word in args.words if "=" in word]
    named = ",".join(word for word in args.words if "=" not in word)
    jobs = _jobs(args, find_benchmarks(named, _own(settings)), settings) if named else []
    if args.dry_run:
        return _show(jobs)
    if not named and not args.out.is_dir():
        raise UserError(
            f"No benchmark is named, and there is no folder {args.out} to make the tables of: "
            f"choose from {', '.join(BENCHMARKS)}."
        )
    failed: list[Failure] = []
    for job in jobs:
        failure = _play(job)
        if failure is not None:
            failed.append(failure)
            if failure.status in ENDS_ALL:
                break
    return _report(args.out, args.published, failed)


# --- what is to be played -----------------------------------------------------------------------


def _jobs(
    args: argparse.Namespace, benchmarks: Mapping[str, Benchmark], given: Sequence[str]
) -> list[Job]:
    """Every cell, composed and checked before the first one is played.

    Raises:
        UserError: Nobody plays, or a cell cannot be played.
    """
    players = contestants(args.model, args.adapter, args.checkpoint, args.api)
    if not players:
        raise UserError("Nobody plays: name a --model, --checkpoint or --api.")
    jobs: list[Job] = []
    for name, benchmark in benchmarks.items():
        for contestant in players:
            folder = args.out / name / contestant.player.name
            words = _words(args, benchmark, contestant, folder, given)
            try:
                cfg, plan, warnings = prepare(words)
                _check(cfg, plan, folder)
            except UserError as error:
                raise UserError(f"{name}, {contestant.player.name}: {error}") from error
            for warning in warnings:
                _say(f"{name}: warning: {warning}")
            job = Job(name, contestant, tuple(words), cfg, plan, folder)
            _check_folder(job)
            jobs.append(job)
    return jobs


def _own(settings: Sequence[str]) -> list[str]:
    """Environments of the plug-ins that the settings name."""
    if not any(word.lstrip("+").startswith("plugins=") for word in settings):
        return []
    return list(load_plugins(load_config(settings)[0].plugins))


def _words(
    args: argparse.Namespace,
    benchmark: Benchmark,
    contestant: Contestant,
    folder: Path,
    given: Sequence[str],
) -> list[str]:
    """The settings of a cell; those of the command line come last and win."""
    words = [*benchmark.words(), *([f"judge={args.judge}"] if args.judge else [])]
    words += [*contestant.settings, *_own_words(folder), *_option_words(args)]
    if args.turns is not None:
        config, _ = load_config([*words, *given])
        words += turn_words(config, args.turns, given)
    return [*words, *given]


def _own_words(folder: Path) -> list[str]:
    """What makes a run a cell."""
    return [
        setting("trainer.output_dir", str(folder)),
        setting("trainer.project_name", "eval"),
        setting("trainer.experiment_name", "-".join(folder.parts[-2:])),
        "trainer.val_only=true",
        "trainer.resume_mode=auto",
    ]


def _option_words(args: argparse.Namespace) -> list[str]:
    """The settings that options stand for."""
    sampling = "actor_rollout_ref.rollout.val_kwargs"
    words: list[str] = []
    if args.samples is not None:
        words.append(f"multi_turn.val.n={args.samples}")
    if args.temperature is not None:
        if args.temperature < 0:
            raise UserError(f"--temperature must not be negative, not {args.temperature}.")
        words += [f"{sampling}.do_sample={str(args.temperature > 0).lower()}"]
        words += [f"{sampling}.temperature={args.temperature}"]
    if args.best_of is not None:
        if args.best_of < 2:
            raise UserError(f"--best-of needs at least 2 questions, not {args.best_of}.")
        words += ["multi_turn.logprob_sampling.enabled=true"]
        words += [f"actor_rollout_ref.rollout.n={args.best_of}"]
    if args.beliefs:
        words.append("multi_turn.logprob_reward.enabled=true")
    if args.limit is not None:
        words.append(f"data.sample_count.val={args.limit}")
    return words


def _check(cfg: RunConfig, plan: Plan, folder: Path) -> None:
    """Refuse what cannot run here.

    Args:
        folder: Where the cell has to lie.

    Raises:
        UserError: The first reason.
    """
    plan.check()
    for sentence in unavailable(cfg):
        raise UserError(sentence)
    if not cfg.trainer.val_only:
        raise UserError("trainer.val_only=false trains: an evaluation only plays.")
    if cfg.trainer.output_dir != str(folder):
        raise UserError("--out names the folder of the cells: leave trainer.output_dir out.")


def _check_folder(job: Job) -> None:
    """Refuse a folder that holds other games than those that are asked for.

    Raises:
        UserError: It was played by another player, or with other settings.
    """
    about = _read_about(job.folder / CELL)
    stored = job.folder / "config.yaml"
    if about is not None and about != _about(job):
        was, now = about.get("player", {}), job.contestant.player
        name = was.get("adapter") or was.get("model")
        same = (was.get("model"), was.get("adapter")) == (now.model, now.adapter)
        raise UserError(
            f"{job.folder} belongs to another player "
            f"({name}{', whose weights or service were others' if same else ''}): "
            "name another --out."
        )
    if not stored.is_file():
        return
    try:
        old = game_settings(from_yaml(stored.read_text(encoding="utf-8")), "val")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{stored} cannot be read ({error}): remove {job.folder}, and play it again."
        ) from error
    odd = [
        f"{name} was {before} and is {after}"
        for name, (before, after) in config_diff(old, game_settings(job.cfg, "val")).items()
    ]
    if odd:
        raise UserError(
            f"{job.folder} was begun with other settings ({'; '.join(odd[:3])}): name another "
            "--out, or remove that folder."
        )


# --- playing ------------------------------------------------------------------------------------


def _play(job: Job) -> Failure | None:
    """Make a cell complete; what keeps it from that, if anything does."""
    try:
        if is_complete(job.folder):
            _say(f"{job.name}: complete, and not played again")
            return None
        _say(f"{job.name}: begins in {job.folder}")
        status, reason = _play_games(job), ""
    except UserError as error:
        full = isinstance(error, DiskRefused)
        status, reason = ExitStatus.DISK_FULL if full else ExitStatus.BAD_INPUT, str(error)
        _say(f"{job.name}: {reason}")
    if not status:
        return None
    _say(f"{job.name}: not complete (status {int(status)}); the same command goes on with it")
    return Failure(job.name, int(status), reason)


def _play_games(job: Job) -> int:
    """Play what is missing of a cell.

    Returns:
        A value of ``ExitStatus``.

    Raises:
        UserError: Something that the user can mend: no GPU is free, the model does not load, ...
    """
    # Here, so that --help and --list do not load torch and Ray.
    from delta_belief_rl.cluster.app import run
    from delta_belief_rl.trainer.checkpoint import write_atomic
    from delta_belief_rl.trainer.start_point import write_start

    with writing("The cell", job.folder, "--out"):
        job.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(job.folder / CELL, json.dumps(_about(job), indent=1).encode())
    if job.contestant.weights is not None:
        write_start(job.cfg, job.contestant.weights, job.contestant.player.step)
    return run(job.cfg, job.plan)


def _about(job: Job) -> dict[str, Any]:
    """What ``cell.json`` holds."""
    return {"benchmark": job.benchmark, "player": asdict(job.contestant.player)}


def _read_about(path: Path) -> dict[str, Any] | None:
    """What an earlier start wrote; None where there is nothing that can be read."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


# --- what is shown ------------------------------------------------------------------------------


def _report(out: Path, published: bool, unplayed: Sequence[Failure]) -> Result:
    """The figures of all complete cells of a folder, written and shown."""
    cells, damaged = _read_cells(out)
    names = {failure.name for failure in unplayed}
    failed = [*unplayed, *(failure for failure in damaged if failure.name not in names)]
    comparisons = compare(cells) if published else []
    parts = [eval_text(cells)]
    if cells:
        write_page(out, cells, comparisons)
        _say(f"figures: {out / JSON}, page: {out / HTML}")
    if published:
        parts.append(comparison_text(comparisons))
    parts += [failure.line for failure in failed]
    value = {**document(cells, comparisons), "not_complete": [asdict(one) for one in failed]}
    ends = [failure.status for failure in failed if failure.status in ENDS_ALL]
    return Result(value, "\n\n".join(parts), ends[0] if ends else int(bool(failed)))


def _read_cells(out: Path) -> tuple[list[Cell], list[Failure]]:
    """The cells of a folder that are complete, and those whose files are damaged."""
    cells: list[Cell] = []
    damaged: list[Failure] = []
    for folder in cell_folders(out):
        try:
            if is_complete(folder):
                cells.append(read_cell(folder))
        except UserError as error:
            name = ", ".join(folder.parts[-2:])
            damaged.append(Failure(name, int(ExitStatus.CHECK_FAILED), str(error)))
    return cells, damaged


def _show(jobs: Sequence[Job]) -> Result:
    """What would be played."""
    rows = [
        {
            "benchmark": job.benchmark,
            "player": job.contestant.player.name,
            "folder": str(job.folder),
            "complete": is_complete(job.folder),
            "games": job.plan.val_games,
            "turns": job.cfg.multi_turn.max_turns.val,
            "gpus": job.plan.gpus,
            "settings": list(job.words),
        }
        for job in jobs
    ]
    lines = [
        f"{row['benchmark']}, {row['player']}: {row['games']} games of at most {row['turns']} "
        f"turns, {row['gpus']} GPUs, in {row['folder']}"
        f"{' (complete)' if row['complete'] else ''}"
        for row in rows
    ]
    return Result(rows, "\n".join(lines) or "Nothing is to be played.")


def _list() -> Result:
    """Every benchmark, what it needs, and how the published numbers were made."""
    rows = [_described(name, benchmark) for name, benchmark in BENCHMARKS.items()]
    lines: list[str] = []
    for row in rows:
        known = row["published"]
        shown = ", ".join(f"{n} {v}" for n, v in known.items() if v is not None)
        lines += [f"{row['name']}: {row['about']}", f"  needs      {', '.join(row['needs'])}"]
        lines += [f"  missing    {sentence}" for sentence in row["missing"]]
        lines += [f"  published  {shown or 'nothing'}", ""]
    return Result(rows, "\n".join(lines).rstrip())


def _described(name: str, benchmark: Benchmark) -> dict[str, Any]:
    cfg, plan, _ = prepare([*benchmark.words(), *plain_lora()])
    judge = cfg.judge_rollout
    needs = [
        f"world {cfg.data.world}" if cfg.data.world else f"tasks {', '.join(cfg.data.val_files)}",
        f"judge {judge.model.api_model_name or judge.model.path or judge.name}",
        f"{plan.gpus} GPUs",
    ]
    return {
        "name": name,
        "about": benchmark.about,
        "needs": needs,
        "missing": [*unavailable(cfg), *plan.problems],
        "games": cfg.multi_turn.val.n,
        "turns": cfg.multi_turn.max_turns.val,
        "published": dict(published_conditions(name)),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


VERB = Verb(
    name="eval",
    help="Play benchmarks with models, adapters or checkpoints; resumes, and compares.",
    example="delta-belief eval everyday --model delta_belief_rl/assets/agent --turns 50",
    add_arguments=_add_arguments,
    run=_run,
)
