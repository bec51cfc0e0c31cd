#!/usr/bin/env bash
# End to end on one GPU, in two calls of under nine minutes each.
#
#   benchmarks/gpu_train.sh 1 [WHEELS]    # a v3-base RTD run of 30 steps under DeepSpeed, stopped and
#                                         # resumed bit for bit, its profile by operator, its export
#   benchmarks/gpu_train.sh 2 [WHEELS]    # a few steps of every other ZeRO stage and precision, of
#                                         # offload, and without the Triton kernels
#   TRY=1 SLOWER=10 benchmarks/gpu_train.sh 1    # a tiny model on the CPU, ten times the limits
#
# A machine with what gpu_all.sh says, einops, pyarrow, scikit-learn and msgpack needs its wheels and these:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
#     -d WHEELS hjson==3.1.0 orjson==3.13.0 typing-extensions==4.16.0
#   DS_BUILD_OPS=0 pip wheel --no-deps -w WHEELS deepspeed==0.19.8
#
# The corpus is the docstrings of the Python installation, packed into rows of 512; one that is in
# $WORK/corpus (by default runs/gpu_train/corpus) is taken as it is. Results go to
# benchmarks/results/gpu_train-cuda*, and after each part to $OUT; DRY_RUN=1 prints the parts.
set -uo pipefail
source "$(dirname "$0")/gpu_parts.sh"
use_wheels "$@"

results=benchmarks/results
if [ -n "${TRY:-}" ]; then
  ds=ds_configs/zero1_fp32.json device=${DEVICE:-cpu}
  model=(--model.preset=deberta-v3-xsmall --model.num_layers=4 --model.hidden_size=64
    --model.num_heads=1 --model.intermediate_size=128 --model.vocab_size=8064)
  rows=(--train.global_batch_size=4 --train.micro_batch_size=2)
  [ "$device" = cpu ] && export DS_ACCELERATOR=cpu
else
  ds=ds_configs/zero1_bf16.json device=cuda
  model=(--model.vocab_size=128128)  # of the published models: the loss is a tenth of the step
  rows=(--train.global_batch_size=128 --train.micro_batch_size=64)
fi
run=(--config launch/runs/v3_base.toml "${docstrings[@]}" --optim.warmup_steps=10 --train.steps=30
  --train.save_every=15 --train.log_every=1 --train.eval_every=30 --train.eval_sequences=16
  "${model[@]}" "${rows[@]}")
settings=("${run[@]}" --deepspeed_config "$ds")

pack_docstrings
if [ "$half" = 2 ]; then
  kinds=(zero2_bf16 zero3_bf16 zero1_fp16 zero3_bf16_offload_cpu)
  [ -n "${TRY:-}" ] && kinds=(zero2_fp32 zero3_fp32)
  for kind in "${kinds[@]}"; do
    part 85 "4 steps, $kind" "$python" launch/pretrain.py "${run[@]}" "--out_dir=$work/$kind" \
      --deepspeed_config "ds_configs/$kind.json" --train.stop_after=4
  done
  part 100 "4 steps without Triton kernels" "$python" launch/pretrain.py "${settings[@]}" \
    "--out_dir=$work/dense" --train.stop_after=4 --model.attention=dense \
    --model.cross_entropy=chunked --train.micro_batch_size=2 --train.global_batch_size=4
  finish
  exit
fi
mkdir -p "$work/node"
part 100 "a step with checkpointed layers, kernels not yet checked" env "TMPDIR=$work/node" \
  "$python" launch/pretrain.py "${settings[@]}" "--out_dir=$work/checkpointed" --train.stop_after=2 \
  --train.activation_checkpointing=full
part 95 "30 steps" "$python" launch/pretrain.py "${settings[@]}" "--out_dir=$work/whole"
if [ -z "${DRY_RUN:-}" ]; then  # losses and speed, whatever becomes of the other parts
  cp "$work/whole/metrics.jsonl" "$results/gpu_train-$device-metrics.jsonl" && keep_results
fi
part 65 "the same, stopped at 15" "$python" launch/pretrain.py "${settings[@]}" \
  "--out_dir=$work/halves" --train.stop_after=15
part 65 "and resumed" "$python" launch/pretrain.py "${settings[@]}" "--out_dir=$work/halves"
part 35 "bit for bit" "$python" -m benchmarks.gpu_train compare "$work/whole" "$work/halves" \
  --out "$results/gpu_train-$device.json"
part 65 "profile by operator" "$python" -m benchmarks.gpu_train profile \
  --out "$results/gpu_train-$device" -- "${settings[@]}" "--out_dir=$work/profiled" --train.stop_after=8
part 50 "export" "$python" launch/export.py --run "$work/whole" --out "$work/hf"
finish
