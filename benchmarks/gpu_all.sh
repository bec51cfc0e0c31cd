#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes on one H200: correctness first, then attention
# beside every peer, training steps, memory, and two runs compared bit for bit.
#
#   pip install triton flashdeberta==0.0.8 disentangled-flash==1.1.1   # peers; optional
#   benchmarks/gpu_all.sh
#
# Results go to benchmarks/results/*-cuda.json; `python -m benchmarks.report` draws them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export TORCH_LOGS=-all

echo "== correctness against float64, and two runs bit for bit"
"$python" -m pytest -q -m gpu tests/test_attention_fused.py

echo "== attention forward + backward, 16k tokens, 12 heads x 64, bf16"
"$python" -m benchmarks.attention --device cuda --rounds 20

echo "== MLM step, v3-base"
"$python" -m benchmarks.train_step --device cuda --model deberta-v3-base \
  --shapes 32x512 8x2048 --rounds 12

echo "== RTD step, v3-base, then 1.5B with a 24-layer generator (ours alone)"
"$python" -m benchmarks.train_step --device cuda --model deberta-v3-base --objective rtd \
  --shapes 32x512 --rounds 12
"$python" -m benchmarks.train_step --device cuda --model deberta-v2-xxlarge --objective rtd \
  --generator-layers 24 --shapes 16x512 --rounds 5 --ours-only

echo "== memory"
"$python" -m benchmarks.memory --device cuda
