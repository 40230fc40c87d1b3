"""``delta-belief data ACTION``: task files are made, fetched, checked, compared and shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.paths import PACKAGED_TASKS, published_folder
from delta_belief_rl.config.published import BASE_URL, FILES, published_file
from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.packaged import TASKS as PACKAGED
from delta_belief_rl.envs.parquet import (
    SYSTEM_KEY,
    TaskFile,
    has_system_column,
    inspect_parquet,
    read_parquet,
    write_parquet,
)
from delta_belief_rl.envs.problems import Problem
from delta_belief_rl.envs.prompts import PROMPTS
from delta_belief_rl.envs.secrets import (
    can_be_mentioned,
    check_tasks,
    make_tasks,
    noun_forms,
    overlap,
    read_aliases,
    read_words,
)
from delta_belief_rl.types import Task, UserError

SPLITS = ("train", "val", "test")
_SHOWN = 10
_SOURCE = "the file with one secret on each line, or an environment with packaged data"

_OPTIONS: Mapping[str, tuple[str, Any]] = {
    "split": ("make", "train"),
    "prompt": ("make", "direct"),
    "out": ("make", None),
    "aliases": ("make", None),
    "allow_generic": ("make", False),
    "limit": ("show", _SHOWN),
    "folder": ("fetch", None),
    "base_url": ("fetch", BASE_URL),
}
"""Option to the action that it belongs to and its default."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(ACTIONS), metavar="ACTION", help=_ACTIONS_HELP)
    parser.add_argument("files", nargs="*", metavar="FILE", help="paths, or package:ENV/SPLIT")
    make = parser.add_argument_group("make")
    make.add_argument("--split", choices=SPLITS, help="goes into every row (default train)")
    make.add_argument("--prompt", choices=list(PROMPTS), help="first messages (default direct)")
    make.add_argument("--out", type=Path, metavar="FILE", help="parquet file to write")
    make.add_argument("--aliases", type=Path, metavar="FILE", help="lines like 'couch: sofa'")
    make.add_argument(
        "--allow-generic",
        action="store_true",
        default=None,
        help="accept words that questions contain by accident",
    )
    show = parser.add_argument_group("show")
    show.add_argument("--limit", type=int, help=f"tasks to show; 0 for all (default {_SHOWN})")
    bring = parser.add_argument_group("fetch")
    bring.add_argument("--folder", type=Path, help=f"default {published_folder()}")
    bring.add_argument("--base-url", help="where the published files are (default: GitHub)")


def _run(args: argparse.Namespace) -> Result:
    for option, (owner, default) in _OPTIONS.items():
        if getattr(args, option) is None:
            setattr(args, option, default)
        elif args.action != owner:
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} belongs to `data {owner}`: leave it out of {args.action}.")
    return ACTIONS[args.action](args)


def _make(args: argparse.Namespace) -> Result:
    (source,) = _exactly(args, 1, _SOURCE)
    if args.out is None:
        raise UserError("`data make` needs the file to write: give --out FILE.parquet.")
    if source in PACKAGED:
        return _make_packaged(source, args.split, args.out)
    words = read_words(Path(source), allow_generic=args.allow_generic)
    aliases = read_aliases(args.aliases) if args.aliases else {}
    tasks = make_tasks(words, args.split, args.prompt, aliases)
    write_parquet(args.out, tasks)
    unfindable = [word for word in words if not can_be_mentioned(word)]
    if unfindable:
        print(
            f"{len(unfindable)} secrets are no single word, so the rule 'exact' never finds them: "
            f"{_names(unfindable)}",
            file=sys.stderr,
        )
    value = {
        "file": str(args.out),
        "split": args.split,
        "prompt": args.prompt,
        "tasks": len(tasks),
        "with_aliases": sum(bool(task.aliases) for task in tasks),
        "unfindable": unfindable,
    }
    text = f"{args.out}: {len(tasks):,} {args.split} secrets, {args.prompt} prompt"
    return Result(value=value, text=text)


def _make_packaged(env: str, split: str, out: Path) -> Result:
    tasks = PACKAGED[env](split)
    write_parquet(out, tasks)
    value = {"file": str(out), "split": split, "env": env, "tasks": len(tasks)}
    return Result(value=value, text=f"{out}: {len(tasks):,} {split} tasks of {env}")


def _fetch(args: argparse.Namespace) -> Result:
    from delta_belief_rl.cli.fetch import fetch

    files = [published_file(path) for path in args.files] if args.files else list(FILES)
    for path, file in zip(args.files, files, strict=False):
        if file is None:
            known = ", ".join(known.path for known in FILES)
            raise UserError(f"{path!r} is no published file: choose from {known}.")
    wanted = [file for file in files if file is not None]
    folder = args.folder or published_folder()
    found = fetch(wanted, folder, args.base_url, lambda text: print(text, file=sys.stderr))
    new = sum(item.new for item in found)
    unchecked = [item.path for item in found if not item.verified]
    text = f"{len(found)} published files in {folder} ({new} new)"
    if unchecked:
        text += f"\nno checksum is on record for {', '.join(unchecked)}"
    value = [{**asdict(item), "file": str(item.file)} for item in found]
    return Result(value=value, text=text)


def _check(args: argparse.Namespace) -> Result:
    paths = _at_least(args, 1)
    reports = [_inspected(path) for path in paths]
    problems = [[*report.problems, *check_tasks(report.tasks)] for report in reports]
    pairs = [
        {"first": one.path, "second": other.path, "shared": list(shared)}
        for one, other in combinations(reports, 2)
        if (shared := overlap(_secrets(one.tasks.values()), _secrets(other.tasks.values())))
    ]
    lines: list[str] = []
    for report, found in zip(reports, problems, strict=True):
        schema = "the published schema" if report.published_schema else "another schema"
        lines.append(
            f"{report.path}: {report.num_rows:,} rows, {len(report.tasks):,} tasks, {schema}, "
            f"{_plural(len(found), 'problem')}"
        )
        lines += [f"  {_shown(problem)}" for problem in found]
    for pair in pairs:
        lines.append(
            f"{pair['first']} and {pair['second']} share "
            f"{_plural(len(pair['shared']), 'secret')}: {_names(pair['shared'])}"
        )
    value = {
        "files": [
            {
                "path": report.path,
                "rows": report.num_rows,
                "tasks": len(report.tasks),
                "published_schema": report.published_schema,
                "problems": [asdict(problem) for problem in found],
            }
            for report, found in zip(reports, problems, strict=True)
        ],
        "overlaps": pairs,
    }
    return Result(value=value, text="\n".join(lines), status=1 if pairs or any(problems) else 0)


def _overlap(args: argparse.Namespace) -> Result:
    first, second = _exactly(args, 2, "two files")
    one, other = _secrets(_tasks(first)), _secrets(_tasks(second))
    shared = overlap(one, other)
    forms = {form for secret in one for form in noun_forms(secret)}
    rest = {normalise(secret) for secret in other} - set(shared)
    near = sorted(secret for secret in rest if not noun_forms(secret).isdisjoint(forms))
    total = len(set(other))
    lines = [f"{len(shared)} of the {total:,} secrets of {second} are also in {first}"]
    lines += [f"  {secret}" for secret in shared]
    if near:
        lines.append(f"{len(near)} more differ in number or spelling only: {', '.join(near)}")
    value = {
        "first": first,
        "second": second,
        "secrets": total,
        "shared": list(shared),
        "near": near,
    }
    return Result(value=value, text="\n".join(lines), status=1 if shared else 0)


def _show(args: argparse.Namespace) -> Result:
    (path,) = _exactly(args, 1, "one file")
    tasks = _tasks(path)
    shown = tasks[: args.limit] if args.limit > 0 else tasks
    openings = {task.messages for task in tasks}
    lines = [f"{path}: {len(tasks):,} tasks, {_plural(len(openings), 'wording')}"]
    previous = None
    for task in shown:
        if task.messages != previous:
            for message in task.messages:
                lines.append(f"--- {message.role}\n{message.content}")
            lines.append("---")
        previous = task.messages
        also = f" ({', '.join(task.aliases)})" if task.aliases else ""
        lines.append(f"{task.id}  {task.source}  {task.secret}{also}")
    return Result(value=[asdict(task) for task in shown], text="\n".join(lines))


def _inspected(path: str) -> TaskFile:
    """What a file holds; a system message is read where the file has one."""
    return inspect_parquet(path, system_key=SYSTEM_KEY if has_system_column(path) else None)


def _tasks(path: str) -> list[Task]:
    return read_parquet(path, system_key=SYSTEM_KEY if has_system_column(path) else None)


def _secrets(tasks: Iterable[Task]) -> list[str]:
    return [task.secret for task in tasks]


def _exactly(args: argparse.Namespace, count: int, what: str) -> list[str]:
    if len(args.files) != count:
        raise UserError(f"`data {args.action}` needs {what}, not {len(args.files)} names.")
    return args.files


def _at_least(args: argparse.Namespace, count: int) -> Sequence[str]:
    if len(args.files) < count:
        raise UserError(f"`data {args.action}` needs at least {_plural(count, 'file')}: name it.")
    return args.files


def _shown(problem: Problem) -> str:
    where = "the file" if problem.row is None else f"row {problem.row}"
    return f"{where} {problem.what}: {problem.cure}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _names(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")


ACTIONS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "make": _make,
    "fetch": _fetch,
    "check": _check,
    "overlap": _overlap,
    "show": _show,
}
_ACTIONS_HELP = (
    "make a file from a list of secrets, or from an environment's own tasks; fetch the published "
    "files; check files and compare them with each other; overlap of two files; show a file"
)

VERB = Verb(
    name="data",
    help="Make, fetch, check, compare and show task files.",
    example=f"delta-belief data check {PACKAGED_TASKS}twenty_questions/train",
    add_arguments=_add_arguments,
    run=_run,
)
