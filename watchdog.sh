#!/usr/bin/env bash
# Runs a training for days: starts it again after every end that a new start may mend.
#
#   ./watchdog.sh [OPTIONS] -- COMMAND [ARGS ...]
#   ./watchdog.sh -- bash launch_train_8xa100_awq.sh trainer.resume_mode=auto
#
#   PYTHON   the interpreter; the repository's .venv, else python3, by default
#
# ./watchdog.sh --help lists the options. It ends with the status of the last start, and with 143
# when it was told to end. Relative paths are those of the caller.
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
"$python" -c 'import delta_belief_rl.cli.watchdog' >/dev/null 2>&1 ||
  fail "'$python' lacks the package: run $python -m pip install -e '$root'"

# In place of this shell, so that a batch system's signal reaches the watchdog itself.
exec "$python" -m delta_belief_rl.cli.main watchdog "$@"
