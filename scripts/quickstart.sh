#!/usr/bin/env bash
# Sets up, prepares tiny Shakespeare, trains a small GPT on its characters on whatever device is here, prints a sample.
# On two CPU cores about 3 minutes with the set-up. Arguments go to train.py; paths are relative to the repository.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
[ -f data/shakespeare_char/train.bin ] || "$PYTHON" data/shakespeare_char/prepare.py
config=$("$PYTHON" -c 'import torch; print("train_shakespeare_char" + "_cpu" * (not torch.cuda.is_available()))')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # so small a model gains nothing from more, and loses much on a busy machine
out=out-quickstart      # its own, so that it may be written anew each time
for argument; do case $argument in --out_dir=*) out=${argument#*=};; esac; done
overwrite=$([ "$out" != out-quickstart ] || echo --overwrite=True)
"$PYTHON" train.py "config/$config.py" --out_dir="$out" $overwrite "$@"
"$PYTHON" scripts/sample.py --out_dir="$out" --num_samples=1
