"""LoRA merged into the base weights, for engines that only read.

An adapter layer costs several small products for each linear layer of the model, which is most of a
decoding step of a small model on a CPU. In float32 the merged product ``x (W + s B A)^T`` equals
the sum of both paths up to rounding (about 1e-6 of a log-prob). In half precision it does not,
because ``W + s B A`` is rounded to the format of ``W``; there the adapter stays apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_belief_rl.types import UserError

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


class MergedLora:
    """Keeps a model's linear weights equal to base plus adapter, starting from the base each time.

    Args:
        model: A causal model without adapter, in float32.
        scale: ``alpha / rank``.

    Raises:
        ValueError: The model is not in float32.
    """

    def __init__(self, model: Any, scale: float) -> None:
        if model.dtype is not torch.float32:
            raise ValueError("an adapter is merged in float32 only")
        self._model = model
        self._scale = scale
        self._base: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def load(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Merge an adapter in place of the one before.

        Args:
            state: Arrays by PEFT's names, as ``adapters.adapter_state`` gives them.

        Raises:
            UserError: A name belongs to no linear layer, a half of a pair is missing, or a shape
                differs. The weights are as before then.
        """
        layers = {name: self._layer(name) for name in adapted_modules(state)}
        for name, layer in layers.items():
            first, second = halves_of(state, name)
            if (second.shape[0], first.shape[1]) != tuple(layer.weight.shape):
                raise UserError(
                    f"The adapter weights of {name!r} do not fit the model's layer of shape "
                    f"{tuple(layer.weight.shape)}: use the base model that the adapter was trained "
                    "on."
                )
        for name, layer in layers.items():
            base = self._base.setdefault(name, layer.weight.detach().clone())
            halves = (np.array(half, dtype=np.float32) for half in halves_of(state, name))
            first, second = (torch.from_numpy(half).to(base.device) for half in halves)
            layer.weight.copy_(torch.addmm(base, second, first, alpha=self._scale))

    def _layer(self, name: str) -> torch.nn.Linear:
        try:
            layer = self._model.get_submodule(name)
        except AttributeError as error:
            raise UserError(
                f"The adapter has weights for {name!r}, which the model does not have: use the "
                "base model that the adapter was trained on."
            ) from error
        if not isinstance(layer, torch.nn.Linear):
            raise UserError(
                f"The adapter has weights for {name!r}, which is not a linear layer of the model: "
                "use the base model that the adapter was trained on."
            )
        return layer


def halves_of(
    state: Mapping[str, NDArray[np.float32]], module: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` of one adapted module."""
    return state[_PREFIX + module + _A], state[_PREFIX + module + _B]


def adapted_modules(state: Mapping[str, NDArray[np.float32]]) -> list[str]:
    """Names of the modules that an adapter changes, each with both halves.

    Raises:
        UserError: A half is missing, or there is no module.
    """
    names = sorted({key.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) for key in state})
    wanted = {_PREFIX + name + half for name in names for half in (_A, _B)}
    if not names or wanted != set(state):
        odd = sorted(wanted ^ set(state))
        example = odd[0] if odd else "it is empty"
        raise UserError(
            f"The adapter state is no complete LoRA adapter (for example {example}): save it again."
        )
    return names
