#!/usr/bin/env bash
# A trainer teaches a tiny model to add, and every few steps hands an eval to a fleet of two vLLM engines.
# Ends with a table and a plot; fails when a point was lost or the curve did not rise. Needs `make setup`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STEPS=200 EVERY=25

export PATH="$PWD/.venv/bin:$PATH"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p demo-run
work=$(mktemp -d "$PWD/demo-run/XXXXXX")
snapshots=$(mktemp -d /dev/shm/evalkit-demo.XXXXXX 2>/dev/null || mktemp -d "$work/snapshots.XXXXXX")
export EVALKIT_RUN_DIR="$work/run" EVALKIT_EVAL_HF_DIR="$snapshots" EVALKIT_SUITE="$work/evals.yaml"

clean_up() {
  trap - EXIT
  trap '' INT TERM
  if [ -d "$EVALKIT_RUN_DIR" ]; then
    evalkit fleet down >/dev/null || true
    # Workers whose engines are gone settle their points by themselves.
    evalkit drain --timeout 30s >/dev/null || true
  fi
  rm -rf "$snapshots"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

train() { python scripts/train_addition.py "$work" --steps "$STEPS" --until "$1"; }

dispatch() {
  local began=${EPOCHREALTIME/[.,]/}
  evalkit dispatch --step "$1" --from "$work/checkpoint" --max-in-flight 2 --policy skip "${@:2}"
  echo "$1 $((${EPOCHREALTIME/[.,]/} - began))" >>"$work/waits"
}

train 0
evalkit fleet up --model "$work/base" --engines 2 -- --dtype float32 --max-model-len 64 --max-num-seqs 64 --enforce-eager
for step in $(seq 0 "$EVERY" $((STEPS - EVERY))); do
  train "$step"
  dispatch "$step"
done
train "$STEPS"
dispatch "$STEPS" --final

evalkit drain --timeout 10m
evalkit status
evalkit fleet down
python scripts/plot_demo.py "$EVALKIT_RUN_DIR/metrics.jsonl" "$work/waits"
