"""A masked denoiser: a bidirectional transformer that fills the masked places of an answer.

It reads a prompt and a block of ``answer_length`` places behind it, some of them masked, and gives
logits for every place. A folder of it has the layout of a checkpoint: ``config.json``,
``model.safetensors`` and a tokenizer that transformers loads; ``architectures`` says what it is.

Legend: ``R`` rows, ``T`` tokens of the longest row, ``L`` places of the block, ``V`` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from delta_belief_rl.types import FloatArray, UserError

ARCHITECTURE = "MaskedDenoiser"
NEVER = -1
"""Category of a token that no answer may have."""
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class DenoiserConfig:
    """Sizes and tokens; the names of sizes are those of other models' ``config.json``.

    Attributes:
        answer_length: ``L``.
        mask_token_id: Stands at a place that is not filled yet.
        end_token_id: Ends an answer.
        categories: Category of every token of the vocabulary as an index of ``category_names``;
            ``NEVER`` for a token that no answer may have.
        category_names: Parts of speech, for instance.
    """

    vocab_size: int
    answer_length: int
    mask_token_id: int
    end_token_id: int
    categories: tuple[int, ...]
    category_names: tuple[str, ...]
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 192
    max_position_embeddings: int = 64

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide {self.hidden_size}")
        if len(self.categories) != self.vocab_size:
            raise ValueError(f"{len(self.categories)} categories for {self.vocab_size} tokens")
        if self.categories[self.end_token_id] == NEVER:
            raise ValueError("an answer must be able to end")


class Block(nn.Module):
    """Attention over all places and a feed-forward layer, each behind a norm."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up = nn.Linear(size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, size)

    def forward(self, hidden: Tensor, present: Tensor) -> Tensor:
        """``[R, T, hidden] -> [R, T, hidden]``; ``present [R, 1, 1, T]`` hides padding."""
        rows, width, size = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(rows, width, 3, self.heads, size // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=present)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, width, size))
        return hidden + self.down(functional.gelu(self.up(self.norm2(hidden))))


class Denoiser(nn.Module):
    """The model; see the module's head. Output and input share their embedding."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits of every place.

        Args:
            ids: ``[R, T]``, rows padded at their right end with any token.
            lengths: ``[R]``, tokens of each row without padding.

        Returns:
            ``[R, T, V]``.
        """
        where = torch.arange(ids.shape[1], device=ids.device)
        present = (where[None] < lengths[:, None])[:, None, None]
        hidden = self.tokens(ids) + self.places(where)[None]
        for block in self.blocks:
            hidden = block(hidden, present)
        return functional.linear(self.norm(hidden), self.tokens.weight, self.bias)


def build_denoiser(config: DenoiserConfig, seed: int = 0) -> Denoiser:
    """A model with random weights, a function of both arguments alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Denoiser(config).eval()


def is_denoiser(path: str | Path) -> bool:
    """Whether a model folder holds a masked denoiser; False where there is no such folder.

    Raises:
        UserError: Its ``config.json`` is not JSON.
    """
    return _entries(Path(path).expanduser()).get("architectures") == [ARCHITECTURE]


def read_config(path: str | Path) -> DenoiserConfig:
    """The configuration of a denoiser's folder.

    Raises:
        UserError: There is none, or it does not hold together.
    """
    folder = Path(path).expanduser()
    entries = _entries(folder)
    if entries.get("architectures") != [ARCHITECTURE]:
        raise UserError(f"{str(folder)!r} holds no masked denoiser: give a folder of one.")
    known = {item.name for item in fields(DenoiserConfig)}
    found: dict[str, Any] = {
        name: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for name, value in entries.items()
        if name in known
    }
    try:
        return DenoiserConfig(**found)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{str(folder / _CONFIG)!r} is no configuration of a masked denoiser ({error}): copy "
            "or make the model again."
        ) from error


def load_denoiser(path: str | Path, device: torch.device | str = "cpu") -> Denoiser:
    """A denoiser from its folder, in float32.

    Raises:
        UserError: The folder holds none, or its weights are damaged or of other sizes.
    """
    folder = Path(path).expanduser()
    model = Denoiser(read_config(folder))
    try:
        model.load_state_dict(load_file(folder / _WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"The weights {str(folder / _WEIGHTS)!r} cannot be read ({reason}): copy or make the "
            "model again."
        ) from error
    return model.to(device).eval()


def save_denoiser(model: Denoiser, tokenizer: Any, folder: Path) -> None:
    """Write weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().float() for name, value in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS)
    (folder / _WEIGHTS).chmod(0o644)
    tokenizer.save_pretrained(folder)
    body = {"architectures": [ARCHITECTURE], "tie_word_embeddings": True, **asdict(model.config)}
    (folder / _CONFIG).write_text(json.dumps(body) + "\n", encoding="utf-8")


def denoiser_state(model: Denoiser) -> dict[str, NDArray[np.float32]]:
    """All weights as owned arrays, by name."""
    return {
        name: value.detach().float().cpu().numpy().copy()
        for name, value in model.state_dict().items()
    }


def load_denoiser_state(model: Denoiser, state: Mapping[str, NDArray[np.float32]]) -> None:
    """Take over all weights.

    Raises:
        UserError: They are those of another model.
    """
    try:
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"The weights are not those of this denoiser ({reason}): resume with the model that "
            "the run began with."
        ) from error


@torch.no_grad()
def token_logps(model: Denoiser, token_ids: Sequence[int]) -> FloatArray:
    """Log-prob of each token of a text where it alone is masked, at temperature 1, ``[n]``.

    The probe of a denoiser: it depends on every weight, and engine and trainer can compare it.
    """
    ids = torch.tensor([list(token_ids)], device=model.bias.device)
    count = ids.shape[1]
    rows = ids.repeat(count, 1)
    rows.fill_diagonal_(model.config.mask_token_id)
    logits = model(rows, torch.full((count,), count, device=ids.device))
    logp = logits.diagonal().T.log_softmax(-1).gather(-1, ids[0][:, None])[:, 0]
    return logp.double().cpu().numpy()


def _entries(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file():
        return {}
    try:
        body: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON; get the model again.") from error
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}
