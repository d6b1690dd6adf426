#!/bin/bash
# Runs of the plan on one GPU: several at a time, stopped after LIMIT seconds, continued by the same call.
#   DATA=data MODEL=SmolLM2 LIMIT=3000 docs/results/plan/run.sh utk-small out/utk "" abf-s0 utk-80-s0 cip-2-s0
#   DATA=data MODEL=SmolLM2 docs/results/plan/run.sh longppl out/utk 0 abf utk-80 cip-2
# DATA: folder `data` of tools/prepare_corpus.py. MODEL: the dequantized model's folder. The first arm of `longppl` chooses the
# key tokens. Afterwards: python tools/results.py collect out/utk docs/results/systems/utk-small
set -u
LIMIT=${LIMIT:-86400} MODEL=$(realpath "$MODEL") DATA=$(realpath "$DATA") KIND=$1 OUT=$2
mkdir -p "$OUT" && OUT=$(realpath "$OUT") && cd "$(dirname "$DATA")" || exit 2
left() { echo $((LIMIT - SECONDS)); }
if [ "$KIND" = longppl ]; then
  seed=$3 first=$4 key=; shift 3
  for arm in "$@"; do
    [ "$arm" = "$first" ] || key="--set key_tokens=$OUT/longppl/$first-s$seed"
    timeout -s INT "$(left)" unspool eval "$OUT/$arm-s$seed/stages/train/model" --suite longppl --lengths 32K \
      --samples 24 --seed "$seed" --text data/heldout.jsonl.zst $key --out "$OUT/longppl/$arm-s$seed"
  done
  exit
fi
changes=$3; shift 3
for run in "$@"; do
  timeout -s INT -k 15 "$(left)" unspool study "$KIND" --only "$run" --out "$OUT" --set "model=$MODEL" \
    --set engine.workers=5 $changes > "$OUT/$run.log" 2>&1 &
  sleep 2
done
wait
for run in "$@"; do echo "$run: $(ls "$OUT/$run"/scores/*/summary.json 2>/dev/null | wc -l) scored"; done
