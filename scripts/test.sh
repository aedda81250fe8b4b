#!/usr/bin/env bash
# Environment, install, lint, types, layers, tests. Any arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh dev
bin=.venv/bin
echo "== ruff";        $bin/ruff format --check . && $bin/ruff check .
echo "== mypy";        $bin/mypy
echo "== layers";      $bin/lint-imports
echo "== pytest";      $bin/python -m pytest -q --durations=10 "$@"
