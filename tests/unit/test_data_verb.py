"""``delta-belief data``: make, check, overlap, show; and word lists that are refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from delta_belief_rl.cli.main import main
from delta_belief_rl.envs.parquet import read_parquet, write_parquet
from delta_belief_rl.envs.prompts import PROMPTS
from delta_belief_rl.envs.secrets import make_tasks, overlap
from tests.runs import ROOT

DATA = ROOT.parent / "shared" / "data" / "envs" / "twenty_questions"
Shown = pytest.CaptureFixture[str]


def data(capsys: Shown, *words: object, status: int = 0) -> str:
    """Standard output of ``delta-belief data``."""
    capsys.readouterr()
    assert main(["data", *map(str, words)]) == status
    return capsys.readouterr().out


def as_json(capsys: Shown, *words: object, status: int = 0) -> Any:
    return json.loads(data(capsys, "--json", *words, status=status))


def refused(capsys: Shown, *words: object) -> str:
    """The one sentence on stderr of a call that is bad input."""
    capsys.readouterr()
    assert main(["data", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1, shown.err
    return shown.err


def words_file(folder: Path, *words: str, name: str = "words.txt") -> Path:
    path = folder / name
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return path


def task_file(folder: Path, name: str, *words: str, split: str = "train") -> str:
    write_parquet(folder / name, make_tasks(words, split))
    return str(folder / name)


# --- make ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_make_writes_one_row_for_each_line(prompt: str, tmp_path: Path, capsys: Shown) -> None:
    source, out = words_file(tmp_path, "owl", "fox", "elk"), tmp_path / "made.parquet"
    text = data(capsys, "make", source, "--split", "val", "--prompt", prompt, "--out", out)
    assert text == f"{out}: 3 val secrets, {prompt} prompt\n"
    tasks = read_parquet(str(out))
    assert [(t.id, t.secret, t.split) for t in tasks] == [
        ("val_0", "owl", "val"),
        ("val_1", "fox", "val"),
        ("val_2", "elk", "val"),
    ]
    assert {t.messages for t in tasks} == {PROMPTS[prompt]}


def test_make_knows_other_names_and_tells_what_the_exact_rule_misses(
    tmp_path: Path, capsys: Shown
) -> None:
    source = words_file(tmp_path, "couch", "ice cream", "e-mail")
    aliases = words_file(tmp_path, "couch: sofa, settee", "cab: taxi", name="aliases.txt")
    out = tmp_path / "made.parquet"
    found = as_json(capsys, "make", source, "--aliases", aliases, "--out", out)
    assert found == {
        "file": str(out),
        "split": "train",
        "prompt": "direct",
        "tasks": 3,
        "with_aliases": 1,
        "unfindable": ["ice cream"],
    }
    assert read_parquet(str(out))[0].aliases == ("sofa", "settee")
    assert pq.read_table(out).column("reward_model")[0].as_py() == {
        "ground_truth": {"target": ["couch", "sofa", "settee"]},
        "style": "rule",
    }


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["owl", "fox", "Owl"], "Line 3 of {file} repeats line 1 ('Owl')"),
        (["owl", "fox", "foxes"], "Line 3 of {file} repeats line 2 ('foxes')"),
        (["owl", "", "fox"], "Line 2 of {file} is empty"),
        (["owl", "  \u200b "], "Line 2 of {file} is empty"),
        (["owl", "animals"], "Line 2 of {file} is the generic word 'animals'"),
        ([], "{file} holds no word"),
    ],
)
def test_make_names_the_line_that_it_refuses(
    words: list[str], part: str, tmp_path: Path, capsys: Shown
) -> None:
    source, out = words_file(tmp_path, *words), tmp_path / "made.parquet"
    assert part.format(file=source) in refused(capsys, "make", source, "--out", out)
    assert not out.exists()


def test_make_takes_generic_words_when_told_to(tmp_path: Path, capsys: Shown) -> None:
    source, out = words_file(tmp_path, "owl", "animal"), tmp_path / "made.parquet"
    assert "2 train secrets" in data(capsys, "make", source, "--allow-generic", "--out", out)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("couch sofa", "Line 1 of {file} is not of the form"),
        ("couch: sofa,", "Line 1 of {file} is not of the form"),
        (": sofa", "Line 1 of {file} is not of the form"),
        ("couch: sofa\ncouch: settee", "Line 2 of {file} gives names for 'couch' again"),
        ("couch: owl", "'owl' is a further name of 'couch' and a secret of its own"),
    ],
)
def test_make_refuses_other_names_that_are_unclear(
    line: str, part: str, tmp_path: Path, capsys: Shown
) -> None:
    source = words_file(tmp_path, "couch", "owl")
    aliases = words_file(tmp_path, line, name="aliases.txt")
    sentence = refused(
        capsys, "make", source, "--aliases", aliases, "--out", tmp_path / "made.parquet"
    )
    assert part.format(file=aliases) in sentence


def test_make_refuses_what_it_cannot_read_or_do(tmp_path: Path, capsys: Shown) -> None:
    source, out = words_file(tmp_path, "owl"), tmp_path / "made.parquet"
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    assert "cannot be read" in refused(capsys, "make", tmp_path / "none.txt", "--out", out)
    assert "is not UTF-8 text" in refused(capsys, "make", latin, "--out", out)
    assert "give --out FILE.parquet" in refused(capsys, "make", source)
    assert "not 2 names" in refused(capsys, "make", source, source, "--out", out)
    assert "--limit belongs to `data show`" in refused(
        capsys, "make", source, "--out", out, "--limit", "3"
    )


# --- check --------------------------------------------------------------------------------------


def test_check_finds_nothing_in_good_files(tmp_path: Path, capsys: Shown) -> None:
    one = task_file(tmp_path, "a.parquet", "owl", "fox")
    other = task_file(tmp_path, "b.parquet", "elk", split="val")
    text = data(capsys, "check", one, other)
    assert text.splitlines() == [
        f"{one}: 2 rows, 2 tasks, the published schema, 0 problems",
        f"{other}: 1 rows, 1 tasks, the published schema, 0 problems",
    ]


def test_check_lists_and_counts_every_row_and_overlap(tmp_path: Path, capsys: Shown) -> None:
    one = task_file(tmp_path, "a.parquet", "owl", "fox", "animal", "ice cream")
    other = task_file(tmp_path, "b.parquet", "Fox", "elk", split="val")
    rows = pq.read_table(one)
    broken = rows.to_pylist()
    broken[0]["prompt"] = []
    pq.write_table(type(rows).from_pylist(broken, schema=rows.schema), one)
    found = as_json(capsys, "check", one, other, status=1)
    first, second = found["files"]
    assert (first["rows"], first["tasks"], second["problems"]) == (4, 3, [])
    assert [(p["row"], p["kind"]) for p in first["problems"]] == [
        (0, "bad_prompt"),
        (2, "generic_secret"),
        (3, "unfindable_secret"),
    ]
    assert found["overlaps"] == [{"first": one, "second": other, "shared": ["fox"]}]
    text = data(capsys, "check", one, other, status=1)
    assert f"{one}: 4 rows, 3 tasks, the published schema, 3 problems" in text
    assert "  row 0 has no messages in 'prompt'" in text
    assert f"{one} and {other} share 1 secret: fox" in text


def test_check_tells_a_file_that_is_no_parquet_and_refuses_one_that_is_absent(
    tmp_path: Path, capsys: Shown
) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"no parquet")
    assert "the file is not a readable parquet file" in data(capsys, "check", bad, status=1)
    assert "does not exist" in refused(capsys, "check", tmp_path / "none.parquet")
    assert "at least 1 file" in refused(capsys, "check")


# --- overlap and show ---------------------------------------------------------------------------


def test_overlap_counts_equal_secrets_and_names_near_ones(tmp_path: Path, capsys: Shown) -> None:
    one = task_file(tmp_path, "a.parquet", "owl", "fox", "e-mail")
    other = task_file(tmp_path, "b.parquet", "Owl", "foxes", "email", "elk")
    found = as_json(capsys, "overlap", one, other, status=1)
    assert (found["secrets"], found["shared"], found["near"]) == (4, ["owl"], ["email", "foxes"])
    text = data(capsys, "overlap", one, other, status=1)
    assert text.splitlines()[0] == f"1 of the 4 secrets of {other} are also in {one}"
    apart = task_file(tmp_path, "c.parquet", "yak")
    assert data(capsys, "overlap", one, apart).startswith("0 of the 1 secrets")


def test_the_published_validation_secrets_are_partly_training_secrets(capsys: Shown) -> None:
    train, val = DATA / "train_rl.parquet", DATA / "val.parquet"
    if not val.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    found = as_json(capsys, "overlap", train, val, status=1)
    assert (len(found["shared"]), found["secrets"]) == (45, 198)
    assert {"ankle", "aunt", "author", "january", "soccer"} <= set(found["shared"])
    test = as_json(capsys, "overlap", train, DATA / "test.parquet")
    assert (test["shared"], test["secrets"]) == ([], 433)


def test_overlap_compares_normal_forms() -> None:
    assert overlap(["Owl", "fox"], ["owl ", "\u200bFOX", "elk"]) == ("fox", "owl")
    assert overlap([], ["owl"]) == ()


def test_show_prints_the_wording_once_and_the_tasks(tmp_path: Path, capsys: Shown) -> None:
    source = task_file(tmp_path, "a.parquet", "owl", "fox", "elk")
    text = data(capsys, "show", source, "--limit", 2)
    assert text.startswith(f"{source}: 3 tasks, 1 wording\n--- system\n")
    assert text.count(PROMPTS["direct"][1].content) == 1
    assert text.splitlines()[-2:] == ["train_0  tw_q  owl", "train_1  tw_q  fox"]
    found = as_json(capsys, "show", "package:twenty_questions/val", "--limit", 0)
    assert len(found) == 220
    assert found[0]["messages"][0]["role"] == "system"


def test_the_script_makes_the_packaged_files(tmp_path: Path) -> None:
    import sys

    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "data" / "make_tasks.sh"), str(tmp_path)],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for split in ("train", "val", "test"):
        made = pq.read_table(tmp_path / f"{split}.parquet")
        folder = ROOT / "delta_belief_rl" / "assets" / "tasks" / "twenty_questions"
        assert made.equals(pq.read_table(folder / f"{split}.parquet"))
