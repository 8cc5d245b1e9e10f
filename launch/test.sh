#!/usr/bin/env bash
# All linters and all tests on a fresh machine: `bash launch/test.sh [VENV]`. Hardware that nvidia-smi lists is required:
# a test that would be skipped there fails.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
gpus=$(grep -c . <<<"$capabilities" || true)
require=(--require triton)
[ "$gpus" -gt 0 ] || export TRITON_INTERPRET=1
if grep -qx 9.0 <<<"$capabilities"; then require+=(--require sm90); fi
# Four ranks share fewer GPUs through gloo, so there NCCL is not required of them.
on_ranks=("${require[@]}")
if [ "$gpus" -ge 2 ]; then require+=(--require multigpu); fi
if [ "$gpus" -ge 4 ]; then on_ranks+=(--require multigpu); fi

step() {
    echo "== $*"
    SECONDS=0
    "$@"
    echo "== ${SECONDS} s"
}

step ruff check .
step ruff format --check .
find csrc tests/emulated -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | step xargs -r clang-format --dry-run --Werror
step mypy
# A worker a core, with one thread each; a GPU is shared by no more than 8.
workers=$(nproc)
[ "$gpus" -eq 0 ] || [ "$workers" -le 8 ] || workers=8
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
step python -m pytest -q -n "$workers" --dist worksteal --durations=10 "${require[@]}" --ignore=tests/multigpu tests
step torchrun --nproc-per-node 4 -m pytest -q "${on_ranks[@]}" tests/multigpu
