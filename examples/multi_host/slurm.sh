#!/bin/sh
#SBATCH --job-name=sparsejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#
# As a job of Slurm, from the root of the repository, which all nodes see:
#
#     sbatch examples/multi_host/slurm.sh examples.multi_host.train --steps 100
#
# JAX reads the coordinator, the number of tasks and each one's rank from Slurm's variables,
# and gives a task the GPU of its place on the node: with several GPUs a node, either
# --ntasks-per-node and --gpus-per-node are that number, or one task has all of them, with
# JAX_LOCAL_DEVICE_IDS=0,1,2,3.
set -eu
exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m examples.multi_host.start "$@"
