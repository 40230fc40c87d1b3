"""Tasks from the embedded world and from parquet files of the published schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer.tasks import load_tasks, read_parquet
from delta_belief_rl.types import Message, UserError
from tests.runs import ROOT, write_world

DATA = ROOT.parent / "shared" / "data" / "envs"
PUBLISHED = {
    "twenty_questions/train_rl": ("tw_q", 1000, True),
    "twenty_questions/val": ("tw_q", 198, True),
    "twenty_questions/test": ("tw_q", 433, True),
    "guess_my_city/test": ("guess_my_city", 185, False),
    "murder_mystery/test": ("murder_mystery", 50, False),
    "customer_service/test": ("customer_service", 200, False),
}
"""File to its source, its rows, and whether it has a system message."""


def row(index: int, secret: str = "cat", split: str = "train", **changes: Any) -> dict[str, Any]:
    """One row as the published files have it."""
    base: dict[str, Any] = {
        "data_source": "tw_q",
        "id": f"{split}_{index}",
        "golden_answers": secret,
        "system_prompt": {"content": "You ask.", "role": "system"},
        "prompt": [{"content": "Begin.", "role": "user"}],
        "ability": "reasoning",
        "reward_model": {"ground_truth": {"target": [secret]}, "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }
    return base | changes


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def read(path: str, system_key: str | None = "system_prompt") -> list[Any]:
    return read_parquet(path, "prompt", system_key)


def config(*words: str) -> RunConfig:
    return load_config(["experiment=paper_qwen1.7b", *words])[0]


def files(folder: Path, **counts: int) -> list[str]:
    """Settings that name one file a split, with so many rows."""
    words = []
    for split, count in counts.items():
        rows = [row(i, f"{split} thing {i}", split) for i in range(count)]
        words.append(f"data.{split}_files=[{write(folder / f'{split}.parquet', rows)}]")
    return words


def test_a_row_becomes_a_task_with_the_system_message_first(tmp_path: Path) -> None:
    task = read(write(tmp_path / "t.parquet", [row(17, "e-mail")]))[0]
    assert (task.id, task.source, task.split) == ("train_17", "tw_q", "train")
    assert task.secret == "e-mail"
    assert task.messages == (Message("system", "You ask."), Message("user", "Begin."))
    assert task.scenario is None


def test_only_the_columns_that_are_asked_for_are_needed(tmp_path: Path) -> None:
    full = row(0, "München, Germany", data_source="guess_my_city")
    few = {name: full[name] for name in ("data_source", "id", "golden_answers", "prompt")}
    task = read(write(tmp_path / "t.parquet", [few]), None)[0]
    assert task.messages == (Message("user", "Begin."),)
    assert task.secret == "München, Germany"


def test_the_scenario_of_a_row_reaches_the_judge_side_only(tmp_path: Path) -> None:
    extra = {"index": 0, "split": "test", "scenario": "The fridge hums."}
    task = read(write(tmp_path / "t.parquet", [row(0, extra_info=extra)]))[0]
    assert task.scenario == "The fridge hums."
    assert task.split == "test"
    assert "fridge" not in " ".join(message.content for message in task.messages)


def test_rows_keep_their_order_over_several_messages(tmp_path: Path) -> None:
    prompt = [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}]
    tasks = read(write(tmp_path / "t.parquet", [row(i, f"s{i}", prompt=prompt) for i in range(9)]))
    assert [task.secret for task in tasks] == [f"s{i}" for i in range(9)]
    assert [m.role for m in tasks[0].messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"golden_answers": " "}, "Row 1 of"),
        ({"golden_answers": None}, "has no golden answer"),
        ({"prompt": []}, "has no messages in 'prompt'"),
        ({"prompt": None}, "has no messages in 'prompt'"),
        ({"prompt": [{"content": None, "role": "user"}]}, "has a message without role and content"),
        ({"system_prompt": None}, "has a message without role and content"),
        ({"id": None}, "has an id or a data_source that is not text"),
    ],
)
def test_a_bad_row_is_named_by_its_number(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.parquet", [row(0), row(1, **changes), row(2)])
    with pytest.raises(UserError, match="Row 1 of") as caught:
        read(path)
    assert part in str(caught.value)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row(0).items() if k != "prompt"}]
    with pytest.raises(UserError, match=r"no column 'prompt' \(it has data_source, id"):
        read(write(tmp_path / "t.parquet", rows))


def test_a_file_that_is_absent_or_damaged_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(str(tmp_path / "none.parquet"))
    path = Path(write(tmp_path / "t.parquet", [row(i, f"secret {i}") for i in range(500)]))
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], whole[:200] + whole[900:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="not a readable parquet file"):
            read(str(path))


def test_an_id_that_occurs_twice_in_a_set_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", [row(0), row(1)])
    words = [f"data.train_files=[{one},{one}]", *files(tmp_path, val=1)]
    with pytest.raises(UserError, match="'train_0' occurs twice in the training data"):
        load_tasks(config(*words))


def test_several_files_are_one_set_in_their_order(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", [row(0, "x")])
    two = write(tmp_path / "b.parquet", [row(1, "y")])
    tasks = load_tasks(config(f"data.train_files=[{two},{one}]", *files(tmp_path, val=1)))
    assert [task.secret for task in tasks.train] == ["y", "x"]
    assert tasks.train_secrets() == {"x", "y"}


def test_a_task_is_of_the_split_that_its_file_is_read_for(tmp_path: Path) -> None:
    # Rows that say nothing, and rows that say something else.
    silent = [row(i, f"thing {i}", extra_info={"index": i}) for i in range(2)]
    other = [row(i, f"other {i}", "test") for i in range(2, 4)]
    train, val = write(tmp_path / "a.parquet", other), write(tmp_path / "b.parquet", silent)
    words = [f"data.train_files=[{train}]", f"data.val_files=[{val}]"]
    for more in ([], ["trainer.val_only=true"]):
        sets = load_tasks(config(*words, *more))
        assert {task.split for task in sets.train} == {"train"}
        assert {task.split for task in sets.val} == {"val"}


def test_sample_count_takes_the_first_rows_of_a_fixed_shuffle(tmp_path: Path) -> None:
    words = files(tmp_path, train=20, val=20)
    every = load_tasks(config(*words))
    assert [task.id for task in every.train] == [f"train_{i}" for i in range(20)]
    few = load_tasks(config(*words, "data.sample_count.train=5", "seed=7"))
    more = load_tasks(config(*words, "data.sample_count.train=9"))
    assert len(few.train) == 5
    assert [task.id for task in few.train] == [task.id for task in more.train[:5]]
    assert [task.id for task in few.train] != [f"train_{i}" for i in range(5)]
    assert len(few.val) == 20


@pytest.mark.parametrize(
    ("counts", "words", "part"),
    [
        ({"train": 0, "val": 1}, [], "There is no training task"),
        ({"train": 1, "val": 0}, [], "There is no validation task"),
        ({"train": 1, "val": 0}, ["trainer.test_freq=-1"], "There is no validation task"),
        ({"train": 1, "val": 1, "test": 0}, ["trainer.final_test=true"], "There is no test task"),
    ],
)
def test_a_set_that_is_needed_and_empty_is_refused(
    counts: dict[str, int], words: list[str], part: str, tmp_path: Path
) -> None:
    made = files(tmp_path, **counts)
    for split, count in counts.items():
        if not count:
            table = pa.Table.from_pylist([row(0)]).slice(0, 0)
            pq.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(UserError, match=part):
        load_tasks(config(*made, *words))


def test_an_evaluation_needs_no_training_file_but_compares_with_one_that_is_there(
    tmp_path: Path,
) -> None:
    words = [*files(tmp_path, val=2), "trainer.val_only=true"]
    alone = load_tasks(config(*words, f"data.train_files=[{tmp_path}/none.parquet]"))
    assert (len(alone.train), len(alone.val)) == (0, 2)
    assert len(load_tasks(config(*words, *files(tmp_path, train=3))).train) == 3


def test_a_test_file_is_read_for_a_final_test_only(tmp_path: Path) -> None:
    words = files(tmp_path, train=2, val=2)
    absent = f"data.test_files=[{tmp_path}/none.parquet]"
    assert load_tasks(config(*words, absent)).test == ()
    with pytest.raises(UserError, match=r"none\.parquet' does not exist"):
        load_tasks(config(*words, absent, "trainer.final_test=true"))


def source_file(folder: Path, source: str) -> str:
    return write(folder / f"{source}.parquet", [row(0, "x", data_source=source)])


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("guess_my_city", "set multi_turn.env=guess_my_city, or name another file"),
        ("chess", "correct its data_source, or name another file"),
    ],
)
def test_tasks_of_another_environment_are_refused(source: str, part: str, tmp_path: Path) -> None:
    wrong = source_file(tmp_path, source)
    for split, other in (("train", "val"), ("val", "train")):
        words = [*files(tmp_path, **{other: 1}), f"data.{split}_files=[{wrong}]"]
        with pytest.raises(UserError, match="env=twenty_questions does not play") as caught:
            load_tasks(config(*words))
        assert part in str(caught.value)
        assert repr(wrong) in str(caught.value)


def test_a_plug_in_environment_plays_any_source(tmp_path: Path) -> None:
    words = [f"data.{split}_files=[{source_file(tmp_path, 'chess')}]" for split in ("train", "val")]
    plugin = tmp_path / "own_chess.py"
    plugin.write_text(
        "from delta_belief_rl.envs.plugin import EnvPlugin\n"
        "ENVIRONMENTS = {'chess': EnvPlugin(make=lambda options: None)}\n"
    )
    words += [f"plugins=[{plugin}]", "multi_turn.env=chess", "judge=rules"]
    tasks = load_tasks(config(*words))
    assert [task.source for task in tasks.train] == ["chess"]


def test_an_evaluation_passes_over_training_tasks_of_another_environment(tmp_path: Path) -> None:
    words = [
        *files(tmp_path, train=2),
        f"data.val_files=[{source_file(tmp_path, 'guess_my_city')}]",
        "multi_turn.env=guess_my_city",
        "trainer.val_only=true",
    ]
    tasks = load_tasks(config(*words))
    assert (len(tasks.train), len(tasks.val)) == (0, 1)


def test_other_names_of_a_secret_reach_the_task(tmp_path: Path) -> None:
    reward = {"ground_truth": {"target": ["couch", "sofa"]}, "style": "rule"}
    named = row(0, "couch", reward_model=reward)
    odd = row(1, "couch", reward_model={"ground_truth": {"target": ["bed", "sofa"]}})
    plain = row(2, "couch", reward_model=None)
    tasks = read(write(tmp_path / "t.parquet", [named, odd, plain]))
    assert [task.aliases for task in tasks] == [("sofa",), (), ()]


def test_the_packaged_secrets_are_a_run_without_any_other_file() -> None:
    words = ["env=twenty_questions_packaged", "trainer.final_test=true"]
    tasks = load_tasks(load_config(words)[0])
    assert [len(part) for part in (tasks.train, tasks.val, tasks.test)] == [1084, 220, 440]
    assert tasks.train_secrets().isdisjoint(task.secret for task in (*tasks.val, *tasks.test))


def test_the_world_gives_one_task_a_thing_and_splits_that_do_not_meet(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world.yaml", (8, 3, 2))
    tasks = load_tasks(load_config(["experiment=quickstart", f"data.world={world}"])[0])
    sets = [{task.secret for task in part} for part in (tasks.train, tasks.val, tasks.test)]
    assert [len(part) for part in sets] == [8, 3, 2]
    assert len(set.union(*sets)) == 13


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_files_are_read_whole(name: str) -> None:
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    source, rows, has_system = PUBLISHED[name]
    tasks = read(str(path), "system_prompt" if has_system else None)
    assert len(tasks) == rows
    assert len({task.id for task in tasks}) == rows
    split = Path(name).name.removesuffix("_rl")
    for task in tasks:
        assert task.source == source
        assert task.id.startswith(f"{split}_")
        assert task.split == split
        assert [m.role for m in task.messages] == ["system", "user"][not has_system :]
        assert (task.scenario is not None) == (source == "customer_service")


def test_the_fixed_shuffle_is_the_published_one() -> None:
    path = DATA / "twenty_questions" / "val.parquet"
    if not path.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    words = [f"data.val_files=[{path}]", "data.sample_count.val=3", "trainer.val_only=true"]
    tasks = load_tasks(config(*words, "data.train_files=[]"))
    assert [task.secret for task in tasks.val] == ["bender", "court", "transition"]


def test_the_first_message_of_a_worlds_games_can_be_set(tmp_path: Path) -> None:
    world = write_world(tmp_path / "tiny.yaml")
    words = ["experiment=quickstart", f"data.world={world}"]
    plain = load_tasks(load_config(words)[0])
    told = load_tasks(load_config([*words, "data.world_prompt=Ask me."])[0])
    for name in ("train", "val", "test"):
        before, after = getattr(plain, name), getattr(told, name)
        assert {task.messages for task in after} == {(Message("user", "Ask me."),)}
        assert [task.secret for task in before] == [task.secret for task in after]
    assert plain.train[0].messages != told.train[0].messages
