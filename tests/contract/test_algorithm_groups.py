"""Groups of methods of credit: what they set is what their method reads, and what runs keep."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from delta_belief_rl.algo import CREDITS, find_method
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.paths import config_dir

RATIOS = ("gspo", "turn_ratio", "turn_ppo", "mpo", "at2po")
LAPTOP = ("quickstart", "starpo_quickstart", "smollm2_gpu", "errands_quickstart")


@pytest.mark.parametrize("experiment", LAPTOP)
@pytest.mark.parametrize("group", RATIOS)
def test_an_experiment_leaves_the_range_of_ratios_to_the_method(
    experiment: str, group: str
) -> None:
    body = yaml.safe_load((config_dir() / "algorithm" / f"{group}.yaml").read_text())
    wanted = body["actor_rollout_ref"]["actor"]
    config, _ = load_config([f"experiment={experiment}", f"algorithm={group}"])
    actor = config.actor_rollout_ref.actor
    assert actor.clip_ratio_low == wanted["clip_ratio_low"]
    assert actor.clip_ratio_high == wanted["clip_ratio_high"]


def test_every_group_that_the_page_of_methods_names_exists() -> None:
    page = (config_dir().parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| [^|]+ \| ([^|]*) \|", page, flags=re.M)
    groups = {path.stem for path in (config_dir() / "algorithm").glob("*.yaml")}
    estimators = {*CREDITS, "grpo"}
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} - {
        "algorithm",
        "true",
        "false",
    }
    assert len(named & groups) > 30
    assert sorted(named - groups - estimators - {"parity"}) == []


@pytest.mark.parametrize("path", sorted((config_dir() / "algorithm").glob("*.yaml")), ids=str)
def test_a_group_sets_the_discount_only_of_a_method_that_has_one(path: Path) -> None:
    chosen = yaml.safe_load(path.read_text()).get("algorithm", {})
    if "gamma" in chosen:
        settings = find_method(chosen["adv_estimator"])[1]
        assert "gamma" in {item.name for item in fields(settings)}
