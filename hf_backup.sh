#!/usr/bin/env bash
# Copies a run's checkpoints to the Hugging Face hub, compares them, and brings them back:
#
#   ./hf_backup.sh upload RUN_DIR REPO_ID [--watch SECONDS] [--public]
#   ./hf_backup.sh verify RUN_DIR REPO_ID
#   ./hf_backup.sh restore REPO_ID OUT [--step N] [--run RUN_ID]
#
#   HF_TOKEN      the token; without it that of `hf auth login`
#   HF_ENDPOINT   another hub
#   PYTHON        the interpreter; the repository's .venv, else python3, by default
#
# It is a process of its own: a training run does not wait for it, nor end with it.
set -euo pipefail

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python="${PYTHON:-}"
if [[ -z $python ]]; then
  python=python3
  if [[ -x $root/.venv/bin/python ]]; then
    python="$root/.venv/bin/python"
  fi
fi
command -v "$python" >/dev/null 2>&1 ||
  fail "there is no Python at '$python': install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 ||
  fail "'$python' is no Python 3.11 or newer: set PYTHON to one"

# Found from any folder, because relative paths are those of the caller.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import delta_belief_rl.cli.hub' >/dev/null 2>&1 ||
  fail "'$python' lacks the package: run $python -m pip install -e '$root'"

# In place of this shell, so that a batch system's signal reaches the upload itself.
exec "$python" -m delta_belief_rl.cli.main backup "$@"
