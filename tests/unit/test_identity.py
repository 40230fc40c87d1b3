"""What tells policies of one name apart."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from delta_belief_rl.config.schema_actor import ActorModel
from delta_belief_rl.trainer.identity import folder_checksum, policy_identity


def model(folder: Path) -> Path:
    """A folder with 12 MB of weights."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    weights = {f"layer{i}": rng.normal(size=(512, 512)).astype(np.float32) for i in range(12)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_that_were_trained_again_in_their_place_are_others(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    before = folder_checksum(folder)
    file = folder / "model.safetensors"
    stamp, size = file.stat(), file.stat().st_size
    weights = load_file(file)
    weights["layer7"] = weights["layer7"] + np.float32(0.01)
    save_file(weights, file)
    # Neither the size nor the time of the file tells.
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_size == size
    assert folder_checksum(folder) != before


def test_a_copy_is_the_same_model_and_a_note_beside_it_changes_nothing(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    (two / "README.md").write_text("mine")
    os.utime(two / "model.safetensors", (1, 1))
    assert folder_checksum(one) == folder_checksum(two)
    (two / "chat_template.jinja").write_text("{{ messages }}")
    assert folder_checksum(one) != folder_checksum(two)


def test_a_folder_its_tokenizer_a_hub_id_and_a_service(tmp_path: Path) -> None:
    one, two = str(model(tmp_path / "one")), str(model(tmp_path / "two"))
    plain = policy_identity(ActorModel(path=one), {})
    assert plain == folder_checksum(Path(one))
    assert policy_identity(ActorModel(path=one, tokenizer_path=two), {}) != plain
    assert policy_identity(ActorModel(path="org/none"), {}) == ""
    api = ActorModel(path=one, api_model_name="vendor/big")
    url = "https://user:secret@host.example:8000/v1"
    assert policy_identity(api, {"OPENAI_BASE_URL": url}) == "host.example:8000"
    assert policy_identity(api, {}) == ""
    assert policy_identity(api, {"OPENAI_BASE_URL": "http://[broken"}) == ""
