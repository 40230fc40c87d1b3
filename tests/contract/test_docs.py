"""Commands and links of README.md and docs/ hold."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LIMIT_SECONDS = 120


def commands(page: Path) -> list[str]:
    """Lines of the page's ``bash`` blocks, continued lines joined, comments left out."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            text = " ".join(line.removeprefix("$ ").split("  #")[0].split())
            if text and not text.startswith("#"):
                found.append(text)
    return found


def all_commands(*heads: str) -> list[str]:
    """Different commands of all pages that begin with one of some heads."""
    every = dict.fromkeys(text for page in PAGES for text in commands(page))
    return [text for text in every if text.startswith(heads)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("command", all_commands("python train.py"))
def test_U5_every_training_command_has_a_plan(command: str) -> None:
    done = run(sys.executable, *shlex.split(command)[1:], "--dry-run")
    assert done.returncode == 0, done.stderr[-2000:]


def test_U5_every_verb_exists() -> None:
    for verb in {shlex.split(command)[1] for command in all_commands("delta-belief ")}:
        done = run(sys.executable, "-m", "delta_belief_rl.cli.main", verb, "--help")
        assert done.returncode == 0, f"{verb}: {done.stderr[-2000:]}"


def test_U5_every_make_target_exists() -> None:
    for command in all_commands("make "):
        done = run(*shlex.split(command), "--dry-run")
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_headings(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text()):
        name, anchor = link.split("#", 1)
        target = page if not name else page.parent / name
        if re.match(r"[a-z]+:", link) or target.suffix != ".md" or not target.exists():
            continue
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)
        slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        if anchor not in slugs:
            missing.append(link)
    assert missing == []
