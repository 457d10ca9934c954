#!/bin/bash
# Llama 3 8B on four nodes of eight GPUs: sbatch cookbook/slurm.sh CONFIG KEYS. See cookbook/slurm.md.
#SBATCH --job-name=llama3-8b
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120       # two minutes before the limit: save and end in good order
#SBATCH --requeue --open-mode=append
set -euo pipefail
CONFIG=${1:-configs/models/llama3_8b.yaml}
shift || true
# The same command resumes: run.dir is that of the job's name, and every process sees it.
RUN=${RUNS:-$PWD/runs}/${SLURM_JOB_NAME:-llama3-8b}
srun --kill-on-bad-exit=0 python -m mjax.train --config "$CONFIG" "run.dir=$RUN" --restarts 3 "$@"
