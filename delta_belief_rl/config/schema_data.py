"""Settings of tasks and files (``data.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_belief_rl.config.fields import opt

REFERENCE_TRAIN_FILES = ("delta_belief_rl/env/twenty_questions/direct/coca/rl_training.parquet",)
REFERENCE_VAL_FILES = ("delta_belief_rl/env/twenty_questions/direct/coca/test.parquet",)


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How many rows of each file are used."""

    train: int = opt(-1, "First rows of the shuffled training tasks to use; -1 uses all.")
    val: int = opt(-1, "First rows of the shuffled validation tasks to use; -1 uses all.")


@dataclass(frozen=True, slots=True)
class Data:
    """Where tasks come from, and the two token limits."""

    world: str | None = opt(
        None,
        "Embedded world that secrets come from: its name (everyday) or the path of a world file; "
        "null reads the parquet files.",
        new=True,
    )
    world_prompt: str | None = opt(
        None,
        "User message that opens every game of an embedded world, for a model that has to be told "
        "what to do; null gives the short one that the packaged agent knows.",
        new=True,
    )
    train_files: tuple[str, ...] = opt(
        REFERENCE_TRAIN_FILES,
        "Parquet file or files of training tasks: paths, or package:twenty_questions/train for "
        "the packaged ones.",
    )
    val_files: tuple[str, ...] = opt(
        REFERENCE_VAL_FILES,
        "Parquet file or files of validation tasks: paths, or package:twenty_questions/val.",
    )
    test_files: tuple[str, ...] = opt(
        (),
        "Parquet file or files that trainer.final_test plays: paths, or "
        "package:twenty_questions/test.",
        new=True,
    )
    prompt_key: str = opt("prompt", "Column with the first messages.")
    system_key: str | None = opt(
        "system_prompt", "Column with the system message; null when the files have none."
    )
    max_prompt_length: int = opt(
        2500,
        "Tokens that a whole game may hold (cap of the episode).",
        corrected="a full game ends with the reason context_full; nothing is cut from its front",
    )
    max_response_length: int = opt(50, "Tokens that one turn may sample (cap of the turn).")
    train_batch_size: int = opt(32, "Secrets per training step.")
    shuffle: bool = opt(
        True, "Draw secrets in a random order, new in each epoch; false keeps the file's order."
    )
    sample_count: SampleCount = field(default_factory=SampleCount)
