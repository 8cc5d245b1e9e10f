# Sourced by demo.sh and test.sh: the environment in $1 (default .venv), made and filled where it isn't, and activated.
# PYTHON chooses the interpreter that makes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
. "$venv/bin/activate"
# Without bytecode: of thousands of modules, those that are used get theirs when they are imported first.
fetch() { python -m pip install --quiet --no-compile "$@"; }

# The extension compiles while all that the tests need is fetched and unpacked; the last step finds its objects.
fetch 'setuptools>=77' 'pybind11>=2.13'
mkdir -p build
python setup.py --quiet build_ext --inplace >build/log 2>&1 &
fetch -r launch/requirements.txt
# Torch for CUDA brings the triton it was built for; for the CPU's interpreter the version matters (3.6.0 with numpy 2.2.6).
python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' || fetch triton==3.6.0
wait "$!" || { cat build/log >&2 && exit 1; }
fetch --no-build-isolation --editable '.[test,dev,plot]'
