#!/usr/bin/env bash
# The source distribution, and whether it installs and works in a fresh environment: `bash launch/package.sh [DIST]`.
# Everything it needs (torch too) comes from the package index; the folder DIST (default dist) gets the .tar.gz.
# Without CUDA's compiler, or with VOCABSHARD_CUDA=0, the package is built for the CPU alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dist=${1:-dist}
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

"${PYTHON:-python3}" -m venv "$away/venv"
python=$away/venv/bin/python
"$python" -m pip install --quiet 'setuptools>=77' build
"$python" -m build --sdist --outdir "$dist" . >"$away/log" || { cat "$away/log"; exit 1; }
sdist=$(ls -t "$dist"/vocabshard-*.tar.gz | head -1)
"$python" -m pip install --quiet "$sdist" "$(grep '^torch==' launch/requirements.txt)" "$(grep '^numpy==' launch/requirements.txt)"
cp launch/smoke.py "$away"
cd "$away"
"$python" smoke.py
echo "$sdist installs and works in a fresh environment."
