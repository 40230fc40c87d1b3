"""Writes ``docs/config.md``: ``python -m delta_belief_rl.config.docs [--check]``."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from delta_belief_rl.config.compose import group_options
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.paths import PACKAGE, config_dir
from delta_belief_rl.config.reference_keys import find_inert
from delta_belief_rl.config.reference_names import REFERENCE_NAMES
from delta_belief_rl.config.schema import RunConfig, leaves, lookup
from delta_belief_rl.config.schema_actor import Adapter
from delta_belief_rl.types import UserError

TARGET = PACKAGE.parent / "docs" / "config.md"
_SECTIONS = {
    "": "The run",
    "multi_turn": "Games and rewards",
    "data": "Tasks",
    "actor_rollout_ref": "Policy: pool",
    "actor_rollout_ref.model": "Policy: model",
    "actor_rollout_ref.actor": "Policy: update",
    "actor_rollout_ref.rollout": "Policy: engine",
    "judge_rollout": "Judge",
    "judge_rollout.rollout": "Judge: engine",
    "algorithm": "Credit",
    "trainer": "Schedule, folders, mirrors",
    "ray_init": "Ray",
}
_HEAD = """# Settings

<!-- Written by `python -m delta_belief_rl.config.docs`; change the schema, not this file. -->

A setting is changed on the command line, `python train.py experiment=quickstart
trainer.save_freq=10`, or in a YAML file, `python train.py --config mine.yaml`. Names are those of
the published ΔBelief-RL implementation, so its launch lines work; a leading `+` changes nothing.
A name that does not exist, or a value of the wrong type, ends the program with one sentence and
exit status 2. `python train.py --dry-run ...` shows what a configuration would run.

Marks: **new** is a setting that the published implementation does not have; **corrected** acts
differently on purpose; **vllm** or **api** is read by that engine or judge only.
"""
_MICRO = """## Batch sizes in plain words

| What you decide | Setting | Unit |
|---|---|---|
| secrets per training step | `data.train_batch_size` | secrets |
| games per secret | `multi_turn.train.n` | games |
| secrets per optimizer step | `actor_rollout_ref.actor.ppo_mini_batch_size` | secrets |
| size of one forward and backward pass | `...actor.ppo_micro_batch_size_per_gpu` | games |
| the same with `use_dynamic_bsz=true` | `...actor.ppo_max_token_len_per_gpu` | tokens |

The second and third do not have to fit the number of GPUs: the planner deals whole games to
ranks. The size of a pass changes memory and speed, never the loss.
"""


def render() -> str:
    """The whole document."""
    return (
        "\n".join([_HEAD, *_groups(), "", _MICRO, *_settings(), *_adapters(), *_inert()]).rstrip()
        + "\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Write the document, or with ``--check`` only compare it; 1 when it is not current."""
    words = sys.argv[1:] if argv is None else argv
    if words not in ([], ["--check"]):
        print("docs: the only option is --check", file=sys.stderr)
        return 2
    text = render()
    if words:
        current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'current' if current else 'out of date'}")
        return 0 if current else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def _groups() -> Iterator[str]:
    yield "## Groups\n"
    yield "Ready sets of settings, chosen as `group=option`; `experiment` composes the others.\n"
    yield "| Group | Option | What it is |"
    yield "|---|---|---|"
    for group, options in group_options().items():
        for option in options:
            yield f"| `{group}` | `{option}` | {_first_comment(group, option)} |"


def _first_comment(group: str, option: str) -> str:
    lines = (config_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    words = [line for line in comments if not line.startswith("@package")]
    if not words:
        raise UserError(f"configs/{group}/{option}.yaml needs a comment that says what it is.")
    return words[0]


def _settings() -> Iterator[str]:
    default = RunConfig()
    rows: dict[str, list[str]] = {title: [] for title in _SECTIONS}
    for name, item, kind in leaves(RunConfig):
        section = max((head for head in _SECTIONS if _inside(name, head)), key=len)
        meta = item.metadata
        marks = ["new"] if meta.get("new") else []
        marks += [meta["needs"]] if meta.get("needs") else []
        text = str(meta["help"]) + "".join(f" **{mark}**" for mark in marks)
        if meta.get("corrected"):
            text += f" **corrected**: {meta['corrected']}."
        value = _show(lookup(default, name))
        rows[section].append(f"| `{name}` | {_kind(kind)} | {value} | {text} |")
    for head, title in _SECTIONS.items():
        yield f"## {title}\n"
        yield "| Setting | Type | Default | Meaning |"
        yield "|---|---|---|---|"
        yield from rows[head]
        yield ""


def _adapters() -> Iterator[str]:
    yield "## An adapter in `actor_rollout_ref.model.adapters`\n"
    yield "| Setting | Type | Meaning |"
    yield "|---|---|---|"
    for name, item, kind in leaves(Adapter):
        yield f"| `{name}` | {_kind(kind)} | {item.metadata['help']} |"
    yield ""


def _inert() -> Iterator[str]:
    yield "## Settings without effect\n"
    yield (
        "These names of the published implementation are accepted. The values in the third "
        "column describe\n"
        "what happens anyway and pass silently. Any other value gives one warning, or is an "
        "error where the\n"
        "last column says so, because it would mean another experiment.\n"
    )
    yield "| Setting | Why | Silent values | Other values |"
    yield "|---|---|---|---|"
    known = {name for name, _, _ in leaves(RunConfig)}
    seen: set[str] = set()
    for name in REFERENCE_NAMES:
        found = None if name in known else find_inert(name)
        if found is None or found[0] in seen:
            continue
        head, entry = found
        seen.add(head)
        shown = f"`{head}`" if head == name else f"`{head}.*`"
        silent = ", ".join(_show(value) for value in entry.holds)
        silent = f"that of `{entry.follows}`" if entry.follows else silent
        yield f"| {shown} | {entry.note} | {silent} | {'error' if entry.strict else 'warning'} |"


def _inside(name: str, head: str) -> bool:
    return not head or name.startswith(head + ".")


def _show(value: object) -> str:
    plain = to_plain(value)
    if plain is None:
        return "`null`"
    if isinstance(plain, bool):
        return f"`{str(plain).lower()}`"
    if value and isinstance(value, tuple) and isinstance(value[0], Adapter):
        return "active_lora and ema, of `lora_rank`"
    return f"`{plain}`" if plain != "" else ""


def _kind(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _kind(arg) for arg in args)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return "list" if args[-1] is Ellipsis else f"{len(args)} numbers"
    names = {bool: "true/false", int: "integer", float: "number", str: "text"}
    return names.get(kind, "group")


if __name__ == "__main__":
    sys.exit(main())
