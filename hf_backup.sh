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

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

# Found from any folder, because relative paths are those of the caller.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
find_python "$root" delta_belief_rl.cli.hub

# In place of this shell, so that a batch system's signal reaches the upload itself.
exec "$python" -m delta_belief_rl.cli.main backup "$@"
