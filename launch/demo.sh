#!/usr/bin/env bash
# The main job on a fresh machine: a text scored by a small language model whose head is sharded over 1, 2, 3 and 4 ranks, and the
# comparison of the bytes. `bash launch/demo.sh [VENV]`; results go to out/.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

mkdir -p out
for tp in 1 2 3 4; do
    vocabshard score examples/tiny_lm examples/tiny_lm/text.txt --tp "$tp" --out "out/tiny_lm_tp$tp.jsonl"
done
for tp in 2 3 4; do
    echo "== 1 rank against $tp"
    vocabshard compare out/tiny_lm_tp1.jsonl "out/tiny_lm_tp$tp.jsonl"
done
echo "The head on 1, 2, 3 and 4 ranks: the same bytes of logp, lse and entropy for every token."
