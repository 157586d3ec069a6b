#!/bin/sh
# The whole run on one GPU machine: tokenise while the model is prepared, train, evaluate, save.
#
#   OUT=results run_gpu.sh SECONDS [options of train.py]     ends after about SECONDS of wall-clock time; longer is better
#
# OUT gets at most 8 files below 16 MiB: the weights in parts, training.json and corpora.json, also while the run goes on.
# TOKENS (a folder) and STATE (a file) stay behind: a second call on the same machine goes on from them. On another
# machine `--start FOLDER` begins with the weights of OUT, or with data/models/tiny-hybrid. A signal ends the run in order.
set -eu
began=$(date +%s)
: "${OUT:?a folder for results}" "${CORPORA:=.corpora}" "${TOKENS:=/tmp/tiny-hybrid-tokens}"
: "${STATE:=/tmp/tiny-hybrid-state.pt}" "${PYTHON:=python3}"
seconds=${1:?how long the whole may take, in seconds}
shift
export TOKENIZERS_PARALLELISM=true PYTHONUNBUFFERED=1
mkdir -p "$TOKENS" "$OUT"
cp "$CORPORA/corpora.json" "$OUT"
exec "$PYTHON" -m recipes.tiny_hybrid.train --corpora "$CORPORA" --tokens "$TOKENS" --state "$STATE" --out "$OUT" \
    --deadline $((began + seconds - 12)) "$@"
