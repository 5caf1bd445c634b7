#!/usr/bin/env bash
# Everything that needs a GPU: `tests/gpu.sh test`, `tests/gpu.sh bench [SUITE ...]`, or both without an argument.
# PYTHON names an interpreter that has torch for this GPU; the repository itself need not be installed.
# Results go to build/gpu-tests.json (or GPU_TESTS_JSON) and build/gpu-bench.json (or JSON).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
what="${1:-all}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "tests/gpu.sh: torch sees no GPU on this machine" >&2
  exit 1
fi
if [[ $what == test || $what == all ]]; then
  GPU_TESTS_JSON="${GPU_TESTS_JSON:-build/gpu-tests.json}" "$python" -m pytest -q -m gpu tests/gpu tests/conformance
fi
if [[ $what == bench || $what == all ]]; then
  "$python" -m tests.bench --gpu --json "${JSON:-build/gpu-bench.json}" "${@:2}"
fi
