#!/usr/bin/env bash
# What needs a GPU, in two calls of under nine minutes each.
#
#   benchmarks/gpu_all.sh 1 [WHEELS]      # correctness, two runs bit for bit, attention next to peers
#   benchmarks/gpu_all.sh 2 [WHEELS]      # training steps with a profile, the head, memory
#   benchmarks/gpu_train.sh 1|2 [WHEELS]  # end to end under DeepSpeed
#
# With WHEELS (offline) the wheels of that folder are installed for this run. A machine with torch,
# triton, transformers, sentencepiece, xxhash, psutil, scipy and pytest needs these, too (8 MB; the
# last two are the peers, listed as absent without them):
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
#     -d WHEELS pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
#     typing-inspection==0.4.5 typing-extensions==4.16.0 zstandard==0.25.0 flashdeberta==0.0.8 disentangled-flash==1.1.1
#
# Results go to benchmarks/results/*-cuda.json as they come, and after each part to $OUT when it is
# set. A part that fails is named at the end and does not keep the others from running. DRY_RUN=1
# prints the parts and their time limits.
set -uo pipefail
source "$(dirname "$0")/gpu_parts.sh"
use_wheels "$@"

if [ "$half" = 1 ]; then
  workers=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 4" || true)
  part 200 "correctness against float64, and two runs bit for bit" \
    "$python" -m pytest -q -m gpu $workers tests/model/test_gpu.py
  part 320 "attention forward + backward, 16k tokens, 12 heads x 64, bf16" \
    "$python" -m benchmarks.attention --device cuda --rounds 5 --dropout 0.1 0.0
else
  part 120 "RTD step, v3-base, with a profile" \
    "$python" -m benchmarks.train_step --device cuda --model deberta-v3-base --objective rtd \
    --shapes 64x512 16x512 --rounds 8 --profile --ours-only
  part 130 "MLM step, v3-base, next to Hugging Face" \
    "$python" -m benchmarks.train_step --device cuda --model deberta-v3-base \
    --shapes 32x512 8x2048 --rounds 8
  part 100 "RTD step, 1.5B with a 24-layer generator (ours alone)" \
    "$python" -m benchmarks.train_step --device cuda --model deberta-v2-xxlarge --objective rtd \
    --generator-layers 24 --shapes 4x512 8x512 --rounds 4 --ours-only
  part 80 "the masked LM head" "$python" -m benchmarks.cross_entropy --device cuda
  part 80 "memory" "$python" -m benchmarks.memory --device cuda
  part 25 "an update of v3-base, Muon next to AdamW" "$python" -m benchmarks.optimizer_step \
    --config launch/runs/v3_base.toml --device cuda
fi
finish
