"""What environments with made tasks read alike from their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delta_belief_rl.envs.clinical.settings import read_settings as clinical
from delta_belief_rl.envs.env_kwargs import seed_of, tasks_of
from delta_belief_rl.envs.errands.settings import read_settings as errands
from delta_belief_rl.types import UserError

DEFAULT = {"train": 9, "val": 3, "test": 2}
READERS = (clinical, errands)


def test_a_split_that_is_left_out_has_no_tasks_and_without_any_the_default_holds() -> None:
    assert tasks_of({}, DEFAULT, 10) == (("train", 9), ("val", 3), ("test", 2))
    assert tasks_of({"tasks": {"val": 10}}, DEFAULT, 10) == (("train", 0), ("val", 10), ("test", 0))
    assert (seed_of({}), seed_of({"seed": 7})) == (0, 7)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"seeds": 1}, r"multi_turn\.env_kwargs has no key 'seeds': did you mean seed\?"),
        ({"qqqq": 1}, r"multi_turn\.env_kwargs has no key 'qqqq': it has seed, tasks"),
        ({"seed": -1}, r"env_kwargs\.seed is -1: give a whole number from 0 to 2147483647"),
        ({"seed": True}, r"env_kwargs\.seed is True"),
        ({"tasks": 8}, r"env_kwargs\.tasks is 8: give the number of \w+ of each split, e\.g\. {tr"),
        ({"tasks": {"trian": 8}}, r"env_kwargs\.tasks has no key 'trian': did you mean train\?"),
        ({"tasks": {"val": 2.0}}, r"env_kwargs\.tasks\.val is 2\.0: give a whole number from 0"),
        ({"tasks": {"val": 1_000_001}}, r"env_kwargs\.tasks\.val is 1000001"),
    ],
)
def test_each_environment_refuses_what_is_no_seed_and_no_number_of_tasks(
    read: Callable[[dict[str, Any]], object], kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        read(kwargs)
