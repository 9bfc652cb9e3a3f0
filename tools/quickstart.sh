#!/usr/bin/env bash
# From a fresh clone to a trained model: set up, prepare the model, train 40 steps on two CPU cores, check that it learned.
# Ends with a non-zero status if any part fails or if the reward has not risen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"

MODEL=models/SmolLM2-135M-Instruct
if [ ! -f "$MODEL/config.json" ]; then
    python tools/prepare_model.py --out "$MODEL"
fi

echo "+ deepspeed --num_gpus 2 launchers/train.py --yaml yamls/quickstart_cpu.yaml"
deepspeed --num_gpus 2 launchers/train.py --yaml yamls/quickstart_cpu.yaml

python tools/check_run.py runs/quickstart
echo "quickstart: done in $((SECONDS / 60)) min $((SECONDS % 60)) s; see runs/quickstart/plots"
