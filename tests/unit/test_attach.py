"""A trained adapter is put on a base model as the run that made it had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_fakes as fakes

from delta_belief_rl.config.compose import load_config, resolved_yaml
from delta_belief_rl.eval.attach import PEFT_CONFIG, PEFT_WEIGHTS, attach_adapter
from delta_belief_rl.models.loading import add_lora, load_causal_lm
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.actor import PolicyActor, dump_state
from delta_belief_rl.trainer.persist import ACTOR_FILE
from delta_belief_rl.types import UserError

ADAPTER = "[{name: actor_lora, r: 2, alpha: 4, target_modules: all-linear}]"
IDS = (1, 5, 9, 30, 2, 7)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("attach") / "model")


def logprobs(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    picked = torch.log_softmax(logits.float(), -1)[:-1].gather(-1, torch.tensor(IDS[1:])[:, None])
    return picked[:, 0].numpy()


def saved(actor: PolicyActor, root: Path, adapters: str = ADAPTER) -> Path:
    words = ["experiment=quickstart", f"actor_rollout_ref.model.adapters={adapters}"]
    config, _ = load_config(words)
    files = {ACTOR_FILE: dump_state(actor.state())}
    return checkpoint.save(root, 3, files, {"config": resolved_yaml(config)}, run_id="r")


def test_the_adapter_of_a_checkpoint_scores_as_the_policy_that_saved_it(
    base: Path, tmp_path: Path
) -> None:
    actor = fakes.stir(PolicyActor(fakes.settings_of(base)))
    model = attach_adapter(load_causal_lm(base), saved(actor, tmp_path))
    np.testing.assert_allclose(logprobs(model), actor.probe(IDS), atol=1e-5)
    assert not np.allclose(logprobs(load_causal_lm(base)), actor.probe(IDS), atol=1e-3)
    assert not model.training


def test_an_adapter_in_the_layout_of_peft_scores_as_the_model_that_saved_it(
    base: Path, tmp_path: Path
) -> None:
    trained = add_lora(load_causal_lm(base), 2, 4, name="default")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    trained.save_pretrained(tmp_path)
    assert {PEFT_CONFIG, PEFT_WEIGHTS} <= {path.name for path in tmp_path.iterdir()}
    model = attach_adapter(load_causal_lm(base), tmp_path)
    np.testing.assert_allclose(logprobs(model), logprobs(trained), atol=1e-5)
    assert not np.allclose(logprobs(model), logprobs(load_causal_lm(base)), atol=1e-3)


def test_what_is_no_adapter_of_this_model_is_one_sentence(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no adapter"):
        attach_adapter(load_causal_lm(base), tmp_path)
    actor = PolicyActor(fakes.settings_of(base))
    wrong = saved(actor, tmp_path / "a", ADAPTER.replace("r: 2", "r: 8"))
    with pytest.raises(UserError, match="shape"):
        attach_adapter(load_causal_lm(base), wrong)
    (wrong / ACTOR_FILE).write_bytes(b"torn")
    with pytest.raises(UserError, match="no complete checkpoint"):
        attach_adapter(load_causal_lm(base), wrong)
    (tmp_path / PEFT_CONFIG).write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(UserError, match="cannot be read"):
        attach_adapter(load_causal_lm(base), tmp_path)
    add_lora(load_causal_lm(base), 2, 4, name="default").save_pretrained(tmp_path)
    text = (tmp_path / PEFT_CONFIG).read_text()
    (tmp_path / PEFT_CONFIG).write_text(text.replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(UserError, match="use_dora"):
        attach_adapter(load_causal_lm(base), tmp_path)
