"""How a model is quantised, and which models can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from delta_belief_rl.config.checkpoints import GROUP_SIZES
from delta_belief_rl.types import UserError

Scheme = Literal["W4A16", "W4A16_ASYM"]
"""``W4A16``: 4-bit weights around zero. ``W4A16_ASYM``: every group has a zero point of its own;
fewer kernels serve it."""

OUTPUTS = 32
"""Outputs of a layer come in multiples of so many, or no kernel of vLLM for CPUs takes it."""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """How a model is quantised.

    Attributes:
        model: Folder, hub id or packaged name.
        world: Whose questions the model reads meanwhile.
        group_size: Weights that share a scale; None is the largest that divides all layers.
        samples: Prompts that the scales are chosen by.
        checked: Other prompts, about other things, that the written folder is compared on.
        max_difference: Largest mean difference of log-probs, nats, that is taken for a good folder.
    """

    model: str
    out: Path
    world: str = "everyday"
    scheme: Scheme = "W4A16"
    group_size: int | None = None
    samples: int = 128
    checked: int = 64
    seed: int = 0
    device: str = "cpu"
    max_difference: float = 1.0

    def __post_init__(self) -> None:
        allowed = sorted(size for size in GROUP_SIZES if size > 0)
        if self.group_size is not None and self.group_size not in allowed:
            raise UserError(
                f"vLLM serves groups of {', '.join(map(str, allowed))} weights, not of "
                f"{self.group_size}: give one of them as --group-size."
            )
        if self.samples < 1 or self.checked < 1 or not self.max_difference > 0:
            raise UserError("--samples, --checked and --max-difference must be above 0.")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that is to be quantised."""

    name: str
    inputs: int
    outputs: int


def choose_group_size(model: str, layers: Sequence[LinearShape], asked: int | None) -> int:
    """The group size for a model.

    Args:
        model: Its name, for the sentence.
        layers: All layers that are to be quantised.
        asked: What the user wants; None is the largest that divides all layers.

    Raises:
        UserError: vLLM could not serve the result.
    """
    if not layers:
        raise UserError(f"{model} has no linear layers to quantise: give a causal language model.")
    problem = next(_narrow(model, layers), None)
    if problem is not None:
        raise UserError(problem)
    sizes = sorted((size for size in GROUP_SIZES if size > 0), reverse=True)
    fitting = [size for size in sizes if not any(layer.inputs % size for layer in layers)]
    if asked in fitting or (asked is None and fitting):
        return fitting[0] if asked is None else asked
    wrong = next(layer for layer in layers if layer.inputs % (asked or sizes[-1]))
    cure = (
        f"use --group-size {fitting[0]}"
        if fitting
        else "serve this model without quantisation, or give another one"
    )
    raise UserError(
        f"{wrong.name} of {model} has {wrong.inputs} inputs, which groups of {asked or sizes[-1]} "
        f"weights do not divide, so vLLM cannot serve it: {cure}."
    )


def _narrow(model: str, layers: Sequence[LinearShape]) -> Iterator[str]:
    for layer in layers:
        if layer.outputs % OUTPUTS:
            yield (
                f"{layer.name} of {model} has {layer.outputs} outputs and vLLM serves 4-bit layers "
                f"with multiples of {OUTPUTS}: serve this model without quantisation, or give "
                "another one."
            )
