# Sourced by demo.sh and test.sh: the environment in $1 (default .venv), made and filled where it isn't, and activated.
# PYTHON chooses the interpreter that makes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
. "$venv/bin/activate"
python -m pip install --quiet -r launch/requirements.txt
# Torch for CUDA brings the triton it was built for; for the CPU's interpreter the version matters (3.6.0 with numpy 2.2.6).
python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' || python -m pip install --quiet triton==3.6.0
python -m pip install --quiet --no-build-isolation --editable '.[test,dev,plot]'
