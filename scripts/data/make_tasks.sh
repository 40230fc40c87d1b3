#!/usr/bin/env bash
# Makes the packaged task files anew from their word lists; the result equals what is there.
#
#   scripts/data/make_tasks.sh                    writes beside the word lists
#   scripts/data/make_tasks.sh /some/folder cot   writes elsewhere, with another prompt
#
# PYTHON names the interpreter (python3 by default).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
words="$root/delta_belief_rl/assets/tasks/twenty_questions"
folder="${1:-$words}"
prompt="${2:-direct}"

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
for split in train val test; do
  "${PYTHON:-python3}" -m delta_belief_rl.cli.main data make "$words/$split.txt" \
    --split "$split" --prompt "$prompt" --aliases "$words/aliases.txt" \
    --out "$folder/$split.parquet"
done
