"""What the plan needs to know of the machine, the files and the model; gathered without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from delta_belief_rl.config.checkpoints import Checkpoint, read_checkpoint
from delta_belief_rl.config.gpus import lowest_capability, read_gpus
from delta_belief_rl.config.paths import (
    PACKAGE,
    PACKAGED_FOLDERS,
    find_file,
    packaged_folder,
)
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import VLLM, installed
from delta_belief_rl.types import UserError

CountWorld = Callable[[str], Mapping[str, int]]
"""Secrets per split (``train``, ``val``, ``test``) of a world by name or path."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Secrets that a set of tasks shares with one that should be apart from it.

    Attributes:
        first: Name of the set that comes first, e.g. ``training``.
        second: Name of the set whose results the overlap spoils, e.g. ``validation``.
        shared: The secrets, in alphabetical order.
        num_second: Secrets of the second set.
    """

    first: str
    second: str
    shared: tuple[str, ...]
    num_second: int

    def sentence(self, shown: int = 5) -> str:
        """The fact in words, with the first few secrets.

        Example:
            >>> Overlap("training", "validation", ("ankle", "aunt"), 198).sentence()
            '2 of 198 validation secrets are also training secrets (ankle, aunt)'
        """
        names = ", ".join(self.shared[:shown]) + (", ..." if len(self.shared) > shown else "")
        verb = "is also a" if len(self.shared) == 1 else "are also"
        noun = "secret" if len(self.shared) == 1 else "secrets"
        return (
            f"{len(self.shared)} of {self.num_second:,} {self.second} secrets {verb} "
            f"{self.first} {noun} ({names})"
        )


FindOverlaps = Callable[[RunConfig], tuple[Overlap, ...]]
"""Overlaps between the sets of tasks of a configuration, empty ones left out."""
CountTasks = Callable[[RunConfig], Mapping[str, int] | None]
"""Tasks per split that a plug-in makes; None where files or a world have them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, as its ``config.json`` gives them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """``(inputs, outputs)`` of the linear layers of one block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (self.hidden, queries),
            (self.hidden, keys),
            (self.hidden, keys),
            (queries, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )

    def parameters(self) -> int:
        """Weights of the model, norms left out."""
        block = sum(inputs * outputs for inputs, outputs in self.linear_sizes())
        return self.layers * block + self.vocab * self.hidden * (1 if self.tied else 2)

    def lora_parameters(self, rank: int) -> int:
        """Weights of one adapter of this rank on all linear layers."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear_sizes())


@dataclass(frozen=True, slots=True)
class Facts:
    """A count is None where its source could not be read.

    Attributes:
        cores: CPU cores that this process may use.
        gpus: GPUs that this process may use.
        missing: Files and model folders that the configuration names and that do not exist.
        no_models: Folders that it names as models and that hold none.
        checkpoint: What the policy's folder says of its weights; None where it is not here.
        judge_checkpoint: Likewise of the judge's.
        alloc_conf: Value of PYTORCH_CUDA_ALLOC_CONF.
        overlaps: Secrets that two sets of tasks share.
        capability: Compute capability that every GPU of the job has.
        vllm: Version of the installed vLLM.
    """

    num_train_tasks: int | None
    num_val_tasks: int | None
    cores: int
    gpus: int
    num_test_tasks: int | None = None
    missing: tuple[str, ...] = ()
    model: ModelShape | None = None
    judge_model: ModelShape | None = None
    no_models: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None
    judge_checkpoint: Checkpoint | None = None
    alloc_conf: str = ""
    overlaps: tuple[Overlap, ...] = ()
    capability: tuple[int, int] | None = None
    vllm: str | None = None


def gather_facts(
    config: RunConfig,
    count_world: CountWorld | None = None,
    find_overlaps: FindOverlaps | None = None,
    count_tasks: CountTasks | None = None,
) -> Facts:
    """Look at the files, the model's ``config.json`` and the machine; takes well under a second.

    Args:
        config: A valid configuration.
        count_world: Needed where ``data.world`` is set.
        find_overlaps: Compares the sets of tasks; without it none is reported.
        count_tasks: Counts those that a plug-in makes.
    """
    data, trainer = config.data, config.trainer
    missing: list[str] = []
    made = count_tasks(config) if count_tasks else None
    if data.world is not None or made is not None:
        counts = dict(made or (count_world(data.world) if count_world and data.world else {}))
        train, val, test = (counts.get(split) for split in ("train", "val", "test"))
    else:
        train = None if trainer.val_only else _count_rows(data.train_files, missing)
        val = _count_rows(data.val_files, missing)
        test = _count_rows(data.test_files, missing) if trainer.final_test else None
    gpus = available_gpus()
    asks = gpus > 0 and "vllm" in (config.actor_rollout_ref.rollout.name, config.judge_rollout.name)
    folder = _model_folder(config.actor_rollout_ref.model.path)
    judge_folder = _model_folder(config.judge_rollout.model.path)
    checkpoint = read_checkpoint(folder) if folder else None
    judge_checkpoint = read_checkpoint(judge_folder) if judge_folder else None
    no_models: list[str] = []
    for path, found in (
        (config.actor_rollout_ref.model.path, checkpoint),
        (config.judge_rollout.model.path, judge_checkpoint),
    ):
        if _looks_local(path) and not find_file(path).exists():
            missing.append(path)
        elif _looks_local(path) and find_file(path).is_dir() and found is None:
            no_models.append(path)
    return Facts(
        num_train_tasks=_limit(train, data.sample_count.train),
        num_val_tasks=_limit(val, data.sample_count.val),
        num_test_tasks=test,
        cores=available_cores(),
        gpus=gpus,
        missing=tuple(missing),
        model=read_shape(folder) if folder else None,
        judge_model=read_shape(judge_folder) if judge_folder else None,
        no_models=tuple(no_models),
        checkpoint=checkpoint,
        judge_checkpoint=judge_checkpoint,
        alloc_conf=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        overlaps=find_overlaps(config) if find_overlaps and data.world is None else (),
        capability=lowest_capability(read_gpus()) if asks else None,
        vllm=installed(VLLM),
    )


def available_cores(environ: Mapping[str, str] = os.environ) -> int:
    """CPU cores of the allocation: the scheduler's, the cgroup's and the affinity's minimum."""
    limits = [len(os.sched_getaffinity(0))]
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if environ.get(name, "").isdigit():
            limits.append(int(environ[name]))
            break
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        share, period = quota.read_text(encoding="utf-8").split()[:2]
        if share.isdigit() and int(period):
            limits.append(round(int(share) / int(period)))
    return max(1, min(limits))


def available_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """GPUs of the allocation: CUDA_VISIBLE_DEVICES where it is set, else the device files."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(file.name[6:].isdigit() for file in devices.glob("nvidia*"))
    if visible is None:
        return present
    named = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return min(len(named), present)


def read_shape(folder: Path) -> ModelShape | None:
    """The sizes in ``folder/config.json``; None where they are not all given.

    Raises:
        UserError: The file is not JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        entries = cast("dict[str, object]", json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON; download the model again.") from error
    sizes = {
        name: entries.get(name)
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
    }
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return None
    hidden, layers, heads, intermediate, vocab = (cast("int", size) for size in sizes.values())
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=cast("int", entries.get("num_key_value_heads") or heads),
        head_dim=cast("int", entries.get("head_dim") or hidden // heads),
        intermediate=intermediate,
        vocab=vocab,
        tied=bool(entries.get("tie_word_embeddings", False)),
    )


def _count_rows(files: Sequence[str], missing: list[str]) -> int | None:
    """Rows of parquet files from their footers; None when one is missing."""
    absent = [name for name in files if not find_file(name).is_file()]
    missing.extend(absent)
    if absent or not files:
        return None
    return sum(_rows(name) for name in files)


def _rows(name: str) -> int:
    parquet: Any = import_module("pyarrow.parquet")  # here, so that `config` stays cheap to import
    try:
        return int(parquet.read_metadata(find_file(name)).num_rows)
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise UserError(f"{name} is not a parquet file; get it again.") from error


def _limit(rows: int | None, count: int) -> int | None:
    return rows if rows is None or count == -1 else min(rows, count)


def _looks_local(path: str) -> bool:
    """A folder rather than a Hugging Face id (``owner/name``)."""
    return path.startswith(("/", "~", ".", PACKAGE.name + "/"))


def _model_folder(path: str) -> Path | None:
    """The model's folder, or its newest snapshot in the local Hugging Face cache."""
    folder = packaged_folder(path) if path in PACKAGED_FOLDERS else find_file(path)
    if path and folder.is_dir():
        return folder
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cached = home / "hub" / ("models--" + path.replace("/", "--")) / "snapshots"
    snapshots = sorted(cached.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return snapshots[-1].parent if snapshots else None
