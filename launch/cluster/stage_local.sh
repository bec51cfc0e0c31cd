#!/bin/bash
# srun --ntasks-per-node=1 launch/cluster/stage_local.sh TARGET SOURCE...
# pdsh -w node[1-4] $PWD/launch/cluster/stage_local.sh TARGET SOURCE...
#
# Copies each SOURCE (the environment, a folder of shards) to TARGET/SOURCE on the host that runs it,
# several files at once, and compares every byte, also of what is there already: a copy that was
# interrupted or damaged is repaired. A file that the source has no longer is named. A host that has
# not everything ends with 1 and says so.
#   JOBS          files at once (default 8)
#   TRUST_TIMES   1: what is there already and equal by size and time is not read again
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
mkdir -p "$target" || { echo "$(hostname): $target: not a directory" >&2; exit 1; }
target=$(realpath "$target")
export target

stage() {  # copy one file and compare; keeps links, modes and times
    local to=$target$1
    mkdir -p "${to%/*}"
    if [ -L "$1" ]; then
        [ "$(readlink "$1")" = "$(readlink "$to")" ] || cp -PTf "$1" "$to"
    elif ! same "$1" "$to"; then
        cp -pf "$1" "$to.stage_local" && cmp -s "$1" "$to.stage_local" && mv -fT "$to.stage_local" "$to"
    fi || { rm -f "$to.stage_local"; echo "$(hostname): $1: not copied" >&2; return 1; }
}
same() {
    [ -f "$2" ] && [ ! -L "$2" ] || return
    [ "$(stat -c '%s %Y %a' "$1")" = "$(stat -c '%s %Y %a' "$2")" ] || return
    [ "${TRUST_TIMES:-0}" = 1 ] || cmp -s "$1" "$2"
}
export -f stage same

exec 9> "$target/.stage_local.lock"
flock 9  # another one on this host is at it
started=$SECONDS
for source in "$@"; do
    from=$(realpath -s "$source")
    [ -e "$from" ] || { echo "error: $source: no such file or folder" >&2; exit 2; }
    here=$target$from
    [ ! -d "$from" ] || mkdir -p "$here"
    [ ! -d "$here" ] || find "$here" -type f -name '*.stage_local' -delete  # of one that was interrupted
    find -H "$from" \( -type f -o -type l \) -print0 \
        | xargs -0 -r -P "${JOBS:-8}" -I{} bash -c 'stage "$1"' stage {} \
        || { echo "$(hostname): $source is not whole in $target" >&2; exit 1; }
    [ ! -d "$from" ] || (cd "$here" && find . \( -type f -o -type l \) -print0) \
        | while IFS= read -r -d '' name; do
            [ -e "$from/$name" ] || [ -L "$from/$name" ] \
                || echo "$(hostname): WARNING: $here/${name#./} is not in the source" >&2
        done
    echo "$(hostname): $here, $(du -sh "$here" | cut -f1), $((SECONDS - started)) s"
done
