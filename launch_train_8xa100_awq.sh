#!/usr/bin/env bash
#SBATCH --job-name=train_8xa100_awq_dp7
#SBATCH --output=%x-%j.log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=72:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Belief rewards, Qwen3-1.7B, eight A100: quantised judge, seven replicas of one GPU.
#
#   launch_train_8xa100_awq.sh [--dry-run] [key=value ...]
#
# Runs with bash from any folder, and with sbatch from the repository's. scripts/launch.sh says
# which environment variables it knows.
set -euo pipefail

# sbatch runs a copy of this file elsewhere, and starts it where it was submitted.
root="$(dirname "${BASH_SOURCE[0]}")"
if [[ ! -f $root/scripts/launch.sh ]]; then
  root="${SLURM_SUBMIT_DIR:-$PWD}"
fi
if [[ ! -f $root/scripts/launch.sh ]]; then
  echo "launch_train_8xa100_awq.sh: '$root' is not the repository: submit the job from its folder" >&2
  exit 2
fi

# The kernel that the published run kept vLLM from choosing.
export VLLM_DISABLED_KERNELS="${VLLM_DISABLED_KERNELS-MarlinLinearKernel}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"
exec bash "$root/scripts/launch.sh" train_8xa100_awq_dp7 "$@"
