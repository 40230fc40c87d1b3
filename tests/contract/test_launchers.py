"""Every launch script runs in dry-run form and asks for what the published script of its name asks.

The scripts are run by bash. The interpreter that they are given writes down the arguments of
``train.py`` before it runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig, leaves, lookup
from tests.launch_lines import filled

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "launch_train_8xa100.sh": ("train_8xa100_paper", "train_8xa100_paper"),
    "launch_train_8xa100_awq.sh": ("train_8xa100_awq_dp7", "train_8xa100_awq_dp7"),
    "scripts/train/delta-belief-rl/qwen1.7b.sh": ("paper_qwen1.7b", "train_delta_belief_qwen1.7b"),
    "scripts/train/delta-belief-rl/qwen4b.sh": ("paper_qwen4b", "train_delta_belief_qwen4b"),
    "scripts/train/grpo/qwen1.7b.sh": ("starpo_qwen1.7b", "train_grpo_qwen1.7b"),
    "scripts/train/grpo/qwen4b.sh": ("starpo_qwen4b", "train_grpo_qwen4b"),
    "scripts/eval/twenty_questions.sh": ("eval_twenty_questions", "twenty_questions"),
    "scripts/eval/guess_my_city.sh": ("eval_guess_my_city", "guess_my_city"),
    "scripts/eval/murder_mystery.sh": ("eval_murder_mystery", "murder_mystery"),
    "scripts/eval/customer_service.sh": ("eval_customer_service", "customer_service"),
    "scripts/eval/user_personalization.sh": ("eval_user_personalization", ""),
}
"""Script to (experiment, published launch line); empty where none was published."""
ONE_GPU = tuple(
    f"scripts/eval/{name}.sh"
    for name in ("murder_mystery", "customer_service", "user_personalization")
)
"""Scripts whose judge is behind an API."""
VARIABLES = ("BASE_MODEL", "ORACLE_MODEL", "EXPERIMENT_NAME", "WANDB_PROJECT", "SEED")
RECORDER = """#!/usr/bin/env bash
if [[ ${{1:-}} == train.py ]]; then
  printf '%s\\0' "${{@:2}}" >"{record}"
  printf '%s\\n' "${{VLLM_DISABLED_KERNELS:-}}" "$PWD" >"{record}.env"
  [[ -z ${{RECORD_ONLY:-}} ]] || exit 0
fi
exec {python} "$@"
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """An interpreter that tells what it was asked; ``words.txt`` beside it is what it writes."""
    path = tmp_path / "python"
    path.write_text(RECORDER.format(record=tmp_path / "words.txt", python=sys.executable))
    path.chmod(0o755)
    return path


def bash(script: Path, *words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    apart = (*VARIABLES, "CUDA_VISIBLE_DEVICES", "VLLM_DISABLED_KERNELS", "SLURM_SUBMIT_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in apart}
    return subprocess.run(
        ["bash", str(script), *words],
        cwd=cwd,
        env=environment | {"HF_HUB_OFFLINE": "1", "DELTA_BELIEF_CACHE": str(cwd)} | more,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def asked(recorder: Path) -> list[str]:
    """The arguments that ``train.py`` got."""
    return recorder.with_name("words.txt").read_text().split("\0")[:-1]


def composed(words: list[str]) -> RunConfig:
    config, _ = load_config([word for word in words if word != "--dry-run"])
    return config


def test_every_launch_script_has_a_case_here() -> None:
    found = [*ROOT.glob("launch*.sh"), *ROOT.glob("scripts/train/**/*.sh")]
    found += ROOT.glob("scripts/eval/*.sh")
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_U5_a_launch_script_prints_its_plan_from_any_folder(
    name: str, recorder: Path, tmp_path: Path
) -> None:
    experiment, line = SCRIPTS[name]
    done = bash(ROOT / name, "--dry-run", cwd=tmp_path, PYTHON=str(recorder))
    assert done.returncode == 0, done.stderr
    run = experiment if name.startswith("scripts/eval/") else line
    assert done.stdout.startswith(f"Plan of delta_belief_rl/{run} (seed 42)\n")
    gpus = 8 if "8xa100" in name else 1 if name in ONE_GPU else 2
    words = [f"experiment={experiment}", f"trainer.n_gpus_per_node={gpus}", "--dry-run"]
    assert asked(recorder) == words
    ours, (plain, _) = composed(words), load_config([f"experiment={experiment}"])
    differ = [n for n, *_ in leaves(RunConfig) if lookup(ours, n) != lookup(plain, n)]
    assert differ == ["trainer.n_gpus_per_node"]
    kernel, folder = recorder.with_name("words.txt.env").read_text().splitlines()
    assert kernel == ("MarlinLinearKernel" if name.endswith("awq.sh") else "")
    assert Path(folder) == ROOT


@pytest.mark.parametrize("name", [name for name, (_, line) in SCRIPTS.items() if line])
def test_U5_a_launch_script_with_its_variables_is_the_published_launch_line(
    name: str, recorder: Path, tmp_path: Path
) -> None:
    _, line = SCRIPTS[name]
    done = bash(
        ROOT / name,
        "--dry-run",
        cwd=tmp_path,
        PYTHON=str(recorder),
        RECORD_ONLY="1",
        BASE_MODEL="org/policy",
        ORACLE_MODEL="org/judge",
        EXPERIMENT_NAME=line,
        WANDB_PROJECT="delta_belief_rl",
        SEED="42",
    )
    assert done.returncode == 0, done.stderr
    ours, (theirs, _) = composed(asked(recorder)), load_config(filled(line))
    # Files of a run lie in its own folder here, and the older name of the data folder is gone.
    free = ["trainer.validation_data_dir", "trainer.rollout_data_dir"]
    if "grpo" in name:
        free += ["data.train_files", "data.val_files"]
    if "eval" in name:
        # An evaluation needs neither an optimizer nor an adapter nor training secrets.
        free += ["data.train_files", "actor_rollout_ref.actor.fsdp_config.optimizer_offload"]
        free += ["actor_rollout_ref.model.adapters"]
    if name in ONE_GPU:
        # The recorded line was filled in for two. A judge behind an API is sampled by its own
        # published numbers, which are no settings of the line.
        free += ["trainer.n_gpus_per_node"]
        free += [f"judge_rollout.rollout.val_kwargs.{part}" for part in ("top_p", "top_k")]
    for setting, *_ in leaves(RunConfig):
        if setting not in free:
            assert lookup(ours, setting) == lookup(theirs, setting), setting


def test_variables_and_settings_reach_the_run_whatever_they_hold(
    recorder: Path, tmp_path: Path
) -> None:
    script = ROOT / "scripts/train/delta-belief-rl/qwen1.7b.sh"
    odd = "/models/it's, a=b (1)/policy"
    done = bash(
        script,
        "trainer.total_epochs=3",
        "seed=9",
        "--dry-run",
        cwd=tmp_path,
        PYTHON=str(recorder),
        RECORD_ONLY="1",
        BASE_MODEL=odd,
        EXPERIMENT_NAME="mine",
        WANDB_PROJECT="project",
        SEED="7",
        CUDA_VISIBLE_DEVICES="3,5",
    )
    assert done.returncode == 0, done.stderr
    config = composed(asked(recorder))
    assert config.actor_rollout_ref.model.path == odd
    assert (config.trainer.project_name, config.trainer.experiment_name) == ("project", "mine")
    assert config.trainer.output_dir == "outputs/project/mine"
    assert (config.trainer.total_epochs, config.seed) == (3, 9)
    assert config.trainer.n_gpus_per_node == 2


def test_U5_a_copy_that_a_batch_system_made_finds_the_repository(
    recorder: Path, tmp_path: Path
) -> None:
    spool = tmp_path / "spool" / "job1"
    spool.mkdir(parents=True)
    for name in ("launch_train_8xa100.sh", "scripts/train/grpo/qwen4b.sh"):
        copy = spool / "slurm_script"
        shutil.copy(ROOT / name, copy)
        done = bash(copy, "--dry-run", cwd=ROOT, PYTHON=str(recorder), SLURM_SUBMIT_DIR=str(ROOT))
        assert done.returncode == 0, done.stderr
        lost = bash(copy, "--dry-run", cwd=tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
        assert lost.returncode == 2
        assert "is not the repository: submit the job from its folder" in lost.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_H6_a_job_whose_time_ends_is_announced_requeued_and_goes_on(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    header = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    # The log of a requeued job goes on, too.
    assert {"signal=B:USR1@180", "requeue", "open-mode=append", "nodes=1"} <= set(header)
    # The shell that gets the signal becomes the one that passes it on.
    assert lines[-1].startswith('exec bash "$root/scripts/launch.sh" ')
    config = composed([f"experiment={SCRIPTS[name][0]}"])
    assert config.trainer.val_only or config.trainer.resume_mode == "auto"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("absent", "there is no Python at"),
        ("old", "is no Python 3.11 or newer"),
        ("bare", "lacks the package: run"),
    ],
)
def test_a_machine_without_what_is_needed_ends_with_status_two_and_one_sentence(
    kind: str, expected: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    if kind != "absent":
        # An interpreter that answers every question with no, or only the one for its version.
        allowed = "*version_info*) exit 0 ;;" if kind == "bare" else ""
        python.write_text(f'#!/usr/bin/env bash\ncase "$2" in\n{allowed}\n*) exit 1 ;;\nesac\n')
        python.chmod(0o755)
    done = bash(ROOT / "launch_train_8xa100.sh", "--dry-run", cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_mistake_in_a_setting_keeps_its_status_and_its_sentence(
    recorder: Path, tmp_path: Path
) -> None:
    script = ROOT / "scripts/eval/twenty_questions.sh"
    done = bash(script, "trainer.sed=1", cwd=tmp_path, PYTHON=str(recorder))
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ")
    assert len(done.stderr.splitlines()) == 1


def test_F5_scripts_say_what_they_do_and_name_no_secret() -> None:
    run = [ROOT / name for name in (*SCRIPTS, "scripts/launch.sh")]
    sourced = ROOT / "scripts" / "slurm_setup.sh"
    for path in run:
        assert "set -euo pipefail" in path.read_text()
        assert os.access(path, os.X_OK), path
    # What is sourced leaves the options of the shell as they are.
    assert "\nset " not in sourced.read_text()
    for path in (*run, sourced):
        text = path.read_text()
        assert text.startswith("#!/usr/bin/env bash\n")
        for word in ("TOKEN", "API_KEY", "printenv", "declare -p", "\nenv"):
            assert word not in text, f"{path}: {word}"


def test_U5_the_documented_job_runs_and_its_variables_are_those_of_the_script(
    recorder: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    job = next(b for b in re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S) if "#!" in b)
    script = tmp_path / "job.sh"
    script.write_text(job.rstrip("\n") + " --dry-run\n")
    # The page says python, as one has it in an environment that is active.
    path = f"{recorder.parent}:{os.environ['PATH']}"
    done = bash(script, cwd=ROOT, PATH=path)
    assert done.returncode == 0, done.stderr
    assert "\nPlan of " in done.stdout
    config = composed(asked(recorder))
    assert config.trainer.resume_mode == "auto"
    setup = (ROOT / "scripts" / "slurm_setup.sh").read_text()
    documented = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", page, re.M))
    assert dict(re.findall(r"\$\{([A-Z_]+):-(\d+)\}", setup)) == documented
    stop, announced = documented["STOP_WITHIN_S"], re.search(r"USR1@(\d+)", job)
    assert announced is not None
    assert int(stop) < int(announced[1])
