#!/usr/bin/env bash
# Run the test suite; arguments go to pytest: bash tools/test.sh tests/algo -k grpo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
# several processes share the cores: with the default of one thread a core each, they would slow each other down
export OMP_NUM_THREADS=1
exec python -m pytest "$@"
