#!/usr/bin/env bash
# Starts one experiment with the environment variables of the published scripts:
#
#   scripts/launch.sh EXPERIMENT [--dry-run] [key=value ...]
#
#   BASE_MODEL             the policy's model              (actor_rollout_ref.model.path)
#   ORACLE_MODEL           the judge's model               (judge_rollout.model.path)
#   ORACLE_SETTING         that setting, for a judge behind an API
#   EXPERIMENT_NAME        the run's name                  (trainer.experiment_name)
#   WANDB_PROJECT          the project                     (trainer.project_name)
#   SEED                   the seed                        (seed)
#   CUDA_VISIBLE_DEVICES   the GPUs; their number goes to  (trainer.n_gpus_per_node)
#   NNODES                 the machines; SLURM's unless given (trainer.nnodes)
#   PYTHON                 the interpreter; the repository's .venv, else python3, by default
#
# A variable that is unset or empty leaves the experiment's own value. Settings behind the
# experiment come last and win. Relative paths are those of the repository. What happens before
# and after the run, and when a batch system cuts it short, is in scripts/slurm_setup.sh.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

[[ $# -ge 1 ]] || fail "an experiment is needed: scripts/launch.sh EXPERIMENT [key=value ...]"
experiment="$1"
shift

cd "$root"
find_python "$root" delta_belief_rl.cli.front

settings=()

# A value in single quotes may hold anything; Hydra reads a backslash before a quote as the quote.
setting() {
  if [[ -n $2 ]]; then
    settings+=("$1='${2//\'/\\\'}'")
  fi
}

setting actor_rollout_ref.model.path "${BASE_MODEL:-}"
setting "${ORACLE_SETTING:-judge_rollout.model.path}" "${ORACLE_MODEL:-}"
setting trainer.experiment_name "${EXPERIMENT_NAME:-}"
setting trainer.project_name "${WANDB_PROJECT:-}"
if [[ -n ${SEED:-} ]]; then
  settings+=("seed=$SEED")
fi
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  IFS=, read -r -a gpus <<<"$CUDA_VISIBLE_DEVICES"
  settings+=("trainer.n_gpus_per_node=${#gpus[@]}")
fi
nodes="${NNODES:-${SLURM_JOB_NUM_NODES:-1}}"
if [[ $nodes != 1 ]]; then
  settings+=("trainer.nnodes=$nodes" ray_init.address=auto)
fi

run=("$python" train.py "experiment=$experiment" ${settings[@]+"${settings[@]}"} "$@")
for word in "$@"; do
  if [[ $word == --dry-run ]]; then
    exec "${run[@]}"
  fi
done

# shellcheck source=scripts/slurm_setup.sh
source "$root/scripts/slurm_setup.sh"
job_run "${run[@]}"
