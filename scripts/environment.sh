#!/usr/bin/env bash
# Makes or updates the virtual environment in .venv with the extras named in $1 (e.g. "dev"); sourced by the other scripts.
# Set COMPOSER2_PYTHON to choose another interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${COMPOSER2_PYTHON:-python3}"
extras="${1:-}"
if [ ! -x .venv/bin/python ]; then
  echo "Making the virtual environment in .venv …"
  "$python" -m venv .venv
fi
stamp=".venv/.installed-${extras:-core}"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  echo "Installing composer2${extras:+[$extras]} …"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}"
  touch "$stamp"
fi
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
