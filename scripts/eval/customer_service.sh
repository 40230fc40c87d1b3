#!/usr/bin/env bash
#SBATCH --job-name=eval_customer_service
#SBATCH --output=%x-%j.log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Evaluates a policy on the test scenarios of Customer Service, one GPU; the judge is behind an API.
#
#   scripts/eval/customer_service.sh [--dry-run] [key=value ...]
#
# Runs with bash from any folder, and with sbatch from the repository's. scripts/launch.sh says
# which environment variables it knows.
set -euo pipefail

# sbatch runs a copy of this file elsewhere, and starts it where it was submitted.
root="$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ! -f $root/scripts/launch.sh ]]; then
  root="${SLURM_SUBMIT_DIR:-$PWD}"
fi
if [[ ! -f $root/scripts/launch.sh ]]; then
  echo "customer_service.sh: '$root' is not the repository: submit the job from its folder" >&2
  exit 2
fi

# ORACLE_MODEL names the model at the API.
export ORACLE_SETTING=judge_rollout.model.api_model_name
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
exec bash "$root/scripts/launch.sh" eval_customer_service "$@"
