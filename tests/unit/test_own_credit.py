"""Methods of credit of a user's own: loading, settings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.config.compose import from_yaml, load_config, resolved_yaml
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import load_methods, load_plugins
from delta_belief_rl.trainer.own_credit import find_credit, own_credit
from delta_belief_rl.trainer.settings import credit_method
from delta_belief_rl.types import UserError
from tests.runs import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "late_turns.py"
ENVIRONMENT = ROOT / "docs" / "examples" / "guess_the_number.py"
HEAD = """
from dataclasses import dataclass
from typing import ClassVar
from delta_belief_rl.algo.base import Grain, Stateless
from delta_belief_rl.algo.plugin import CreditPlugin
from delta_belief_rl.types import UserError

@dataclass(frozen=True)
class Settings:
    size: int = 3

    def __post_init__(self):
        if self.size > 9:
            raise UserError("algorithm.kwargs.size is too large.")
        self.size + 1

@dataclass(frozen=True)
class Mine(Stateless):
    settings: Settings
    requires: ClassVar = ("valid",)
    provides: ClassVar = ("advantages",)
    grain: ClassVar = Grain.GROUP
    needs_group: ClassVar = True

    def apply(self, table, previous=None):
        raise NotImplementedError
"""


def plugin(folder: Path, body: str = "METHODS = {'mine': CreditPlugin(Mine, Settings)}") -> Path:
    path = folder / "mine_file.py"
    path.write_text(HEAD + dedent(body))
    return path


@cache
def quickstart() -> RunConfig:
    return load_config(["experiment=starpo_quickstart"])[0]


def config(path: Path, name: str = "mine", games: int = 8, **kwargs: object) -> RunConfig:
    cfg = quickstart()
    turns = replace(cfg.multi_turn, train=replace(cfg.multi_turn.train, n=games))
    algorithm = replace(cfg.algorithm, adv_estimator=name, kwargs=kwargs)
    return replace(cfg, plugins=(str(path),), algorithm=algorithm, multi_turn=turns)


def test_a_method_of_the_package_is_no_plug_in(tmp_path: Path) -> None:
    assert find_credit(quickstart()) is None
    assert own_credit(quickstart()) is None
    assert own_credit(config(plugin(tmp_path), "grpo")) is None


def test_a_method_is_made_with_its_settings(tmp_path: Path) -> None:
    path = plugin(tmp_path)
    made = own_credit(config(path, size=7))
    assert type(made).__name__ == "Mine"
    assert made.settings.size == 7  # type: ignore[union-attr]
    default = own_credit(config(path))
    assert default.settings.size == 3  # type: ignore[union-attr]


def test_the_trainer_takes_the_method_of_the_plug_in() -> None:
    words = ["experiment=starpo_quickstart", f"plugins=[{EXAMPLE}]"]
    words += ["algorithm.adv_estimator=late_turns", "algorithm.kwargs.decay=0.5"]
    cfg, _, _ = prepare(words)
    assert from_yaml(resolved_yaml(cfg)) == cfg
    credit = credit_method(cfg)
    assert "LateTurns(settings=LateTurnsSettings(decay=0.5)" in repr(credit)
    assert credit.needs_group


def test_a_module_may_bring_environments_methods_or_both(tmp_path: Path) -> None:
    assert list(load_methods([str(EXAMPLE)])) == ["late_turns"]
    assert load_plugins([str(EXAMPLE)]) == {}
    assert load_methods([str(ENVIRONMENT)]) == {}
    both = plugin(
        tmp_path,
        """
        from delta_belief_rl.envs.plugin import EnvPlugin
        METHODS = {'mine': CreditPlugin(Mine, Settings)}
        ENVIRONMENTS = {'maze': EnvPlugin(make=lambda options: None)}
        """,
    )
    assert list(load_methods([str(both)])) == ["mine"]
    assert list(load_plugins([str(both)])) == ["maze"]
    names = [str(ENVIRONMENT), str(EXAMPLE)]
    assert (list(load_plugins(names)), list(load_methods(names))) == (
        ["guess_the_number"],
        ["late_turns"],
    )


PLUGIN = "CreditPlugin(Mine, Settings)"
BAD_MODULES = {
    "nothing": ("x = 1", "no mapping ENVIRONMENTS of names to EnvPlugin and none called METHODS"),
    "a list": (f"METHODS = [{PLUGIN}]", "no mapping METHODS of names to CreditPlugin but list"),
    "no plug-in": ("METHODS = {'mine': Mine}", "has type for 'mine' in METHODS, where a CreditP"),
    "no name": (f"METHODS = {{3: {PLUGIN}}}", "calls a method 3: name it with letters"),
    "a path": (f"METHODS = {{'../x': {PLUGIN}}}", "calls a method '../x'"),
    "taken": (f"METHODS = {{'grpo': {PLUGIN}}}", "brings the method 'grpo', which this package"),
    "syntax": ("def f(:", "cannot be imported: SyntaxError"),
}


@pytest.mark.parametrize("case", BAD_MODULES)
def test_modules_that_are_not_in_order_are_refused(case: str, tmp_path: Path) -> None:
    body, sentence = BAD_MODULES[case]
    with pytest.raises(UserError) as caught:
        own_credit(config(plugin(tmp_path, body)))
    assert sentence in str(caught.value)


def test_two_plug_ins_with_one_name_are_refused(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(str(plugin(tmp_path / name)))
    with pytest.raises(UserError, match=r"brings the method 'mine', which the plug-in .*a/mine"):
        load_methods(paths)


BAD_SETTINGS = {
    "unknown": ({"sise": 1}, "algorithm.kwargs has sise, which is no setting of mine; did you me"),
    "its own": ({"size": 10}, "algorithm.kwargs.size is too large."),
    "a type": ({"size": "many"}, "mine cannot be made with algorithm.kwargs={'size': 'many'}: Ty"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_that_the_method_refuses_are_named(case: str, tmp_path: Path) -> None:
    kwargs, sentence = BAD_SETTINGS[case]
    with pytest.raises(UserError) as caught:
        own_credit(config(plugin(tmp_path), **kwargs))
    assert sentence in str(caught.value)


BAD_METHODS = {
    "no class": ("METHODS = {'mine': CreditPlugin(lambda s: 3, Settings)}", "it has no requires"),
    "half of one": (
        """
        class Half:
            requires = provides = ()
            grain = Grain.GROUP
            needs_group = False
            def apply(self, table, previous=None): ...
        METHODS = {'mine': CreditPlugin(lambda s: Half(), Settings)}
        """,
        "because it has no paid, state_dict, load_state_dict: inherit from",
    ),
    "no dataclass": ("METHODS = {'mine': CreditPlugin(Mine, dict)}", "are no dataclass"),
    "a crash": (
        "METHODS = {'mine': CreditPlugin(lambda s: {}['x'], Settings)}",
        "mine cannot be made with algorithm.kwargs={}: KeyError: 'x' (mine_file.py, line ",
    ),
}


@pytest.mark.parametrize("case", BAD_METHODS)
def test_objects_that_are_no_method_are_refused(case: str, tmp_path: Path) -> None:
    body, sentence = BAD_METHODS[case]
    with pytest.raises(UserError) as caught:
        own_credit(config(plugin(tmp_path, body)))
    assert sentence in str(caught.value)


def test_an_unknown_name_gets_the_nearest_of_all_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean mine"):
        own_credit(config(plugin(tmp_path), "min"))


def test_A16_games_alone_are_refused_where_siblings_are_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the group size is 1"):
        own_credit(config(plugin(tmp_path), games=1))


def test_kwargs_of_a_method_of_the_package_are_refused() -> None:
    words = ["experiment=starpo_quickstart", "algorithm.kwargs.decay=0.5"]
    with pytest.raises(UserError, match=r"algorithm\.kwargs is for methods of plug-ins, and grpo"):
        prepare(words)
    with pytest.raises(UserError, match=r"does not know late_turns.*or name its plug-in"):
        prepare(["experiment=starpo_quickstart", "algorithm.adv_estimator=late_turns"])
