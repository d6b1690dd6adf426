#!/bin/bash
# Runs of the plan on one GPU: several at a time, stopped after LIMIT seconds, continued by the same call.
#   DATA=data MODEL=SmolLM2 LIMIT=3000 docs/results/plan/run.sh utk-small out/utk "" abf-s0 utk-80-s0 cip-2-s0
#   DATA=data MODEL=SmolLM2 docs/results/plan/run.sh longppl out/utk 0 abf utk-80 cip-2
#   DATA=data MODEL=SmolLM2 SHORT_DATA=eval docs/results/plan/run.sh short out/utk 0 base abf utk-80 cip-2
# DATA: folder `data` of tools/prepare_corpus.py. MODEL: the dequantized model's folder. The first arm of `longppl` chooses the
# key tokens. `short` reads its five tasks from SHORT_DATA (short_tasks/local.py); `base` is the untouched model.
# Afterwards: python tools/results.py collect out/utk docs/results/systems/utk-small
set -u
LIMIT=${LIMIT:-86400} MODEL=$(realpath "$MODEL") DATA=$(realpath "$DATA") KIND=$1 OUT=$2
TASKS=$(realpath "$(dirname "$0")/short_tasks")
if [ "$KIND" = short ]; then : "${SHORT_DATA:?give the folder of hellaswag.jsonl.zst}"; export SHORT_DATA=$(realpath "$SHORT_DATA"); fi
mkdir -p "$OUT" && OUT=$(realpath "$OUT") && cd "$(dirname "$DATA")" || exit 2
left() { echo $((LIMIT - SECONDS)); }
model() {  # of an arm and seed: trained, averaged, or untouched
  for folder in "$OUT/$1-s$2/stages/train/model" "$OUT/$1-s$2/model"; do [ -d "$folder" ] && echo "$folder" && return; done
  [ "$1" = base ] && echo "$MODEL" || echo "$OUT/$1-s$2"
}
if [ "$KIND" = longppl ]; then
  seed=$3 first=$4 key=; shift 3
  for arm in "$@"; do
    [ "$arm" = "$first" ] || key="--set key_tokens=$OUT/longppl/$first-s$seed"
    timeout -s INT "$(left)" unspool eval "$(model "$arm" "$seed")" --suite longppl --lengths 32K \
      --samples 24 --seed "$seed" --text data/heldout.jsonl.zst $key --out "$OUT/longppl/$arm-s$seed"
  done
  exit
fi
if [ "$KIND" = short ]; then
  seed=$3; shift 3
  for arm in "$@"; do
    timeout -s INT "$(left)" unspool eval "$(model "$arm" "$seed")" --suite short --samples 400 --path "tasks=$TASKS" \
      --tasks local_hellaswag,local_arc_challenge,local_arc_easy,local_piqa,local_winogrande --out "$OUT/short/$arm-s$seed"
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
