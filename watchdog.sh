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

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

# Found from any folder, because relative paths are those of the caller.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
find_python "$root" delta_belief_rl.cli.watchdog

# In place of this shell, so that a batch system's signal reaches the watchdog itself.
exec "$python" -m delta_belief_rl.cli.main watchdog "$@"
