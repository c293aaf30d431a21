#!/usr/bin/env bash
# Sets up and runs all tests. Arguments go to pytest, for example: scripts/test.sh -k ddp
# scripts/test.sh quick: what to run after each edit, within a minute on two cores: the model, the settings, the kernels,
# ghost against autograd, and a short run of each mode.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
"$PYTHON" -m pip install -q --disable-pip-version-check -r tests/requirements.txt
tests=()
if [ "${1:-}" = quick ]; then
    shift
    tests=(tests/test_model.py tests/test_configurator.py tests/test_kernels.py tests/test_quick.py
           tests/test_ghost.py::test_float64_against_brute_force
           --deselect tests/test_configurator.py::test_one_line_under_torchrun)    # that one takes 17 s
fi
# two processes, where there are two cores, that take a file each in turn, in conftest.py's order
"$PYTHON" -m pytest -n logical --maxprocesses=2 --dist=loadfile --no-loadscope-reorder ${tests[@]+"${tests[@]}"} "$@"
