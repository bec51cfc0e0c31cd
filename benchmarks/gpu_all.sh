#!/usr/bin/env bash
# Everything that needs a GPU, meant to take under ten minutes on one H200: correctness first, then
# attention beside every peer, training steps with a profile, memory, the head.
#
#   benchmarks/gpu_all.sh                 # in an environment that has deberta_ds's packages
#   benchmarks/gpu_all.sh WHEELS          # offline: installs the wheels of that folder for this run
#
# A machine with torch, triton, transformers, scipy and pytest alone needs these beside (8 MB; the
# last two are the peers, listed as absent without them):
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
#     -d WHEELS pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
#     typing-inspection==0.4.5 zstandard==0.25.0 flashdeberta==0.0.8 disentangled-flash==1.1.1
#
# Results go to benchmarks/results/*-cuda.json, and to $OUT when it is set; a part that fails is
# named at the end and does not keep the others from running.
case "${1:-}" in -h | --help)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export TORCH_LOGS=-all PYTHONWARNINGS=ignore
failed=()

if [ $# -gt 0 ]; then
  [ -d "$1" ] || { echo "error: $1 is no folder of wheels; see --help" >&2; exit 2; }
  site=$(mktemp -d)
  "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$1"/*.whl || exit 2
  export PYTHONPATH=$site:${PYTHONPATH:-}
fi

part() {  # part SECONDS NAME COMMAND...
  local limit=$1 name=$2 start=$SECONDS
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || failed+=("$name")
  echo "== $name: $((SECONDS - start)) s"
}

workers=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 4" || true)
part 240 "correctness against float64, and two runs bit for bit" \
  "$python" -m pytest -q -m gpu $workers tests/test_gpu.py
part 270 "attention forward + backward, 16k tokens, 12 heads x 64, bf16" \
  "$python" -m benchmarks.attention --device cuda --rounds 15 --dropout 0.1 0.0
part 120 "MLM step, v3-base" \
  "$python" -m benchmarks.train_step --device cuda --model deberta-v3-base \
  --shapes 32x512 8x2048 --rounds 10
part 90 "RTD step, v3-base, with a profile" \
  "$python" -m benchmarks.train_step --device cuda --model deberta-v3-base --objective rtd \
  --shapes 32x512 --rounds 10 --profile
part 150 "RTD step, 1.5B with a 24-layer generator (ours alone)" \
  "$python" -m benchmarks.train_step --device cuda --model deberta-v2-xxlarge --objective rtd \
  --generator-layers 24 --shapes 16x512 --rounds 5 --ours-only
part 90 "the masked LM head" "$python" -m benchmarks.cross_entropy --device cuda
part 90 "memory" "$python" -m benchmarks.memory --device cuda

if [ -n "${OUT:-}" ]; then cp benchmarks/results/*-cuda.json "$OUT"/; fi
echo "all parts: $SECONDS s"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
