#!/usr/bin/env bash
# Sets up, prepares tiny Shakespeare, trains a small GPT on its characters on whatever device is here, prints a sample.
# On two CPU cores three to five minutes with the set-up. Arguments go to train.py; paths are relative to the
# repository.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
[ -f data/shakespeare_char/train.bin ] || "$PYTHON" data/shakespeare_char/prepare.py
config=config/train_shakespeare_char.py
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    config=config/train_shakespeare_char_cpu_fast.py
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # so small a model gains nothing from more, and loses much on a busy machine
out=out-quickstart
before=
for argument; do        # as train.py takes it: --out_dir=NAME, --out-dir=NAME, --out_dir NAME
    case $argument in --out[_-]dir=*) out=${argument#*=} ;; esac
    case $before in --out[_-]dir) out=$argument ;; esac
    before=$argument
done
overwrite=False
if [ "$out" = out-quickstart ]; then
    overwrite=True      # it is this script's own, and written anew each time
fi
"$PYTHON" train.py "$config" --out_dir="$out" --overwrite="$overwrite" "$@"
"$PYTHON" scripts/sample.py --out_dir="$out" --num_samples=1
if [ "$PYTHON" = "$PWD/.venv/bin/python" ]; then
    echo 'before other commands: source .venv/bin/activate'
fi
