"""Clinical cases train and validate through the same loop as everything else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.envs.clinical.game import ClinicalCase
from delta_belief_rl.envs.clinical.report import by_stratum
from delta_belief_rl.types import StopReason, Verdict
from tests import tiny_runs
from tests.runs import play
from tests.tiny_runs import played, write_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("model"))


def command(out: Path, model: Path, *more: str) -> list[str]:
    tasks = "multi_turn.env_kwargs.tasks={train: 8, val: 3}"
    return tiny_runs.command(out, model, "clinical", tasks, *more)


def test_the_configured_environment_keeps_the_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli(["check-env", "env=clinical", "judge=rules", "--tasks", "12"]) == 0
    said = capsys.readouterr().out
    assert "keeps the contract" in said
    assert "of 288 tasks" in said
    assert said.count("of 72 tasks") == 2


@pytest.mark.slow
def test_clinical_cases_train_and_validate_through_the_loop(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "run"
    run = played(out, command(out, model))
    assert all(record["judge/error_rate"] == 0.0 for record in run.trained)
    assert all(record["actor/grad_norm"] > 0 for record in run.trained)
    games = run.games
    assert len(games) == 8
    assert {game.task.source for game in games} <= {"clinical_low", "clinical_high"}
    assert {game.stop for game in games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL
    }  # fmt: skip
    assert all(game.count(Verdict.ERROR) == 0 for game in games)
    for game in games:
        fresh = ClinicalCase(game.task, max_turns=3)
        for turn in game.turns:
            # What is stored is what a replay of the case finds.
            assert turn.uncertainty is not None
            assert turn.truth_logp is not None
            assert math.isclose(turn.uncertainty[0], fresh.uncertainty()[0], abs_tol=1e-12)
            outcome = fresh.apply(fresh.parse(turn.action), None)
            assert (outcome.verdict, outcome.reply) == (turn.verdict, turn.reply)
            assert math.isclose(turn.truth_logp[1], fresh.uncertainty()[1], abs_tol=1e-12)
    assert by_stratum(games)["all"].games == len(games)
    assert len(run.validated) == 3 * 2
    # A validation says by stratum what its games did.
    told, found = run.records[-1], by_stratum(run.validated)
    assert told["val-aux/clinical/all/games"] == len(run.validated)
    for name, report in found.items():
        assert told[f"val-aux/clinical/{name}/value"] == pytest.approx(report.value)
        assert told[f"val-aux/clinical/{name}/questions"] == pytest.approx(report.questions)


@pytest.mark.slow
def test_A13_questions_are_paid_in_a_run(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "run"
    more = ["algorithm=clinical", "algorithm.clinical.cost=0.25"]
    run = played(out, command(out, model, *more))
    assert all("critic/channel_sum/question" in record for record in run.trained)
    names = {name for record in run.records for name in record}
    assert any(name.startswith("val-aux/clinical_low/score/mean@") for name in names)


def test_A13_an_environment_without_a_posterior_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["env=errands", "algorithm.clinical.enabled=true"]
    status, _ = play([*command(tmp_path / "run", model), *more])
    assert status == 2
    assert "needs the hook uncertainty" in capsys.readouterr().err
