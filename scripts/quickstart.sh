#!/usr/bin/env bash
# Virtual environment, install, then the tiny run from raw text to its report (15 to 20 minutes on two cores).
# Arguments go to the run, e.g. `bash scripts/quickstart.sh --seed 1`. COMPOSER2_PRESET picks another preset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh data
exec .venv/bin/composer2 train "${COMPOSER2_PRESET:-tiny}" "$@"
