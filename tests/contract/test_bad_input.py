"""Bad input ends a run in one sentence with status 2, before Ray, and leaves files as they were."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml

import train
from delta_belief_rl.cluster import app
from delta_belief_rl.config import availability
from delta_belief_rl.config.availability import GAPS, unavailable
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import problems
from delta_belief_rl.config.schema import RunConfig, lookup
from delta_belief_rl.trainer import checkpoint
from tests.runs import ROOT, words, write_world

AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"


@dataclass
class Refusal:
    """What a refused start left on the screen."""

    sentence: str


@pytest.fixture(scope="module")
def good_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "good.yaml")


@pytest.fixture
def world(tmp_path: Path, good_world: Path) -> Path:
    return Path(shutil.copy(good_world, tmp_path / "world.yaml"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A start that gets as far as Ray has missed its mistake."""

    def reached(*_args: Any) -> None:
        raise AssertionError("Ray was about to start")

    monkeypatch.setattr(app, "ray_session", reached)
    monkeypatch.setattr(app, "exit_on_sigterm", lambda: None)
    yield
    assert not ray.is_initialized()


@pytest.fixture
def refuse(out: Path, world: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Refusal]:
    """Start a run that has to be refused."""

    def start(*more: str, base: list[str] | None = None) -> Refusal:
        before = contents(out)
        capfd.readouterr()
        status = train.main([*(words(out, world) if base is None else base), *more])
        shown = capfd.readouterr()
        assert status == 2
        assert shown.out == ""
        lines = shown.err.splitlines()
        assert len(lines) == 1, shown.err
        assert lines[0].startswith("train.py: ")
        assert contents(out) == before
        return Refusal(lines[0])

    return start


Refuse = Callable[..., Refusal]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    if not folder.exists():
        return {}
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("trainer.sav_freq=1", "There is no setting trainer.sav_freq; did you mean trainer.save_"),
        ("actor_rollout_ref.lora_rank=4", "did you mean actor_rollout_ref.model.lora_rank?"),
        ("no_such_setting_at_all=1", "There is no setting no_such_setting_at_all"),
        ("trainer.save_freq=often", "trainer.save_freq must be a whole number, not 'often'"),
        ("experiment=quickstrat", "did you mean quickstart?"),
        ("algorithm.adv_estimator=grpo_trun", "did you mean grpo_turn?"),
        ("trainer.save_freq=[1", "is not of the form key=value"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "cannot be divided into optimizer steps"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "exceeds data.train_batch_size=4"),
        ("data.train_batch_size=400", "cannot be divided"),
        ("data.sample_count.train=2", "exceeds the 2 training tasks"),
        ("multi_turn.train.n=1", "multi_turn.train.n must be at least 2"),
        ("data.max_response_length=0", "must be at least 1, not 0"),
        ("actor_rollout_ref.rollout.name=vllm", "rollout.name=vllm needs a GPU"),
        ("judge_rollout.name=vllm", "judge_rollout.model.path is not set"),
        ("actor_rollout_ref.ngpus=2", "device=cpu uses no GPU"),
        ("trainer.resume_mode=sometimes", "trainer.resume_mode must be one of"),
    ],
)
def test_U1_U2_a_setting_that_cannot_work_is_named_with_its_cure(
    more: str, part: str, refuse: Refuse
) -> None:
    # A batch that no divisor fits is told before one that the data cannot fill.
    extra = ["actor_rollout_ref.actor.ppo_mini_batch_size=3"] if more.endswith("=400") else []
    assert part in refuse(more, *extra).sentence


def test_a_device_that_the_machine_lacks_is_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_belief_rl.config.facts.available_gpus", lambda: 0)
    sentence = refuse("actor_rollout_ref.device=cuda", "actor_rollout_ref.ngpus=1").sentence
    assert "needs 1 GPUs and 0 are visible here" in sentence


# --- settings that nothing answers to yet -------------------------------------------------------

ASKING: dict[str, list[str]] = {
    "plugins": ["plugins=[my_plugin]"],
    "multi_turn.logprob_sampling.enabled": [
        "multi_turn.logprob_sampling.enabled=true",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.device=auto",
        "actor_rollout_ref.ngpus=1",
        "actor_rollout_ref.rollout.name=vllm",
    ],
    "actor_rollout_ref.rollout.deterministic": [
        "actor_rollout_ref.device=auto",
        "actor_rollout_ref.ngpus=1",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.deterministic=true",
    ],
    "actor_rollout_ref.rollout.tensor_model_parallel_size": [
        "actor_rollout_ref.device=auto",
        "actor_rollout_ref.ngpus=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
    "judge_rollout.name": ["judge_rollout.name=fake"],
    "actor_rollout_ref.model.lora_rank": [
        "actor_rollout_ref.model.lora_rank=0",
        "actor_rollout_ref.model.adapters=[]",
    ],
    "actor_rollout_ref.model.adapters": [
        "actor_rollout_ref.model.adapters=[{name: a, r: 4, alpha: 4}, {name: b, r: 4, alpha: 4}]"
    ],
    "actor_rollout_ref.model.trust_remote_code": ["actor_rollout_ref.model.trust_remote_code=true"],
    "actor_rollout_ref.actor.fsdp_config.param_offload": [
        "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    ],
    "trainer.max_staleness": [
        "trainer.max_staleness=1",
        "actor_rollout_ref.actor.tis_imp_ratio_cap=2.0",
    ],
    "trainer.log_val_generations": ["trainer.log_val_generations=8"],
}
"""For each gap a valid configuration that falls into it; FILE stands for a data file."""


def test_U2_every_gap_has_a_case_here() -> None:
    assert {gap.setting for gap in GAPS} <= ASKING.keys()


@pytest.mark.parametrize("setting", [gap.setting for gap in GAPS])
def test_U2_a_valid_setting_that_nothing_answers_to_is_refused_but_planned(
    setting: str,
    refuse: Refuse,
    out: Path,
    world: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delta_belief_rl.config.facts.available_gpus", lambda: 8)
    file = parquet(tmp_path / "rows.parquet", [row(i) for i in range(4)])
    more = [text.replace("FILE", file) for text in ASKING[setting]]
    config = load_config([*words(out, world), *more])[0]
    assert list(problems(config)) == []
    assert any(s.startswith(f"{setting}=") for s in unavailable(config))
    others = [gap for gap in GAPS if gap.setting != setting]
    # Alone, so that this gap is the one that is named.
    monkeypatch.setattr(availability, "GAPS", tuple(g for g in GAPS if g not in others))
    sentence = refuse(*more).sentence
    assert f"{setting}=" in sentence
    assert "is not available yet: " in sentence
    assert train.main(["--dry-run", *words(out, world), *more]) == 0
    shown = capfd.readouterr().out
    assert "One training step" in shown or "Evaluation only" in shown
    assert f"not runnable here: {setting}=" in shown


def test_U2_the_quick_start_asks_for_nothing_that_is_missing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert train.main(["--dry-run", "experiment=quickstart"]) == 0
    assert "not runnable here" not in capfd.readouterr().out


def test_U2_every_gap_names_a_setting() -> None:
    for gap in GAPS:
        lookup(RunConfig(), gap.setting)
        assert gap.cure
        assert not gap.cure.endswith(".")


# --- data ---------------------------------------------------------------------------------------


def row(index: int, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "data_source": "tw_q",
        "id": f"train_{index}",
        "golden_answers": "cat",
        "system_prompt": {"content": "You ask.", "role": "system"},
        "prompt": [{"content": "Begin.", "role": "user"}],
    }
    return base | changes


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def from_files(out: Path, train_file: str, val_file: str) -> list[str]:
    """A run on parquet files; its judge is a model."""
    return [
        *words(out, Path("everyday")),
        "data.world=null",
        f"data.train_files=[{train_file}]",
        f"data.val_files=[{val_file}]",
        "trainer.final_test=false",
        "judge_rollout.name=api",
        "judge_rollout.model.api_model_name=m",
    ]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (None, "none.parquet does not exist"),
        (b"this is no parquet", "is not a parquet file"),
        ([{k: v for k, v in row(i).items() if k != "id"} for i in range(4)], "has no column 'id'"),
        ([row(0), row(1), row(2, golden_answers=""), row(3)], "Row 2 of"),
        ([row(0), row(1), row(2), row(3, prompt=[])], "Row 3 of"),
        ([row(0), row(0), row(1), row(2)], "'train_0' occurs twice"),
        ([row(i, golden_answers="日本") for i in range(4)], "cannot express the secret '日本'"),
    ],
)
def test_a_bad_data_file_is_named_with_what_is_wrong(
    rows: list[dict[str, Any]] | bytes | None,
    part: str,
    out: Path,
    tmp_path: Path,
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the files hold is checked whichever judges there are, and before any is asked.
    monkeypatch.setattr(availability, "GAPS", ())
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    good = parquet(tmp_path / "good.parquet", [row(i, id=f"val_{i}") for i in range(4)])
    bad = tmp_path / ("none.parquet" if rows is None else "bad.parquet")
    if isinstance(rows, bytes):
        bad.write_bytes(rows)
    elif rows is not None:
        parquet(bad, rows)
    sentence = refuse(base=from_files(out, str(bad), good)).sentence
    assert part in sentence
    assert str(bad) in sentence or rows not in (None, b"this is no parquet")


def change(world: Path, **sections: Any) -> None:
    """Overwrite parts of a world file."""
    document = yaml.load(world.read_text(encoding="utf-8"), yaml.BaseLoader)
    for name, entries in sections.items():
        document[name] |= entries
    world.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")


def test_a_world_that_is_absent_is_refused(refuse: Refuse, world: Path) -> None:
    world.unlink()
    assert "check the path" in refuse().sentence
    assert "no packaged world is called 'evryday'" in refuse("data.world=evryday").sentence


def test_a_world_that_is_no_yaml_is_refused(refuse: Refuse, world: Path) -> None:
    world.write_text("things: [a, b\nname: x", encoding="utf-8")
    assert "is not valid YAML near line" in refuse().sentence


def test_a_thing_that_is_given_twice_is_refused(refuse: Refuse, world: Path) -> None:
    text = world.read_text(encoding="utf-8")
    name = next(iter(yaml.load(text, yaml.BaseLoader)["things"]))
    entry = f"things:\n  {name}: {{in: x}}\n"
    world.write_text(text.replace("things:\n", entry, 1), encoding="utf-8")
    assert f"'{name}' is given twice" in refuse().sentence


def test_two_things_that_no_property_tells_apart_are_refused(refuse: Refuse, world: Path) -> None:
    things = yaml.load(world.read_text(encoding="utf-8"), yaml.BaseLoader)["things"]
    name = next(iter(things))
    change(world, things={"double": {k: v for k, v in things[name].items() if k != "aliases"}})
    sentence = refuse().sentence
    assert "no property tells" in sentence
    assert "'double'" in sentence


@pytest.mark.parametrize(
    ("things", "part"),
    [
        ({"gadget": {"in": "no_such_category"}}, "has the unknown category 'no_such_category'"),
        ({"gadget": "yes"}, "thing 'gadget' is not a mapping"),
        ({"gadget": {"yes": ["can_sing_opera"]}}, "the unknown property 'can_sing_opera'"),
    ],
)
def test_a_wrong_value_in_a_world_is_refused(
    things: dict[str, Any], part: str, refuse: Refuse, world: Path
) -> None:
    known = yaml.load(world.read_text(encoding="utf-8"), yaml.BaseLoader)["categories"]
    for entry in things.values():
        if isinstance(entry, dict):
            entry.setdefault("in", next(iter(known)))
    change(world, things=things)
    assert part in refuse().sentence


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_secret_that_the_tokenizer_cannot_encode_is_refused_in_every_split(
    split: str, refuse: Refuse, world: Path
) -> None:
    things = yaml.load(world.read_text(encoding="utf-8"), yaml.BaseLoader)["things"]
    properties = yaml.load(world.read_text(encoding="utf-8"), yaml.BaseLoader)["properties"]
    twin = dict(next(iter(things.values())))
    twin.pop("aliases", None)
    flipped = next(key for key in properties if key not in twin.get("yes", []))
    twin["no"] = [key for key in twin.get("no", []) if key != flipped]
    for side in ("yes", "no"):
        variant = {**twin, side: [*twin.get(side, []), flipped]}
        change(world, things={"日本": variant})
        if split != "train":
            change(world, splits={split: ["日本"]})
        sentence = refuse().sentence
        if "no property tells" not in sentence:
            break
    assert "cannot express the secret '日本'" in sentence


# --- the run's folder and its checkpoints -------------------------------------------------------


def leave_run(out: Path, run_id: str = "first", steps: int = 2) -> None:
    """What a run leaves: a record, checkpoints, its settings."""
    out.mkdir(parents=True)
    record = f'{{"step": 1, "run_id": "{run_id}"}}\n'
    (out / "metrics.jsonl").write_text(record, encoding="utf-8")
    (out / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    root = out / "checkpoints"
    for step in range(1, steps + 1):
        files = {"actor/state.pt": b"weights" * 100, "credit.json": b"{}"}
        checkpoint.save(root, step, files, {"state": {}, "config": "seed: 1"}, run_id=run_id)
    (root / "run_id").write_text(run_id, encoding="utf-8")


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_R9_a_folder_that_holds_a_run_is_not_started_over(refuse: Refuse, out: Path) -> None:
    leave_run(out)
    sentence = refuse("trainer.resume_mode=disable").sentence
    assert "already holds run first; set trainer.resume_mode=auto" in sentence


@pytest.mark.parametrize("mode", ["disable", "auto"])
def test_R9_a_record_of_another_run_is_not_written_over(
    mode: str, refuse: Refuse, out: Path, tmp_path: Path
) -> None:
    leave_run(out)
    elsewhere = tmp_path / "elsewhere"
    sentence = refuse(
        f"trainer.resume_mode={mode}", f"trainer.default_local_dir={elsewhere}"
    ).sentence
    assert "already holds run first" in sentence
    assert not elsewhere.exists()


def test_R9_checkpoints_of_another_run_are_not_resumed(refuse: Refuse, out: Path) -> None:
    leave_run(out)
    (out / "checkpoints" / "run_id").write_text("second", encoding="utf-8")
    assert "was written by run first" in refuse("trainer.resume_mode=auto").sentence


def test_R13_must_without_a_checkpoint_is_refused(refuse: Refuse, out: Path) -> None:
    assert "has no valid checkpoint" in refuse("trainer.resume_mode=must").sentence
    (out / "checkpoints" / "global_step_3").mkdir(parents=True)
    assert "has no valid checkpoint" in refuse("trainer.resume_mode=must").sentence


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("RUN/checkpoints/global_step_9", "is no complete checkpoint"),
        ("RUN/checkpoints", "must name a folder global_step_N"),
        (None, "needs trainer.resume_from_path"),
    ],
)
def test_R6_a_checkpoint_that_is_absent_is_not_resumed(
    path: str | None, part: str, refuse: Refuse, out: Path
) -> None:
    leave_run(out)
    more = [] if path is None else [f"trainer.resume_from_path={path.replace('RUN', str(out))}"]
    assert part in refuse("trainer.resume_mode=resume_path", *more).sentence


@pytest.mark.parametrize("mode", ["auto", "must", "resume_path"])
def test_R11_one_flipped_bit_in_a_checkpoint_is_found(mode: str, refuse: Refuse, out: Path) -> None:
    leave_run(out)
    if mode != "resume_path":  # these would go on from an intact one
        flip_bit(out / "checkpoints" / "global_step_1" / "actor" / "state.pt")
    folder = out / "checkpoints" / "global_step_2"
    flip_bit(folder / "actor" / "state.pt")
    more = [f"trainer.resume_from_path={folder}"] if mode == "resume_path" else []
    sentence = refuse(f"trainer.resume_mode={mode}", *more).sentence
    assert "actor/state.pt does not match its checksum" in sentence
    assert folder.is_dir()


def test_a_final_test_without_the_games_of_the_first_policy_is_refused(
    refuse: Refuse, out: Path
) -> None:
    leave_run(out)
    sentence = refuse("trainer.resume_mode=auto").sentence
    assert "start-train.jsonl does not exist: set trainer.final_test=false" in sentence


# --- the model ----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(AGENT, tmp_path / "agent"))


def shorten(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def garble(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00" * 64)


def no_tokenizer(model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (shutil.rmtree, "agent does not exist"),
        (shorten, "cannot be read"),
        (garble, "cannot be read"),
        (lambda model: (model / "model.safetensors").unlink(), "holds no weights"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "model-2.safetensors"}}'
            ),
            "model-2.safetensors' cannot be read",
        ),
        (
            lambda model: (model / "model.safetensors.index.json").write_text("{}"),
            "is not the index of a model",
        ),
        (lambda model: (model / "config.json").write_text("{"), "is not valid JSON"),
        (no_tokenizer, "tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer"),
    ],
)
def test_a_model_that_is_absent_or_damaged_is_refused(
    damage: Callable[[Path], object], part: str, model: Path, refuse: Refuse
) -> None:
    damage(model)
    assert part in refuse(f"actor_rollout_ref.model.path={model}").sentence


# --- as a process -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["setting", "world", "folder"])
def test_the_process_itself_ends_with_status_two_and_one_sentence(
    case: str, out: Path, world: Path
) -> None:
    more = []
    if case == "setting":
        more = ["trainer.sav_freq=1"]
    elif case == "world":
        change(world, things={"日本": {"in": "no_such_category"}})
    else:
        leave_run(out)
        more = ["trainer.resume_mode=disable"]
    before = contents(out)
    done = subprocess.run(
        [sys.executable, "train.py", *words(out, world, *more)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert contents(out) == before
