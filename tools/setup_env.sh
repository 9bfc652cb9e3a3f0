#!/usr/bin/env bash
# Make .venv with the pinned CPU stack, if it isn't there already: sourced or run by quickstart.sh and test.sh.
# A stamp in .venv says what was installed, so that a second call costs nothing and a changed lock is installed again.
#   PYTHON=...   the Python 3.11 to build .venv with (default: python3.11, then python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="torch==2.13.0"
LOCK="requirements/cpu.lock"
STAMP=".venv/rlscale.stamp"
STACK="import deepspeed, megatron.core, transformers.models.auto, vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker"

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 is needed (megatron-core 0.16 and the pinned stack are for it); none found as ${PYTHON:-python3.11 or python3}.
       On Debian 12: apt install python3.11 python3.11-venv python3.11-dev, or set PYTHON=/path/to/python3.11"
}

check_compiler() {
    # with rollout.enforce_eager: false, vLLM and torch compile C++ at run time, which includes Python.h
    command -v "${CXX:-g++}" >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null ||
        fail "a C++ compiler is needed and none was found. On Debian: apt install g++"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "the headers of $1 (Python.h) are needed. On Debian: apt install python3.11-dev"
}

make_venv() {
    if [ -e .venv ] && [ ! -e .venv/pyvenv.cfg ]; then
        fail ".venv exists and is not a virtual environment; move it away"
    fi
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        "$1" -c 'import ensurepip' 2>/dev/null || fail "$1 has no venv module. On Debian: apt install python3.11-venv"
        "$1" -m venv --clear .venv || fail "could not make .venv with $1"
    fi
}

install() {
    local pip=(.venv/bin/python -m pip --disable-pip-version-check -qq install)
    echo "setup: installing $TORCH"
    "${pip[@]}" "$TORCH" || fail "could not install $TORCH (see above)"
    echo "setup: installing $(grep -c '^[^#]' "$LOCK") pinned packages of $LOCK"
    "${pip[@]}" --no-deps --no-compile -r "$LOCK" || fail "could not install $LOCK (see above)"
    "${pip[@]}" --no-deps --no-build-isolation -e . || fail "could not install rlscale itself (see above)"
    # --no-compile leaves out the bytecode of thousands of modules; what a run imports is compiled here, once, also where
    # PYTHONDONTWRITEBYTECODE would have every process of every run do it again
    PYTHONDONTWRITEBYTECODE='' DS_ACCELERATOR=cpu .venv/bin/python -c "$STACK" >/dev/null 2>&1 ||
        fail "the installed stack does not import: .venv/bin/python -c '$STACK'"
}

main() {
    local python wanted
    wanted="$({ echo "$TORCH"; cat "$LOCK" setup.py pyproject.toml; } | sha256sum | cut -d' ' -f1)"
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
        check_compiler .venv/bin/python
        return
    fi
    python="$(find_python)"
    check_compiler "$python"
    echo "setup: making .venv with $("$python" --version), about two minutes and 4 GB"
    make_venv "$python"
    rm -f "$STAMP"
    install
    echo "$wanted" >"$STAMP"
    echo "setup: done in ${SECONDS} s"
}

main
