"""Code of a plug-in that fails while a run goes on is told by its name, file and exception."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from turn_tables import Act, table_of

from delta_belief_rl.algo.base import Credit
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.eval.step_metrics import credit_metrics
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.own_failures import PluginFailed, guarded
from delta_belief_rl.trainer.settings import credit_method
from delta_belief_rl.types import TurnTable, UserError
from tests.runs import ROOT, play, words, write_world

EXAMPLE = ROOT / "docs" / "examples" / "late_turns.py"
MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from delta_belief_rl.algo.base import Advantage, Grain, Stateless
from delta_belief_rl.algo.plugin import CreditPlugin
from delta_belief_rl.types import UserError

@dataclass(frozen=True)
class Settings:
    pass

@dataclass(frozen=True)
class Mine(Stateless):
    settings: Settings
    requires: ClassVar = ("valid",)
    provides: ClassVar = ("advantages",)
    grain: ClassVar = Grain.GROUP
    needs_group: ClassVar = False

    def apply(self, table, previous=None):
        {apply}

    def paid(self, table):
        {paid}

    def state_dict(self):
        {state_dict}

METHODS = {{"mine": CreditPlugin(Mine, Settings)}}
"""
FINE = {
    "apply": "return Advantage(table.valid * 1.0, table.valid * 1.0)",
    "paid": "return table.valid * 0.0",
    "state_dict": "return {}",
}


def written(folder: Path, **changes: str) -> Path:
    path = folder / "mine_file.py"
    path.write_text(dedent(MODULE).format(**{**FINE, **changes}))
    return path


def config(path: Path, *more: str, name: str = "mine") -> RunConfig:
    chosen = [f"plugins=[{path}]", f"algorithm.adv_estimator={name}", *more]
    return load_config(["experiment=starpo_quickstart", *chosen])[0]


def method(cfg: RunConfig) -> Credit:
    return guarded(cfg, credit_method(cfg))


def table() -> TurnTable:
    return table_of([[Act("a", reward=1.0), Act("b", reward=2.0)], [Act("a")]])


FAILURES = {
    "an exception": (
        {"apply": "return {}['x']"},
        r"failed in apply with KeyError: 'x' \(mine_file\.py, line \d+\)\.$",
    ),
    "nothing": ({"apply": "return None"}, r"returned NoneType and no Advantage from apply\.$"),
    "too few rows": (
        {"apply": "return Advantage(table.valid[:2] * 1.0, table.valid * 1.0)"},
        r"returned an Advantage whose turns have the shape \(2,\) and not \(3,\) from apply\.$",
    ),
    "no weight": (
        {"apply": "return Advantage(table.valid * 1.0, None)"},
        r"whose weight have the shape None and not \(3,\) from apply\.$",
    ),
    "NaN": (
        {"apply": "return Advantage(table.valid * float('nan'), table.valid * 1.0)"},
        r"returned an Advantage whose turns are not all finite from apply\.$",
    ),
    "a weight below 0": (
        {"apply": "return Advantage(table.valid * 1.0, table.valid * -1.0)"},
        r"whose weight are not all at least 0 from apply\.$",
    ),
    "a weight that is NaN": (
        {"apply": "return Advantage(table.valid * 1.0, table.valid * float('nan'))"},
        r"whose weight are not all finite from apply\.$",
    ),
    "rewards of some rows": (
        {"apply": "return Advantage(*[table.valid * 1.0] * 2, rewards=table.valid[:1] * 1.0)"},
        r"whose rewards have the shape \(1,\) and not \(3,\) from apply\.$",
    ),
    "one number for each turn as tokens": (
        {"apply": "return Advantage(*[table.valid * 1.0] * 2, tokens=table.valid * 1.0)"},
        r"whose tokens have the shape \(3,\) and not \(7,\) from apply\.$",
    ),
    "tokens that are NaN": (
        {
            "apply": "one = table.valid * 1.0; odd = one.repeat([2, 3, 2]) * float('nan'); "
            "return Advantage(one, one, tokens=odd)"
        },
        r"whose tokens are not all finite from apply\.$",
    ),
    "too few targets": (
        {"apply": "return Advantage(*[table.valid * 1.0] * 2, targets=table.valid * 1.0)"},
        r"whose targets have the shape \(3,\) and not \(7,\) from apply\.$",
    ),
    "too few weights of distillation": (
        {"apply": "return Advantage(*[table.valid * 1.0] * 2, distil=table.valid[1:] * 1.0)"},
        r"whose distil have the shape \(2,\) and not \(3,\) from apply\.$",
    ),
    "a column of a learner": (
        {"apply": "return Advantage(*[table.valid * 1.0] * 2, columns={'mine': table.valid})"},
        r"whose mine have the shape \(3,\) and not \(7,\) from apply\.$",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("chain", ["[]", "[pearl]"])
def test_a_failure_names_plug_in_and_method(case: str, chain: str, tmp_path: Path) -> None:
    changes, said = FAILURES[case]
    path = written(tmp_path, **changes)
    with pytest.raises(PluginFailed, match=said) as caught:
        method(config(path, f"algorithm.transforms={chain}")).apply(table())
    assert str(caught.value).startswith(f"The method mine of the plug-in {path} ")


@pytest.mark.parametrize("call", ["paid", "state_dict"])
def test_every_call_of_a_run_is_told(call: str, tmp_path: Path) -> None:
    credit = method(config(written(tmp_path, **{call: "return 1 / 0"})))
    with pytest.raises(PluginFailed, match=f"failed in {call} with ZeroDivisionError"):
        credit.paid(table()) if call == "paid" else credit.state_dict()


@pytest.mark.parametrize(
    ("call", "body", "said"),
    [
        ("paid", "return table.valid[:2] * 1.0", "from paid no finite number for each of 3 turns"),
        ("paid", "return None", "from paid no finite number for each of 3 turns"),
        ("paid", "return table.valid * float('inf')", "from paid no finite number"),
        ("paid", "return 'much'", "failed in paid with ValueError"),
        ("state_dict", "return {'seen': {1, 2}}", "failed in state_dict with TypeError"),
        ("state_dict", "return None", "returned NoneType and no dict from state_dict"),
    ],
)
def test_what_a_run_cannot_use_is_told_as_the_methods_own(
    call: str, body: str, said: str, tmp_path: Path
) -> None:
    credit = method(config(written(tmp_path, **{call: body})))
    with pytest.raises(PluginFailed, match=said):
        credit.paid(table()) if call == "paid" else credit.state_dict()


@pytest.mark.parametrize("chain", ["[]", "[pearl]"])
def test_without_rewards_those_that_the_method_says_it_pays_are_told(
    chain: str, tmp_path: Path
) -> None:
    path = written(tmp_path, paid="return table.valid * 3.0")
    made = method(config(path, f"algorithm.transforms={chain}")).apply(table())
    np.testing.assert_array_equal(made.rewards, [3.0, 3.0, 3.0])
    assert credit_metrics(table(), made, 0.0)["critic/rewards/mean"] == 3.0


def test_what_is_not_trained_may_be_unknown(tmp_path: Path) -> None:
    body = (
        "import numpy as np; used = np.array([1.0, 0.0, 1.0]); odd = np.array([2.0, np.nan, 2.0]); "
        "each = odd.repeat([2, 3, 2]); return Advantage(odd, used, tokens=each, targets=each)"
    )
    made = method(config(written(tmp_path, apply=body))).apply(table())
    assert np.isnan(made.turns).tolist() == [False, True, False]


def test_a_sentence_of_the_method_stays_as_it_is(tmp_path: Path) -> None:
    credit = method(config(written(tmp_path, apply="raise UserError('Give me more games.')")))
    with pytest.raises(UserError, match=r"^Give me more games\.$"):
        credit.apply(table())
    with pytest.raises(UserError, match="Mine keeps no state but was given count"):
        credit.load_state_dict({"count": 1})


def test_a_method_that_works_makes_what_it_made_before() -> None:
    cfg = config(EXAMPLE, name="late_turns")
    plain, own = credit_method(cfg), method(cfg)
    np.testing.assert_array_equal(own.apply(table()).turns, plain.apply(table()).turns)
    np.testing.assert_array_equal(own.paid(table()), plain.paid(table()))
    assert own.needs_group == plain.needs_group


def test_a_method_of_the_package_is_left_alone(tmp_path: Path) -> None:
    cfg = config(written(tmp_path), name="grpo")
    credit = credit_method(cfg)
    assert guarded(cfg, credit) is credit


@pytest.mark.slow
def test_a_run_ends_with_one_sentence_and_keeps_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = write_world(tmp_path / "tiny.yaml")
    path, out = written(tmp_path, apply="return {}['x']"), tmp_path / "run"
    status, _ = play(words(out, world, f"plugins=[{path}]", "algorithm.adv_estimator=mine"))
    assert status == 1
    said = capsys.readouterr().err
    assert f"The method mine of the plug-in {path} failed in apply with KeyError: 'x'" in said
    assert "Traceback" not in said
    events = read_records(out / "events.jsonl")
    (failed,) = [event for event in events if event["kind"] == "plugin_failed"]
    assert "return {}['x']" in failed["traceback"]
    assert (events[-1]["kind"], events[-1]["cause"]) == ("end", "plugin_failed")
