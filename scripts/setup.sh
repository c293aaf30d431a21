# Sourced by quickstart.sh and test.sh: leaves $PYTHON, an interpreter that has what requirements.txt asks for.
# An active virtual environment, or a Python that has torch already, is used as it is; otherwise one is made in .venv.
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."    # a CDPATH of the user could lead elsewhere
has_torch='import re, torch; assert tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 11)'
PYTHON=${PYTHON:-python3}
if [ -z "${VIRTUAL_ENV:-}" ] && ! "$PYTHON" -c "$has_torch" 2>/dev/null; then
    [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
    PYTHON=$PWD/.venv/bin/python
fi
if "$PYTHON" -c "$has_torch" 2>/dev/null; then    # whatever torch is there stays, also one newer than requirements.txt
    grep -v '^torch' requirements.txt | "$PYTHON" -m pip install -q --disable-pip-version-check -r /dev/stdin
else
    "$PYTHON" -m pip install -q --disable-pip-version-check -r requirements.txt
fi
