#!/usr/bin/env bash
# Trains on several nodes under SLURM, one torchrun on each. Submitted again, it goes on from the last checkpoint:
#   sbatch --nodes=4 scripts/slurm.sh config/train_gpt2_xl.py --out_dir=/shared/xl --fsdp_replicate=4
# Arguments go to train.py; out_dir and data/ must be on a disk all nodes see. Partition, account, GPUs and time are
# your cluster's: set them here or on sbatch's command line.
#SBATCH --job-name=flatgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# --signal: SIGTERM to every torchrun five minutes before the end; it hands it to its ranks, and train.py finishes the
# step, saves and exits. --requeue: SLURM itself starts the job again after a node failed.
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit it with sbatch}"
if [ ! -f train.py ]; then
    echo "slurm.sh: no train.py in $PWD; submit it from the folder that holds train.py" >&2
    exit 2
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}                          # the first line; | head could kill scontrol, and so the script
port=$((20000 + SLURM_JOB_ID % 10000))              # jobs that share a node do not meet
gpus=${SLURM_GPUS_ON_NODE:-8}
cpus=${SLURM_CPUS_PER_TASK:-$gpus}
export SRUN_CPUS_PER_TASK=$cpus                     # srun does not take sbatch's by itself
export OMP_NUM_THREADS=$((cpus > gpus ? cpus / gpus : 1))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1         # a restart must not meet the addresses of dead ranks
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270           # seconds torchrun gives its ranks to save; 30 would kill large ones

# c10d: the torchruns meet at the first node and agree on ranks. When a rank dies, all start again from the last
# checkpoint, because of init_from=auto. --kill-on-bad-exit=0: nodes that are done do not end one that still saves.
srun --kill-on-bad-exit=0 torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$gpus" --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" train.py --init_from=auto "$@"
