#!/usr/bin/env bash
# Line 2b of the plan on one GPU, with RULER for seed 3 (line 2), and utk-harpe with seed 3 (line 7): four runs at a time
#
#   docs/results/plan/line_2b.sh DATA MODEL OUT SECONDS
#
# Run it in a checkout. The answers of a run are in OUT/packed as soon as it has ended. The same command continues.
set -u
data=$1 model=$2 out=$3 end=$(($(date +%s) + $4))
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log PYTHONUNBUFFERED=1
mkdir -p "$out/packed" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d

needles() {
  echo "{suite: niah, lengths: [$1], samples: $2, wordings: [heldout-2], distractors: [0, 3, 10], placement: strata," \
    "text: data/heldout.jsonl.zst, after: [train]}"
}
evals=(--set evals.0.samples=135 --set 'evals.0.wordings=[development]')
evals+=(--set "evals.6=$(needles 24K 90)" --set "evals.7=$(needles 6K 45)")
no_ruler=(--set 'evals.5.after=[]')

run() { # NAME STUDY OPTION…; each run has a folder of its own, because settings differ
  local name=$1 study=$2
  shift 2
  local left=$((end - $(date +%s)))
  [ "$left" -ge 60 ] || return
  python3 tools/run_study.py start "$out/$name" --study "$study" --data "$data" --model "$model" --at-once 1 \
    --training 1 --workers 4 --limit "$left" "${evals[@]}" "$@" "$name"
  python3 tools/run_study.py pack "$out/$name" "$out/packed/$name"
}

(run abf-s3 utk-small; run utk-80-s5 utk-small "${no_ruler[@]}") >"$out/slot-1.log" 2>&1 &
(run utk-80-s3 utk-small; run abf-s5 utk-small "${no_ruler[@]}") >"$out/slot-2.log" 2>&1 &
(run abf-s4 utk-small "${no_ruler[@]}"; run utk-harpe-s3 harpe-small) >"$out/slot-3.log" 2>&1 &
run utk-80-s4 utk-small "${no_ruler[@]}" >"$out/slot-4.log" 2>&1 &
wait
echo quit | nvidia-cuda-mps-control
