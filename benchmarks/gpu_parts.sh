# Sourced by the scripts for a GPU: `part` runs one part under a time limit and keeps its results.
case "${1:-}" in -h | --help)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
half=${1:-}
[[ $half == [12] ]] || { echo "error: ${half:-nothing}: usage: $0 1|2 [WHEELS]" >&2; exit 2; }
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:${PYTHONPATH:-} TORCH_LOGS=-all PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
failed=()

use_wheels() {  # use_wheels [FOLDER]: install its wheels for this run alone
  [ $# -gt 0 ] || return 0
  [ -d "$1" ] || { echo "error: $1 is no folder of wheels; see --help" >&2; exit 2; }
  local site
  site=$(mktemp -d)
  "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$1"/*.whl || exit 2
  export PYTHONPATH=$PYTHONPATH:$site
}

keep_results() {  # whatever is there by now: the machine may go at any time
  [ -n "${OUT:-}" ] || return 0
  mkdir -p "$OUT"
  find benchmarks/results -name '*-cuda*' -newer "$started" -exec cp {} "$OUT"/ \;
}

part() {  # part SECONDS NAME COMMAND...
  local limit=$(($1 * ${SLOWER:-1})) name=$2 start=$SECONDS
  shift 2
  if [ -n "${DRY_RUN:-}" ]; then echo "$limit s at most: $name: $*"; total=$((total + limit)); return; fi
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" || failed+=("$name (exit code $?)")
  keep_results
  echo "== $name: $((SECONDS - start)) s"
}

finish() {
  rm -f "$started"
  if [ -n "${DRY_RUN:-}" ]; then echo "$total s at most"; return; fi
  echo "all parts: $SECONDS s"
  [ ${#failed[@]} -eq 0 ] && return
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
}

work=${WORK:-runs/gpu_train}
corpus=$work/corpus
docstrings=("--data.sources=[{path = \"$corpus/train\"}]" "--data.heldout=$corpus/heldout"
  "--data.tokenizer=$corpus/spm.model")
_pack() {
  mkdir -p "$work" && find "$work" -mindepth 1 -maxdepth 1 ! -name corpus -exec rm -rf {} + || return
  [ -e "$corpus/packed" ] && return  # made by an earlier call, or brought along
  rm -rf "$corpus" && mkdir "$corpus" &&
    "$python" data_prep/docstrings.py --out "$corpus/text" &&
    "$python" data_prep/train_tokenizer.py "$corpus/text/train.jsonl" --out "$corpus/spm.model" \
      --vocab_size 8000 --threads 8 &&
    "$python" data_prep/tokenize_corpus.py "$corpus/text/train.jsonl" --out "$corpus/train" \
      --tokenizer "$corpus/spm.model" &&
    "$python" data_prep/tokenize_corpus.py "$corpus/text/heldout.jsonl" --out "$corpus/heldout" \
      --tokenizer "$corpus/spm.model" &&
    "$python" data_prep/pack.py "$corpus/train" "$corpus/heldout" --tokenizer "$corpus/spm.model" \
      --seq_len 512 &&
    touch "$corpus/packed"
}
export -f _pack
export work corpus python

pack_docstrings() {  # rows of 512 tokens; nothing else of an earlier call stays in $work
  part 55 "rows of docstrings" bash -c _pack
  [ ${#failed[@]} -eq 0 ] || finish  # nothing else has a corpus then
}

total=0
started=$(mktemp)
