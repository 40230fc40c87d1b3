"""``delta-belief eval``: which runs a command line stands for, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_fakes as fakes

from delta_belief_rl.cli.eval_players import contestants
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import group_options, load_config, resolved_yaml
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.eval.benchmarks import BENCHMARKS
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.actor import PolicyActor, dump_state
from delta_belief_rl.trainer.persist import ACTOR_FILE
from delta_belief_rl.trainer.start_point import write_start
from delta_belief_rl.types import UserError

AGENT = "delta_belief_rl/assets/agent"


def planned(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> list[dict[str, Any]]:
    """The cells of a dry run."""
    assert cli(["eval", *words, "--out", str(out), "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def configured(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> RunConfig:
    """The configuration of the only cell."""
    (found,) = planned(capsys, out, "everyday", "--model", AGENT, *words)
    return load_config(found["settings"])[0]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("eval") / "model")


def trained(base: Path, root: Path) -> Path:
    """The checkpoint of step 3 of a run with an adapter that answers differently."""
    actor = fakes.stir(PolicyActor(fakes.settings_of(base)))
    adapter = "[{name: actor_lora, r: 2, alpha: 4, target_modules: all-linear}]"
    words = [f"actor_rollout_ref.model.adapters={adapter}", "actor_rollout_ref.model.lora_rank=2"]
    words.append(f"actor_rollout_ref.model.path={base}")
    config, _ = load_config(["experiment=quickstart", *words])
    files = {ACTOR_FILE: dump_state(actor.state())}
    return checkpoint.save(root, 3, files, {"config": resolved_yaml(config)}, run_id="r")


# --- cells --------------------------------------------------------------------------------------


def test_every_benchmark_and_player_is_a_cell_of_its_own_that_only_plays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, base: Path
) -> None:
    models = ("--model", AGENT, "--model", str(base))
    found = planned(capsys, tmp_path, "everyday", *models)
    assert [cell["folder"] for cell in found] == [
        f"{tmp_path}/everyday/{name}" for name in ("agent", "model")
    ]
    for cell in found:
        config, _ = load_config(cell["settings"])
        assert config.trainer.output_dir == cell["folder"]
        assert config.trainer.val_only
        assert config.trainer.resume_mode == "auto"
        assert unavailable(config) == []
        assert not cell["complete"]


def test_options_are_settings_and_settings_of_the_command_line_win(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = configured(capsys, tmp_path)
    options = ("--samples", "128", "--temperature", "0.4", "--beliefs", "--limit", "5")
    config = configured(capsys, tmp_path, *options, "--judge", "world", "seed=9")
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    assert (config.multi_turn.val.n, sampling.temperature, sampling.do_sample) == (128, 0.4, True)
    assert config.multi_turn.logprob_reward.enabled
    assert not plain.multi_turn.logprob_reward.enabled
    assert (config.data.sample_count.val, config.seed) == (5, 9)
    greedy = configured(capsys, tmp_path, "--temperature", "0").actor_rollout_ref.rollout
    assert not greedy.val_kwargs.do_sample
    last = configured(capsys, tmp_path, "--samples", "2", "multi_turn.val.n=3")
    assert last.multi_turn.val.n == 3


def test_more_turns_get_more_room_unless_the_command_line_says_how_much(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = configured(capsys, tmp_path)
    turns, room = plain.multi_turn.max_turns.val, plain.data.max_prompt_length
    long = configured(capsys, tmp_path, "--turns", str(2 * turns))
    assert long.multi_turn.max_turns.val == 2 * turns
    assert long.data.max_prompt_length == 2 * room
    fixed = configured(capsys, tmp_path, "--turns", "50", "data.max_prompt_length=777")
    assert fixed.data.max_prompt_length == 777
    short = configured(capsys, tmp_path, "--turns", "3")
    assert (short.multi_turn.max_turns.val, short.data.max_prompt_length) == (3, room)


def test_the_best_of_several_questions_is_played_without_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = configured(capsys, tmp_path, "--best-of", "8")
    assert config.multi_turn.logprob_sampling.enabled
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.multi_turn.logprob_sampling.p_best == 1.0
    assert unavailable(config) == []


def test_the_list_names_every_benchmark_what_it_needs_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli(["eval", "--list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == BENCHMARKS.keys()
    assert rows["everyday"]["missing"] == []
    assert rows["murder_mystery"]["needs"][1:] == ["judge qwen/qwen3-235b-a22b-2507", "1 GPUs"]
    assert rows["twenty_questions"]["published"]["games"] == 8
    assert rows["twenty_questions"]["games"] == 8
    assert cli(["eval", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: {BENCHMARKS[name].about}" in text for name in BENCHMARKS)


def test_a_benchmark_is_an_experiment_that_exists() -> None:
    experiments = group_options()["experiment"]
    assert {one.experiment for one in BENCHMARKS.values()} <= set(experiments)
    assert {name for name in experiments if name.startswith("eval_")} == {
        one.experiment for one in BENCHMARKS.values()
    }


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["evryday", "--model", AGENT], "did you mean everyday?"),
        (["everyday"], "Nobody plays: name a --model"),
        (["everyday", "--model", "/no/such"], "/no/such"),
        (["everyday", "--adapter", "x"], "--adapter needs the model"),
        (["everyday", "--model", AGENT, "--model", AGENT], "named twice"),
        (["everyday", "--model", AGENT, "--best-of", "1"], "--best-of needs at least 2"),
        (["everyday", "--model", AGENT, "--turns", "0"], "at least one turn"),
        (["everyday", "--model", AGENT, "--temperature", "-1"], "must not be negative"),
        (["everyday", "--model", AGENT, "--judge", "no"], "judge=no does not exist"),
        (
            ["everyday", "--model", AGENT, "trainer.val_only=false", "multi_turn.train.n=2"],
            "trains",
        ),
        (["everyday", "--model", AGENT, "multi_turn.val.m=3"], "did you mean multi_turn.val.n?"),
        (["everyday", "--model", AGENT, "trainer.output_dir=x"], "leave trainer.output_dir out"),
        (["--out", "/no/such/folder"], "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(capsys, *words)


def test_a_cell_that_cannot_be_played_is_named_before_any_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("everyday,guess_my_city_packaged", "--model", AGENT, "--out", str(tmp_path / "out"))
    said = refused(capsys, *words, "data.world=everyday")
    assert said.startswith("delta-belief eval: guess_my_city_packaged, agent: data.world")
    assert not (tmp_path / "out").exists()


# --- players ------------------------------------------------------------------------------------


def test_names_of_players_have_as_much_of_their_paths_as_tells_them_apart() -> None:
    def names(*models: str) -> list[str]:
        return [one.player.name for one in contestants(models, (), (), ())]

    assert names("org/CIA-4B", "x/y/agent") == ["CIA-4B", "agent"]
    assert names("a/model", "b/model") == ["a-model", "b-model"]
    assert names("../..") == ["model"]
    assert names("/models/my model") == ["my_model"]
    apis = contestants((), (), (), ("vendor/big:free",))
    assert apis[0].player.name == "big_free"
    assert apis[0].player.api
    assert "actor_rollout_ref.ngpus=0" in apis[0].settings


def test_a_checkpoint_plays_with_the_model_and_the_adapter_of_its_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(base, tmp_path / "mine" / "checkpoints")
    (one,) = contestants((), (), (folder,), ())
    assert (one.player.name, one.player.model) == ("mine-global_step_3", str(base))
    assert (one.player.step, one.player.adapter) == (3, str(folder))
    assert one.weights is not None
    assert one.player.checksum == state_checksum(one.weights)
    (cell,) = planned(capsys, tmp_path, "everyday", "--checkpoint", str(folder))
    model = load_config(cell["settings"])[0].actor_rollout_ref.model
    assert (model.path, model.lora_rank) == (str(base), 2)
    assert (model.adapters[0].r, model.adapters[0].alpha) == (2, 4)
    # The base model may have moved.
    (moved,) = contestants((AGENT,), (folder,), (), ())
    assert moved.player.model == AGENT
    with pytest.raises(UserError, match="name one --model"):
        contestants((AGENT, str(base)), (folder,), (), ())


def test_F4_the_start_of_a_cell_is_a_checkpoint_that_the_trainer_loads(
    base: Path, tmp_path: Path
) -> None:
    (one,) = contestants((), (), (trained(base, tmp_path / "mine"),), ())
    assert one.weights is not None
    words = [f"trainer.output_dir={tmp_path}/cell", "trainer.val_only=true", *one.settings]
    cfg, _ = load_config(["experiment=eval_everyday", *words])
    assert write_start(cfg, one.weights, one.player.step) == one.player.checksum
    saved = checkpoint.find_latest(tmp_path / "cell" / "checkpoints")
    assert saved is not None
    state = checkpoint.load(saved.path).read(ACTOR_FILE)
    from delta_belief_rl.trainer.actor import parse_state

    actor = PolicyActor(fakes.settings_of(base))
    fresh = actor.snapshot().checksum
    actor.load_state(parse_state(state))
    assert actor.snapshot().checksum == one.player.checksum != fresh
    assert actor.version == saved.step == 3
    # A second start of the same cell finds it, and it stays the run's.
    write_start(cfg, one.weights, one.player.step)
    again = checkpoint.find_latest(tmp_path / "cell" / "checkpoints")
    assert again is not None
    assert (again.run_id, again.serial) == (saved.run_id, saved.serial)
