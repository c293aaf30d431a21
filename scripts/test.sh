#!/usr/bin/env bash
# Sets up and runs the tests, the quick ones first. Arguments go to pytest, for example: scripts/test.sh -k ddp
set -euo pipefail
. "$(dirname "$0")/setup.sh"
"$PYTHON" -m pip install -q --disable-pip-version-check -r tests/requirements.txt
"$PYTHON" -m pytest "$@"
