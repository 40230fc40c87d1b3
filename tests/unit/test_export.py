"""Exports: what PEFT and transformers load from the folder is the trainer's policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_belief_rl.cli.main import main
from delta_belief_rl.config.compose import load_config, resolved_yaml
from delta_belief_rl.models import weight_files
from delta_belief_rl.models.loading import load_causal_lm
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer import export as export_module
from delta_belief_rl.trainer.actor import EMA, POLICY, ActorSettings, PolicyActor, dump_state
from delta_belief_rl.trainer.export import BOUNDS, ExportSettings, TooFar, export
from delta_belief_rl.trainer.settings import adapter_settings
from delta_belief_rl.types import UserError
from tests.runs import ROOT, words, write_world

AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
IDS = torch.tensor([[5, 90, 17, 300, 41, 8]])


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> PolicyActor:
    """A rank whose two adapters hold different weights, with the configuration of a run."""
    folder = tmp_path_factory.mktemp("config")
    config, _ = load_config(words(folder, write_world(folder / "tiny.yaml")))
    lora = replace(adapter_settings(config), ema=True)
    actor = PolicyActor(ActorSettings(str(AGENT), lora, num_threads=1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if ".lora_B." in name:
                size = 0.05 if f".{POLICY}." in name else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    actor.config = resolved_yaml(config)  # type: ignore[attr-defined]
    return actor


@pytest.fixture
def saved(actor: Any, tmp_path: Path) -> Path:
    files: dict[str, checkpoint.Content] = {"actor/state.pt": dump_state(actor.state())}
    meta = {"config": actor.config}
    return checkpoint.save(tmp_path / "checkpoints", 7, files, meta, run_id="r1")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits[0].float()


def of_trainer(actor: PolicyActor, name: str = POLICY) -> torch.Tensor:
    """Base plus update, made from the rank's arrays by hand."""
    model = load_causal_lm(AGENT)
    state = actor.snapshot(name).state
    lora = actor.settings.adapter
    with torch.no_grad():
        for key in state:
            if not key.endswith(".lora_A.weight"):
                continue
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            update = state[key.replace("lora_A", "lora_B")] @ state[key] * lora.alpha / lora.rank
            model.get_submodule(module).weight += torch.from_numpy(np.ascontiguousarray(update))
    return logits(model)


def with_peft(folder: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(AGENT, dtype=torch.float32)
    return logits(PeftModel.from_pretrained(base, str(folder)).eval())


@pytest.mark.parametrize("name", [POLICY, EMA])
def test_F1_an_adapter_loaded_by_peft_is_the_trainers(
    name: str, actor: PolicyActor, saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made = export(ExportSettings(saved, out, adapter=name))
    assert (with_peft(out) - of_trainer(actor, name)).abs().max() < 1e-4
    config = json.loads((out / "adapter_config.json").read_text())
    lora = actor.settings.adapter
    assert (config["r"], config["lora_alpha"]) == (lora.rank, lora.alpha)
    assert config["base_model_name_or_path"] == str(AGENT)
    projections = ("q", "k", "v", "o", "gate", "up", "down")
    assert set(config["target_modules"]) == {f"{p}_proj" for p in projections}
    stored = load_file(out / "adapter_model.safetensors")
    state = actor.snapshot(name).state
    assert stored.keys() == state.keys()
    assert all(np.array_equal(stored[key].numpy(), state[key]) for key in state)
    assert made.largest < BOUNDS["float32"]
    assert made.effect > 0.01
    assert set(made.files) == {path.name for path in out.iterdir()}
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert list(saved.glob(".lease-*")) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_F2_L10_a_merged_model_loads_whole_and_its_error_is_told(
    dtype: str | None,
    actor: PolicyActor,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    more = ["--dtype", dtype] if dtype else []
    assert main(["export", str(saved), str(out), "--merged", "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    apart = (logits(model) - of_trainer(actor)).abs().max()
    assert apart < (told["bound"] if dtype else 1e-4)
    assert 0 < told["largest"] <= told["bound"]
    assert json.loads((out / "config.json").read_text())["dtype"] == (dtype or "float32")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16 if dtype else torch.float32
    }
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(told["files"])


def test_M4_a_model_of_several_files_is_merged_file_by_file(
    actor: PolicyActor, saved: Path, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(AGENT, base, ignore=shutil.ignore_patterns("model.safetensors"))
    load_causal_lm(AGENT).save_pretrained(base, max_shard_size="1MB")
    assert len(list(base.glob("*.safetensors"))) > 2
    export(ExportSettings(saved, out, merged=True, base=str(base)))
    names = {path.name for path in base.glob("*.safetensors*")}
    assert {path.name for path in out.glob("*.safetensors*")} == names
    for part in base.glob("*.safetensors"):
        assert load_file(part).keys() == load_file(out / part.name).keys()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert (logits(model) - of_trainer(actor)).abs().max() < 1e-4


# --- what is refused


def refused(settings: ExportSettings, match: str) -> None:
    before = sorted(path.name for path in settings.out.parent.iterdir())
    with pytest.raises(TooFar, match=match):
        export(settings)
    assert sorted(path.name for path in settings.out.parent.iterdir()) == before


def test_F1_an_adapter_without_effect_is_refused_with_status_1(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = export_module.LoraConfig
    monkeypatch.setattr(
        export_module, "LoraConfig", lambda **words: real(**{**words, "lora_alpha": 0})
    )
    assert main(["export", str(saved), str(tmp_path / "out")]) == 1
    assert "logits differ by up to" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_L10_a_merge_that_loses_what_was_learnt_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bound of half precision, but no nearer to the policy than to the base model."""
    monkeypatch.setattr(weight_files, "_merge", lambda base, *_: base)
    monkeypatch.setitem(BOUNDS, "bfloat16", 100.0)
    settings = ExportSettings(saved, tmp_path / "out", merged=True, dtype="bfloat16")
    refused(settings, "all that was learnt")


@pytest.mark.parametrize("damage", ["file", "tensor"])
def test_F2_an_incomplete_model_is_refused(
    damage: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    shutil.copytree(AGENT, base, ignore=shutil.ignore_patterns("model.safetensors"))
    load_causal_lm(AGENT).save_pretrained(base, max_shard_size="1MB")

    def lossy(tensors: Mapping[str, torch.Tensor], file: Path, **words: Any) -> None:
        kept = dict(list(tensors.items())[1:]) if damage == "tensor" else dict(tensors)
        save_file(kept, file, **words)

    def write(*args: Any) -> None:
        weight_files.write_merged(*args)
        if damage == "file":
            next(iter(args[3].glob("*.safetensors"))).unlink()

    monkeypatch.setattr(weight_files, "save_file", lossy)
    monkeypatch.setattr(export_module, "write_merged", write)
    settings = ExportSettings(saved, tmp_path / "out", merged=True, base=str(base))
    refused(settings, "not complete")


def test_what_cannot_be_exported_is_one_sentence(
    actor: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export(ExportSettings(saved, tmp_path / "there"))
    with pytest.raises(UserError, match="no complete checkpoint"):
        export(ExportSettings(tmp_path / "checkpoints" / "global_step_8", tmp_path / "out"))
    with pytest.raises(UserError, match="no model folder"):
        export(ExportSettings(saved, tmp_path / "out", base="/no/such/model"))
    denoiser, _ = load_config(["experiment=agreement_quickstart"])
    files: dict[str, checkpoint.Content] = {"actor/state.pt": dump_state(actor.state())}
    config = {"config": resolved_yaml(denoiser)}
    other = checkpoint.save(tmp_path / "other", 1, files, config, run_id="r1")
    with pytest.raises(UserError, match="holds a masked denoiser"):
        export(ExportSettings(other, tmp_path / "out"))
    state = {**actor.state()}
    del state["ema"]
    files = {"actor/state.pt": dump_state(state)}
    plain = checkpoint.save(tmp_path / "plain", 1, files, {"config": actor.config}, run_id="r1")
    assert main(["export", str(plain), str(tmp_path / "out"), "--adapter", "ema"]) == 2
    assert "no slow adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
