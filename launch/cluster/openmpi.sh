#!/bin/bash
# launch/cluster/openmpi.sh node1:8,node2:8 --config RUN.toml --deepspeed_config DS.json
#
# mpirun only starts the processes; they talk through NCCL (or gloo), not through MPI.
#   PYTHON      interpreter, the same path on every host     (default .venv/bin/python here)
#   INTERFACE   network interface between the hosts          (default eth0)
#   MASTER_PORT                                              (default 29500)
#   MPIRUN_ARGS more options, such as --allow-run-as-root
#
#   SAVE_SECONDS                                             (default 60)
#
# mpirun waits SAVE_SECONDS between SIGTERM and SIGKILL, also when all ranks have ended. Its own
# default is one second; a step and a save take longer. Unbound, because mpirun would give each of
# up to two ranks a single core, and more ranks one socket: loader processes and threads included.
case "${1:-}" in -h | --help)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
set -eu
HOSTS=${1:-}
case "$HOSTS" in "" | -*)
    echo "error: the first word must be the hosts, such as node1:8,node2:8; see --help" >&2
    exit 2
    ;;
esac
shift
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
INTERFACE=${INTERFACE:-eth0}
first=${HOSTS%%,*}
ranks=$(tr ',' '\n' <<< "$HOSTS" | awk -F: '{n += (NF > 1 ? $2 : 1)} END {print n}')

# shellcheck disable=SC2086  # MPIRUN_ARGS is a list of words
exec mpirun ${MPIRUN_ARGS:-} -np "$ranks" --host "$HOSTS" -wdir "$PWD" --bind-to none \
    --mca btl_tcp_if_include "$INTERFACE" --mca odls_base_sigkill_timeout "${SAVE_SECONDS:-60}" \
    -x PATH -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" ${DS_ACCELERATOR:+-x DS_ACCELERATOR} \
    -x NCCL_SOCKET_IFNAME="$INTERFACE" -x GLOO_SOCKET_IFNAME="$INTERFACE" \
    -x MASTER_ADDR="${first%%:*}" -x MASTER_PORT="${MASTER_PORT:-29500}" \
    "$PYTHON" -u launch/pretrain.py "$@"
