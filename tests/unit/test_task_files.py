"""Task files: the published schema, damaged files, and the packaged secrets of 20 Questions."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delta_belief_rl.config.paths import find_file, packaged_tasks
from delta_belief_rl.envs.answers import exact_match, normalise
from delta_belief_rl.envs.parquet import (
    SOURCES,
    TaskFile,
    has_system_column,
    inspect_parquet,
    published_schema,
    read_parquet,
    read_secrets,
    sample,
    write_parquet,
)
from delta_belief_rl.envs.problems import ProblemKind
from delta_belief_rl.envs.prompts import PROMPTS
from delta_belief_rl.envs.secrets import (
    WORDS,
    check_tasks,
    generic_words,
    is_generic,
    make_tasks,
    noun_forms,
    read_aliases,
    read_words,
)
from delta_belief_rl.types import Message, Task, UserError
from tests.runs import ROOT

DATA = ROOT.parent / "shared" / "data" / "envs"
PUBLISHED = (
    "twenty_questions/train_rl",
    "twenty_questions/val",
    "twenty_questions/test",
    "guess_my_city/test",
    "murder_mystery/test",
    "customer_service/test",
)
SPLITS = {"train": 1000, "val": 200, "test": 400}
"""Split to the secrets that it must have at least."""


def published(name: str) -> str:
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    return str(path)


def task(number: int = 0, **changes: Any) -> Task:
    base: dict[str, Any] = {
        "id": f"train_{number}",
        "source": "tw_q",
        "secret": f"thing{number}",
        "messages": (Message("system", "Du fragst."), Message("user", "Début — «?»\n")),
        "split": "train",
    }
    return Task(**(base | changes))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good file of five tasks."""
    path = tmp_path / "tasks.parquet"
    write_parquet(path, [task(i) for i in range(5)])
    return path


# --- the schema ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tasks",
    [
        [task(i) for i in range(3)],
        [task(0, aliases=("chose", "Ding")), task(1)],
        [task(i, messages=(Message("user", "Begin."),), source="guess_my_city") for i in range(2)],
        [task(0, scenario="It hums.", source="customer_service"), task(1, scenario=None)],
        [task(0, messages=tuple(Message(r, "x") for r in ("system", "user", "assistant", "user")))],
        [task(0, secret="e-mail", split="test"), task(1, secret="São Paulo, Brazil", split="val")],
    ],
)
def test_what_is_written_reads_back_equal(tasks: list[Task], tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tasks.parquet"
    write_parquet(path, tasks)
    system = "system_prompt" if tasks[0].messages[0].role == "system" else None
    assert read_parquet(str(path), system_key=system) == tasks
    assert has_system_column(str(path)) == (system is not None)
    assert [p.name for p in path.parent.iterdir()] == ["tasks.parquet"]


def test_writing_twice_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.parquet"
    write_parquet(again, read_parquet(str(file)))
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_written_again_with_the_identical_schema(
    name: str, tmp_path: Path
) -> None:
    path = published(name)
    key = "system_prompt" if has_system_column(path) else None
    report = inspect_parquet(path, system_key=key)
    assert report.problems == ()
    assert report.published_schema
    tasks = list(report.tasks.values())
    write_parquet(tmp_path / "again.parquet", tasks)
    old, new = pq.read_table(path), pq.read_table(tmp_path / "again.parquet")
    assert new.schema.equals(old.schema)
    assert str(new.schema) == str(old.schema.remove_metadata())
    assert new.to_pylist() == old.to_pylist()
    assert read_parquet(str(tmp_path / "again.parquet"), system_key=key) == tasks


def test_the_schema_has_the_fields_in_the_published_order() -> None:
    full = published_schema(system=True, scenario=True)
    assert full.names == [
        *("data_source", "id", "golden_answers", "system_prompt", "prompt", "ability"),
        *("reward_model", "extra_info"),
    ]
    assert str(full.field("prompt").type) == "list<element: struct<content: string, role: string>>"
    assert str(full.field("extra_info").type) == (
        "struct<index: int64, scenario: string, split: string>"
    )
    assert "system_prompt" not in published_schema(system=False, scenario=False).names


def test_tasks_that_do_not_fit_one_file_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    bare = task(1, messages=(Message("user", "Begin."),))
    for tasks, part in (
        ([], "There is no task to write"),
        ([task(0), bare], "'train_1' differs from 'train_0' in having a system message"),
        ([task(0, messages=(Message("system", "x"),))], "'train_0' has no first message"),
    ):
        with pytest.raises(UserError, match=part):
            write_parquet(path, tasks)
    assert list(tmp_path.iterdir()) == []


# --- damaged files ------------------------------------------------------------------------------


def damaged(file: Path, change: Callable[[list[dict[str, Any]]], None]) -> TaskFile:
    """The file's report after a change of its rows, which keep the published types."""
    rows = pq.read_table(file).to_pylist()
    change(rows)
    schema = published_schema(system=True, scenario=False)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return inspect_parquet(str(file))


def set_cell(number: int, name: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[number].update({name: value})


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        (lambda rows: rows[2].update(dict.fromkeys(rows[2])), ProblemKind.NO_SECRET, "no golden"),
        (set_cell(2, "golden_answers", "  "), ProblemKind.NO_SECRET, "no golden answer"),
        (set_cell(2, "id", None), ProblemKind.NO_NAME, "an id or a data_source that is not text"),
        (set_cell(2, "prompt", None), ProblemKind.BAD_PROMPT, "no messages in 'prompt'"),
        (set_cell(2, "prompt", []), ProblemKind.BAD_PROMPT, "no messages in 'prompt'"),
        (set_cell(2, "prompt", [None]), ProblemKind.BAD_PROMPT, "without role and content"),
        (
            set_cell(2, "prompt", [{"content": "x", "role": "user"}, {"content": "y"}]),
            ProblemKind.BAD_PROMPT,
            "a message without role and content",
        ),
        (set_cell(2, "system_prompt", None), ProblemKind.BAD_PROMPT, "without role and content"),
    ],
)
def test_a_damaged_row_is_named_and_changes_no_other(
    change: Callable[[list[dict[str, Any]]], None], kind: ProblemKind, part: str, file: Path
) -> None:
    report = damaged(file, change)
    assert [(problem.kind, problem.row) for problem in report.problems] == [(kind, 2)]
    assert part in report.problems[0].what
    assert report.num_rows == 5
    assert report.tasks == {i: task(i) for i in (0, 1, 3, 4)}
    with pytest.raises(UserError, match=r"^Row 2 of ") as caught:
        read_parquet(str(file))
    assert str(caught.value) == report.problems[0].sentence(str(file))
    assert str(caught.value).count(". ") == 0


def test_several_damaged_rows_are_all_counted(file: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["golden_answers"] = None
        rows[4]["prompt"] = []

    report = damaged(file, change)
    assert [problem.row for problem in report.problems] == [0, 4]
    assert list(report.tasks) == [1, 2, 3]


@pytest.mark.parametrize("column", ["golden_answers", "prompt", "system_prompt", "extra_info"])
def test_bytes_that_are_no_utf8_are_a_problem_of_their_row(column: str, tmp_path: Path) -> None:
    rows = pq.ParquetFile(find_file("package:twenty_questions/val")).read().slice(0, 4).to_pylist()
    marks = {
        "golden_answers": "aaaaaa",
        "prompt": [{"content": "aaaaaa", "role": "user"}],
        "system_prompt": {"content": "aaaaaa", "role": "system"},
        "extra_info": {"index": 2, "split": "aaaaaa"},
    }
    rows[2][column] = marks[column]
    path = tmp_path / "bytes.parquet"
    schema = published_schema(system=True, scenario=False)
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    whole = path.read_bytes()
    assert whole.count(b"aaaaaa") == 1
    path.write_bytes(whole.replace(b"aaaaaa", b"aa\xff\xfeaa"))
    report = inspect_parquet(str(path))
    assert [(problem.kind, problem.row) for problem in report.problems] == [
        (ProblemKind.BAD_TEXT, 2)
    ]
    assert list(report.tasks) == [0, 1, 3]
    with pytest.raises(UserError, match=f"has text in '{column}' that is not UTF-8"):
        read_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("golden_answers", pa.array([1, 2, 3, 4, 5]), "has int64 in the column 'golden_answers'"),
        ("prompt", pa.array(["Begin."] * 5), "has string in the column 'prompt', not list<struct<"),
        ("prompt", pa.array([[{"role": "user"}]] * 5), "list<element: struct<role: string>>"),
        ("system_prompt", pa.array(["You ask."] * 5), "has string in the column 'system_prompt'"),
        ("id", pa.nulls(5), "has null in the column 'id'"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_with_both_types(
    name: str, value: pa.Array, part: str, file: Path
) -> None:
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, value), file)
    report = inspect_parquet(str(file))
    assert [problem.kind for problem in report.problems] == [ProblemKind.WRONG_TYPE]
    assert not report.published_schema
    assert report.tasks == {}
    with pytest.raises(UserError, match="make the file again") as caught:
        read_parquet(str(file))
    assert part in str(caught.value)


def test_a_missing_column_is_named_with_those_that_are_there(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["prompt", "id"]), file)
    report = inspect_parquet(str(file))
    assert [problem.kind for problem in report.problems] == [ProblemKind.MISSING_COLUMN] * 2
    with pytest.raises(UserError, match=r"no column 'id' \(it has data_source, golden_answers"):
        read_parquet(str(file))


def test_further_columns_are_allowed_but_told(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.append_column("note", pa.array(["x"] * 5)), file)
    report = inspect_parquet(str(file))
    assert report.problems == ()
    assert not report.published_schema
    assert list(report.tasks.values()) == [task(i) for i in range(5)]


def test_a_truncated_file_and_a_flipped_bit_are_unreadable(file: Path) -> None:
    whole = file.read_bytes()
    cuts = [b"", b"PAR1", whole[: len(whole) // 2], whole[:-1]]
    flipped = bytearray(whole)
    flipped[whole.index(b"Du fragst.") if b"Du fragst." in whole else 60] ^= 1
    for content in (*cuts, bytes(flipped)):
        file.write_bytes(content)
        report = inspect_parquet(str(file))
        assert [problem.kind for problem in report.problems] == [ProblemKind.UNREADABLE]
        assert read_secrets(str(file)) in ([], [f"thing{i}" for i in range(5)])
        with pytest.raises(UserError, match="is not a readable parquet file: make or copy it"):
            read_parquet(str(file))


def test_a_file_that_is_absent_is_a_sentence_for_every_reader(tmp_path: Path) -> None:
    for reader in (read_parquet, inspect_parquet, read_secrets, has_system_column):
        with pytest.raises(UserError, match="does not exist"):
            reader(str(tmp_path / "none.parquet"))


def test_a_quick_look_reads_the_secrets_alone(file: Path) -> None:
    damaged(file, set_cell(1, "golden_answers", None))
    assert read_secrets(str(file)) == ["thing0", "thing2", "thing3", "thing4"]
    pq.write_table(pq.read_table(file).drop_columns(["golden_answers"]), file)
    assert read_secrets(str(file)) == []


def test_a_sample_is_the_head_of_one_fixed_shuffle() -> None:
    assert sample(range(5), -1) == (0, 1, 2, 3, 4)
    assert sample(range(100), 9) == sample(range(100), 30)[:9]
    assert sorted(sample(range(100), 100)) == list(range(100))
    assert sample(range(5), 0) == ()


def test_rows_are_checked_as_tasks_too() -> None:
    rows = [
        task(0, secret="fox"),
        task(0, secret="foxes"),
        task(2, secret="animals"),
        task(3, secret="ice cream"),
        task(4, secret="owl", source="chess"),
        task(5, secret="The animal did it.", source="murder_mystery"),
    ]
    found = [(problem.row, problem.kind) for problem in check_tasks(dict(enumerate(rows)))]
    assert found == [
        (1, ProblemKind.REPEATED_ID),
        (1, ProblemKind.REPEATED_SECRET),
        (2, ProblemKind.GENERIC_SECRET),
        (3, ProblemKind.UNFINDABLE_SECRET),
        (4, ProblemKind.UNKNOWN_SOURCE),
    ]


# --- the packaged secrets -----------------------------------------------------------------------


def packaged(split: str) -> list[str]:
    return (WORDS / f"{split}.txt").read_text(encoding="utf-8").splitlines()


def test_there_is_a_packaged_file_for_each_split_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert packaged_tasks() == sorted(
        f"{env}/{split}" for env in SOURCES.values() for split in SPLITS
    )
    for split, least in SPLITS.items():
        found = inspect_parquet(f"package:twenty_questions/{split}")
        assert (found.problems, found.published_schema) == ((), True)
        assert len(found.tasks) >= least
        assert list(check_tasks(found.tasks)) == []
        for number, one in found.tasks.items():
            assert (one.id, one.split, one.source) == (f"{split}_{number}", split, "tw_q")


def test_a_wrong_name_of_a_packaged_file_is_answered_with_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"did you mean package:twenty_questions/train\?"):
        find_file("package:twenty_questions/trian")
    with pytest.raises(UserError, match="choose from customer_service/test, customer_service/tr"):
        find_file("package:../../types")


@pytest.mark.parametrize("split", SPLITS)
def test_the_packaged_words_are_single_plain_nouns_in_order(split: str) -> None:
    words = packaged(split)
    assert words == sorted(words)
    assert [word for word in words if not re.fullmatch("[a-z]{2,}", word)] == []
    assert [word for word in words if is_generic(word)] == []
    assert [word for word in words if not exact_match(f"Is it {word}?", word)] == []
    # The list itself says the same: no noun twice, no generic word, no empty line.
    assert read_words(WORDS / f"{split}.txt") == words


def test_no_noun_is_in_two_splits_and_no_other_name_of_one_is_a_secret() -> None:
    forms = {
        split: {form for word in packaged(split) for form in noun_forms(word)} for split in SPLITS
    }
    for one, other in combinations(SPLITS, 2):
        assert forms[one] & forms[other] == set()
    every = set().union(*forms.values())
    aliases = read_aliases(WORDS / "aliases.txt")
    secrets = {word for split in SPLITS for word in packaged(split)}
    assert set(aliases) <= secrets
    names = [name for also in aliases.values() for name in also]
    assert len(names) == len(set(names))
    assert [name for name in names if noun_forms(name) & every] == []


def test_all_splits_have_one_wording() -> None:
    openings = {
        one.messages
        for split in SPLITS
        for one in read_parquet(f"package:twenty_questions/{split}")
    }
    assert openings == {PROMPTS["direct"]}


@pytest.mark.parametrize("split", SPLITS)
def test_a_packaged_file_is_what_its_words_give(split: str, tmp_path: Path) -> None:
    made = tmp_path / "made.parquet"
    words = read_words(WORDS / f"{split}.txt")
    write_parquet(made, make_tasks(words, split, aliases=read_aliases(WORDS / "aliases.txt")))
    shipped = WORDS / f"{split}.parquet"
    assert pq.read_table(made).equals(pq.read_table(shipped))
    # The version of the writer is part of the bytes.
    if pq.read_metadata(made).created_by == pq.read_metadata(shipped).created_by:
        assert made.read_bytes() == shipped.read_bytes()


def test_the_generic_words_hold_those_that_are_known_to_win_by_accident() -> None:
    known = "word system answer game animal building color concept country event food human life "
    known += "money name number place room science structure time tool vehicle water wood city "
    known += "group house living thing object item person kind type part material something"
    assert set(known.split()) <= generic_words()
    for word in generic_words():
        assert word == normalise(word)


@pytest.mark.parametrize("mode", PROMPTS)
def test_a_prompt_says_who_asks_and_asks_for_tags_only_outside_direct_mode(mode: str) -> None:
    system, user = PROMPTS[mode]
    assert (system.role, user.role) == ("system", "user")
    assert "20 Questions" in system.content
    assert ("<question>" in user.content) == (mode != "direct")
    assert ("<think>" in user.content) == (mode == "thinking")
    assert "yes or no" in user.content


def test_words_that_differ_in_number_only_are_the_same_noun() -> None:
    for one, other in (
        *(("dog", "dogs"), ("box", "boxes"), ("horse", "horses"), ("knife", "knives")),
        *(("berry", "berries"), ("mouse", "mice"), ("ice cream", "Ice-cream"), ("bus", "buses")),
    ):
        assert noun_forms(one) & noun_forms(other), (one, other)
    for one, other in (
        ("glass", "gla"),
        ("bus", "bu"),
        ("prince", "princess"),
        ("ring", "rings?x"),
    ):
        assert not noun_forms(one) & noun_forms(other), (one, other)


def test_every_source_names_an_environment_of_the_configuration() -> None:
    from delta_belief_rl.config.rules import ENVIRONMENTS

    assert set(SOURCES.values()) == set(ENVIRONMENTS)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("train", "val"), ("train", "test"), ("val", "train_rl"), ("test", "train_rl")],
)
def test_no_packaged_secret_would_spoil_a_comparison_with_the_published_ones(
    ours: str, theirs: str
) -> None:
    other = read_secrets(published(f"twenty_questions/{theirs}"))
    forms = {form for word in other for form in noun_forms(word)}
    assert [word for word in packaged(ours) if noun_forms(word) & forms] == []
