#!/bin/sh
# The whole run on one GPU machine: tokenise while the model is prepared, train, evaluate, save.
#
#   OUT=results run_gpu.sh SECONDS     ends after about SECONDS of wall-clock time; longer is better
#
# TOKENS (a folder) and STATE (a file) stay behind: a second run continues from them.
set -eu
began=$(date +%s)
: "${OUT:?a folder for results}" "${TOKENS:=/tmp/tiny-hybrid-tokens}" "${STATE:=/tmp/tiny-hybrid-state.pt}" "${PYTHON:=python3}"
export TOKENIZERS_PARALLELISM=true PYTHONUNBUFFERED=1
mkdir -p "$TOKENS" "$OUT"
$PYTHON -m recipes.tiny_hybrid.tokens --corpora .corpora --tokenizer data/models/tiny-hybrid --heldout data/heldout --out "$TOKENS" &
$PYTHON -m recipes.tiny_hybrid.train --tokens "$TOKENS" --state "$STATE" --out "$OUT" --deadline $((began + $1 - 12))
wait
echo "done after $(($(date +%s) - began)) s"
