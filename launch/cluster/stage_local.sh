#!/bin/bash
# srun --ntasks-per-node=1 launch/cluster/stage_local.sh TARGET SOURCE...
# pdsh -w node[1-4] $PWD/launch/cluster/stage_local.sh TARGET SOURCE...
#
# Copies each SOURCE (the environment, a folder of shards) to TARGET/SOURCE on the host that runs it,
# several files at once, and compares every byte. What is there already and equal by size
# and time is not copied again. A host that has not everything ends with 1 and names it.
#   JOBS   files at once (default 8)
case "${1:-}" in -h | --help)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
"" | -*)
    echo "error: the first word must be the local directory; see --help" >&2
    exit 2
    ;;
esac
set -euo pipefail
target=$1
shift
[ $# -gt 0 ] || { echo "error: $target: nothing to copy was named; see --help" >&2; exit 2; }
export target

stage() {  # copy one file and compare; keeps links, modes and times
    local to=$target$1
    mkdir -p "${to%/*}"
    if [ -L "$1" ]; then cp -Pf "$1" "$to"; return; fi
    if [ "$(stat -c '%s %Y' "$1")" != "$(stat -c '%s %Y' "$to" 2>/dev/null)" ]; then
        cp -pf "$1" "$to.part" && cmp -s "$1" "$to.part" && mv -f "$to.part" "$to"
    fi || { echo "$(hostname): $1: not copied" >&2; return 1; }
}
export -f stage

started=$SECONDS
for source in "$@"; do
    from=$(realpath -s "$source")
    [ -e "$from" ] || { echo "error: $source: no such file or folder" >&2; exit 2; }
    find "$from" \( -type f -o -type l \) -print0 \
        | xargs -0 -r -P "${JOBS:-8}" -I{} bash -c 'stage "$1"' stage {} \
        || { echo "$(hostname): $source is not whole in $target" >&2; exit 1; }
    echo "$(hostname): $target$from, $(du -sh "$target$from" | cut -f1), $((SECONDS - started)) s"
done
