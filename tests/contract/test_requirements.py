"""Requirement IDs in test names: which requirements have a test, and which do not.

A test names the requirements it proves right after ``test_``: ``test_A1_...``, ``test_H5_F5_...``.
The list of requirements lies beside the repository (``../shared/requirements.md``); where it is
absent there is nothing to compare with.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT.parent / "shared" / "requirements.md"
SHOWN_GROUPS = "TCABRUV"


def declared(name: str) -> list[str]:
    """The IDs at the head of a test's name.

    Example:
        >>> declared("test_H5_F5_nothing_kills_by_name")
        ['H5', 'F5']
    """
    match = re.match(r"test_((?:[A-Z]\d+_)+)", name)
    return match[1].rstrip("_").split("_") if match else []


def is_malformed(name: str) -> bool:
    """True for names that begin like an ID but are none, e.g. ``test_a1_``, ``test_A_1_``."""
    looks = r"[a-z]\d{1,2}_|[A-Z]_\d+_|[A-Z]\d+[a-zA-Z]+_|[A-Z]{2,}\d+_"
    return bool(re.match(rf"test_(?:{looks})", name))


def test_names() -> list[tuple[str, Path]]:
    """Every test function under ``tests/`` with its file."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.name.startswith("test_"):
                found.append((node.name, path))
    return found


test_names.__test__ = False  # type: ignore[attr-defined]


def table(required: list[str], tests: dict[str, list[str]]) -> str:
    """Coverage by group, as text."""
    lines = ["", "requirements  with a test  without one"]
    for group in SHOWN_GROUPS:
        ids = [r for r in required if r[0] == group]
        missing = [r for r in ids if r not in tests]
        covered = f"{len(ids) - len(missing)} of {len(ids)}"
        lines.append(f"{group:<13} {covered:<12} {' '.join(missing)}")
    return "\n".join(lines)


def test_no_test_name_begins_with_a_malformed_id() -> None:
    names = [name for name, _ in test_names()]
    assert [name for name in names if is_malformed(name)] == []


def test_every_id_in_a_test_name_is_a_requirement(capsys: pytest.CaptureFixture[str]) -> None:
    if not REQUIREMENTS.exists():
        pytest.skip("no ../shared/requirements.md beside this clone: nothing to compare with")
    text = REQUIREMENTS.read_text(encoding="utf-8")
    required = re.findall(r"^\| ([A-Z]\d+) \|", text, flags=re.MULTILINE)
    known = set(re.findall(r"\b[A-Z]\d+\b", text))
    tests: dict[str, list[str]] = defaultdict(list)
    for name, _ in test_names():
        for requirement in declared(name):
            tests[requirement].append(name)
    with capsys.disabled():
        print(table(required, tests))
    assert sorted(tests.keys() - known) == []
