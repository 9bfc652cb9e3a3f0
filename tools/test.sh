#!/usr/bin/env bash
# Run the test suite. Arguments go to pytest: bash tools/test.sh tests/algo -k grpo
#
# Without arguments, the whole suite runs as two sessions side by side: a program that starts leaves cores idle.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
# several processes share the cores: with the default of one thread a core each, they would slow each other down
export OMP_NUM_THREADS=1
(($# == 0)) || exec python -m pytest "$@"

log=$(mktemp)
python -m pytest --durations=30 -m "not program" >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; wait; rm -f "$log"' EXIT
status=0
python -m pytest --durations=30 -m program || status=$?
if wait "$beside"; then tail -n 40 "$log"; else status=$? && cat "$log"; fi
exit "$status"
