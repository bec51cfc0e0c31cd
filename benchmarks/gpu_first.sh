#!/usr/bin/env bash
# The first minutes on a new kind of GPU, in two calls of under nine minutes each.
#
#   benchmarks/gpu_first.sh 1 [WHEELS]    # the machine and its speed; do the kernels launch, and do
#                                         # they stay within their memory
#   benchmarks/gpu_first.sh 2 [WHEELS]    # each attention kernel's time next to what is expected, and
#                                         # what it waits for
#
# Between them: gpu_all.sh 1 and gpu_train.sh 1, whose --help says what the machine needs. Parts that
# need compute-sanitizer or ncu of the CUDA toolkit fail without them. Figures go to the output.
set -uo pipefail
source "$(dirname "$0")/gpu_parts.sh"
use_wheels "$@"

memcheck() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -c '
import torch
from deberta_ds.model.choose import Request
from deberta_ds.model.kernels import checks
request = Request(torch.device("cuda"), (torch.bfloat16,), 64, (True, True))
print(checks.worst(checks.attention(request)))'
}
profile() {
  ncu --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats \
    --kernel-name 'regex:(dropped|bias|forward|row_dot|key|row_gradient|table_gradient)_kernel' \
    --launch-skip 12 --launch-count 12 "$python" -c '
import torch
from benchmarks.attention_kernels import ATTENTION_DROPOUT, HEADS, SHAPES, SIZE, VARIANTS, layer
from benchmarks.peers import make_problem
problem = make_problem(*SHAPES[0], HEADS, SIZE, torch.bfloat16, "cuda", ATTENTION_DROPOUT)
for _ in range(3):
    layer(VARIANTS["fused"], problem)'
}
export -f memcheck profile
export python

if [ "$half" = 1 ]; then
  part 120 "the machine, a matmul, a copy, every kernel's check, a layer" "$python" launch/doctor.py
  part 120 "do the kernels launch" "$python" -m pytest -q -x -m gpu \
    -k "rows_within or layer_norm or check_of_auto" tests/model/test_gpu.py
  part 280 "memory accesses out of bounds or misaligned" bash -c memcheck
else
  part 120 "attention's kernels, expected and measured" "$python" -m benchmarks.attention_kernels
  part 240 "what they wait for" bash -c profile
fi
finish
