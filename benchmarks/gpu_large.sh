#!/usr/bin/env bash
# The configurations of 1.5 billion parameters on one GPU, in two calls of under nine minutes each.
#
#   benchmarks/gpu_large.sh 1 [WHEELS]    # masked LM: ten steps; the last five again, killed at the
#                                         # seventh, resumed, bit for bit the same; its export
#   benchmarks/gpu_large.sh 2 [WHEELS]    # four steps: RTD with its generator (2.45 B), ZeRO-3 with
#                                         # offload to the CPU
#   TRY=1 SLOWER=10 benchmarks/gpu_large.sh 1    # a tiny model on the CPU, ten times the limits
#
# Corpus, wheels and results are as in gpu_train.sh. A checkpoint has 19 GB, that of RTD 29; two lie
# on the disk at once.
set -uo pipefail
source "$(dirname "$0")/gpu_parts.sh"
use_wheels "$@"

results=benchmarks/results out=$work/large first=$work/first
ds=zero1_bf16 offload=zero3_bf16_offload_cpu device=cuda model=() small=()
if [ -n "${TRY:-}" ]; then
  ds=zero1_fp32 offload=zero3_fp32 device=cpu
  export DS_ACCELERATOR=cpu
  model=(--model.num_layers=4 --model.hidden_size=64 --model.num_heads=1
    --model.intermediate_size=128 --model.vocab_size=8064)
  small=(--objective.generator_layers=2)
fi
run=("${docstrings[@]}" "${model[@]}" --train.global_batch_size=16 --train.micro_batch_size=8
  --optim.warmup_steps=10 --train.log_every=1 --train.eval_sequences=16)
masked=(launch/pretrain.py --config launch/runs/deberta_1p5b.toml "${run[@]}" "--out_dir=$out")
ten=("${masked[@]}" --deepspeed_config "ds_configs/$ds.json" --train.stop_after=10
  --train.save_every=5)

set_aside() {  # what the ten steps gave; the run goes on from the fifth
  mkdir -p "$first/checkpoints/step-00000010" && cp "$out/metrics.jsonl" "$first" &&
    cp "$out/checkpoints/step-00000010/manifest.json" "$first/checkpoints/step-00000010" &&
    rm -r "$out/checkpoints/step-00000010"
}

kill_at_seven() {  # COMMAND...
  "$@" >"$work/killed.log" 2>&1 &
  until grep -Eq '^[0-9:]{8} +7 ' "$work/killed.log"; do
    kill -0 $! || { cat "$work/killed.log"; return 1; }
    sleep 0.1
  done
  kill -9 $! && grep -E "resume|^[0-9:]{8} +7 " "$work/killed.log"
}
export -f set_aside kill_at_seven

keep_numbers() {  # RUN NAME: its lines; the disk has no room for another checkpoint
  [ -n "${DRY_RUN:-}" ] && return
  cp "$work/$1/metrics.jsonl" "$results/gpu_large-$device-$2.jsonl" && keep_results
  rm -rf "$work/$1/checkpoints"
}
export out first

pack_docstrings
if [ "$half" = 2 ]; then
  part 240 "4 steps of RTD" "$python" launch/pretrain.py \
    --config launch/runs/deberta_1p5b_rtd.toml --deepspeed_config "ds_configs/$ds.json" \
    "${run[@]}" "${small[@]}" "--out_dir=$work/rtd" --train.stop_after=4
  keep_numbers rtd rtd
  part 240 "4 steps under $offload" "$python" "${masked[@]}" --train.stop_after=4 \
    --deepspeed_config "ds_configs/$offload.json"
  keep_numbers large offload
  finish
  exit
fi
part 190 "10 steps" "$python" "${ten[@]}"
part 10 "the tenth step set aside" bash -c set_aside
part 90 "killed at the seventh step" bash -c 'kill_at_seven "$@"' _ "$python" "${ten[@]}"
part 110 "and resumed" "$python" "${ten[@]}"
part 10 "bit for bit" "$python" -m benchmarks.gpu_train compare "$first" "$out" \
  --out "$results/gpu_large-$device.json"
part 70 "export" "$python" launch/export.py --run "$out" --out "$work/hf"
finish
