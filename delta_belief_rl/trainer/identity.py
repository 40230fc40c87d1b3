"""Which weights a policy's name stands for now: a folder may be trained again in its place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.schema_actor import ActorModel
from delta_belief_rl.engines.api_client import URL_NAME

SUFFIXES = frozenset({".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"})
"""Files of a model folder that games depend on: weights, settings, tokenizer, chat template."""

_BLOCK, _BLOCKS = 4096, 1024
"""Bytes that are read at a time, and how often in one file: of a larger one, evenly spread."""


def policy_identity(model: ActorModel, environ: Mapping[str, str] = os.environ) -> str:
    """What tells policies of one name apart.

    Returns:
        For a model behind an API the service's host, with its port where one is given; for a folder
        ``folder_checksum``, with that of the tokenizer's folder; empty for an id of the hub.
    """
    if model.api_model_name:
        return _host(environ.get(URL_NAME, ""))
    places = (find_file(path) for path in (model.path, model.tokenizer_path) if path)
    return " ".join(folder_checksum(place) for place in places if place.is_dir())


def folder_checksum(folder: Path) -> str:
    """Checksum of a model folder, without reading all of it.

    Small files are read whole. Of larger ones the size counts and blocks that are spread over the
    file, so that weights of the same shapes are told apart in a second.
    """
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            size = path.stat().st_size
            total.update(f"{path.name}\0{size}\0".encode())
            stride = max(_BLOCK, size // _BLOCKS)
            with path.open("rb") as file:
                for start in range(0, size, stride):
                    file.seek(start)
                    total.update(file.read(_BLOCK))
    return total.hexdigest()


def _host(url: str) -> str:
    """Host of an address, without a user or password; empty for what is no address."""
    try:
        return urlsplit(url.strip()).netloc.rpartition("@")[2]
    except ValueError:
        return ""
