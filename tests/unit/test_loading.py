"""Loading, adapters and their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from delta_belief_rl.models.loading import (
    adapter_names,
    adapter_state,
    add_lora,
    build_causal_lm,
    copy_adapter,
    load_adapter_state,
    load_causal_lm,
    load_tokenizer,
    state_checksum,
    tiny_qwen3_config,
    update_ema,
    use_adapter,
)
from delta_belief_rl.types import UserError

IDS = torch.tensor([[1, 5, 2, 9]])


@pytest.fixture
def model() -> Any:
    return build_causal_lm(tiny_qwen3_config(31), seed=1)


@pytest.fixture
def adapted(model: Any) -> Any:
    model = add_lora(model, rank=2, alpha=4, name="policy")
    return randomise(model, "policy", 5)


def randomise(model: Any, name: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if f".{name}." in key:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_a_saved_model_loads_with_equal_logits_and_our_attention(
    model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    assert loaded.config._attn_implementation == "delta_belief"
    assert not loaded.training
    torch.testing.assert_close(logits(loaded), logits(model))


def test_random_weights_are_a_function_of_the_seed_and_leave_the_global_stream_alone() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    a = build_causal_lm(tiny_qwen3_config(31), seed=1)
    assert torch.equal(torch.rand(3), want)
    b = build_causal_lm(tiny_qwen3_config(31), seed=1)
    c = build_causal_lm(tiny_qwen3_config(31), seed=2)
    assert torch.equal(logits(a), logits(b))
    assert not torch.equal(logits(a), logits(c))


def test_an_absent_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no model folder"):
        load_causal_lm(tmp_path / "nothing")
    with pytest.raises(UserError, match="There is no tokenizer folder"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_damaged_weights_are_one_sentence(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_causal_lm(tmp_path)


def test_missing_weights_are_an_error_and_not_random_numbers(model: Any, tmp_path: Path) -> None:
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match="lacks 3 weights"):
        load_causal_lm(tmp_path)


def test_T8_a_tokenizer_never_truncates(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(4)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", model_max_length=4, truncation_side="left"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("a " * 50)) == 50


def test_all_linear_leaves_embeddings_and_head_alone(adapted: Any) -> None:
    names = set(adapter_state(adapted, "policy"))
    assert len(names) == 2 * 2 * 7
    assert not any("lm_head" in name or "embed" in name for name in names)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trainable) == len(names)


def test_excluded_modules_get_no_adapter(model: Any) -> None:
    model = add_lora(model, rank=2, alpha=2, name="policy", exclude=("down_proj",))
    assert not any("down_proj" in name for name in adapter_state(model, "policy"))


def test_B2_lora_on_the_output_head_is_refused(model: Any) -> None:
    with pytest.raises(UserError, match="lm_head"):
        add_lora(model, rank=2, alpha=2, target_modules=["q_proj", "lm_head"])


def test_an_adapter_without_any_module_is_refused(model: Any) -> None:
    with pytest.raises(UserError, match="could be placed"):
        add_lora(model, rank=2, alpha=2, target_modules=["no_such_layer"])


def test_L7_state_names_are_those_of_peft(adapted: Any) -> None:
    theirs = get_peft_model_state_dict(adapted, adapter_name="policy", save_embedding_layers=False)
    ours = adapter_state(adapted, "policy")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value.numpy())


def test_L6_a_state_is_owned_memory_with_a_checksum(adapted: Any) -> None:
    state = adapter_state(adapted, "policy")
    checksum = state_checksum(state)
    assert state_checksum(dict(reversed(state.items()))) == checksum
    randomise(adapted, "policy", 6)
    assert state_checksum(state) == checksum, "the state must not follow the live weights"
    assert state_checksum(adapter_state(adapted, "policy")) != checksum
    load_adapter_state(adapted, "policy", state)
    assert state_checksum(adapter_state(adapted, "policy")) == checksum
    assert all(array.flags.owndata and array.dtype == np.float32 for array in state.values())


def test_L12_a_state_that_matches_no_module_is_an_error(adapted: Any) -> None:
    state = adapter_state(adapted, "policy")
    bare = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    with pytest.raises(UserError, match="match none of the 28 modules"):
        load_adapter_state(adapted, "policy", bare)


def test_L7_differing_names_are_listed_and_nothing_is_written(adapted: Any) -> None:
    state = adapter_state(adapted, "policy")
    before = state_checksum(state)
    changed = {name: value * 2 for name, value in state.items()}
    gone = sorted(changed)[0]
    changed["base_model.model.other.lora_A.weight"] = changed.pop(gone)
    with pytest.raises(UserError, match=gone.replace(".", r"\.")):
        load_adapter_state(adapted, "policy", changed)
    assert state_checksum(adapter_state(adapted, "policy")) == before


def test_a_state_of_another_rank_is_refused(adapted: Any) -> None:
    state = adapter_state(adapted, "policy")
    name = next(iter(state))
    with pytest.raises(UserError, match="shape"):
        load_adapter_state(adapted, "policy", {**state, name: state[name][:1]})


def test_belief_models_are_chosen_by_name_and_the_policy_comes_back(model: Any) -> None:
    base = logits(model)
    model = add_lora(model, rank=2, alpha=4, name="policy")
    model = randomise(model, "policy", 5)
    policy = logits(model)
    model = add_lora(model, rank=2, alpha=4, name="ema", trainable=False)
    assert adapter_names(model) == ("policy", "ema")
    torch.testing.assert_close(logits(model), policy)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with use_adapter(model, None):
        torch.testing.assert_close(logits(model), base)
    with use_adapter(model, "ema"):
        torch.testing.assert_close(logits(model), base)
    copy_adapter(model, "policy", "ema")
    with use_adapter(model, "ema"):
        torch.testing.assert_close(logits(model), policy)
    with use_adapter(model, "policy"):
        torch.testing.assert_close(logits(model), policy)
    torch.testing.assert_close(logits(model), policy)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert not any(flag for name, flag in flags.items() if ".ema." in name)
    assert any(flag for name, flag in flags.items() if ".policy." in name)


def test_the_policy_comes_back_when_scoring_fails(adapted: Any) -> None:
    policy = logits(adapted)
    with pytest.raises(RuntimeError, match="boom"), use_adapter(adapted, None):
        raise RuntimeError("boom")
    torch.testing.assert_close(logits(adapted), policy)
    assert any(p.requires_grad for p in adapted.parameters())


def test_an_unknown_adapter_is_one_sentence(adapted: Any) -> None:
    with pytest.raises(UserError, match="no adapter 'ema'"), use_adapter(adapted, "ema"):
        pass
    with pytest.raises(UserError, match="no adapter 'ema'"):
        adapter_state(adapted, "ema")


def test_the_slow_adapter_moves_by_one_minus_beta(adapted: Any) -> None:
    adapted = add_lora(adapted, rank=2, alpha=4, name="ema", trainable=False, seed=9)
    a, b = adapter_state(adapted, "policy"), adapter_state(adapted, "ema")
    update_ema(adapted, "policy", "ema", beta=0.95)
    for name, value in adapter_state(adapted, "ema").items():
        np.testing.assert_allclose(value, 0.95 * b[name] + 0.05 * a[name], atol=1e-6)
