#!/bin/bash
# On the login node, once:    launch/cluster/torchrun_elastic.sh store 29400
# On every compute host:      launch/cluster/torchrun_elastic.sh LOGIN:29400 MIN:MAX RANKS_PER_HOST \
#                                 --config RUN.toml --deepspeed_config DS.json
#
# When a host is lost the others start again from the newest whole checkpoint, at the smaller world
# size; a host that comes (back) is taken in the same way. train.global_batch_size must be divisible
# by micro_batch_size x ranks at every world size that may occur, train.initial_batch_size of a batch
# that grows by the ranks. Ranks that end with 2 (an error that would come again) or 75 (asked to
# stop; saved) are not started again.
#
# The rendezvous store is a process of its own, so that no compute host is special. The first
# variable works around torch 2.13, whose agents wait for each other for ever when a host comes back.
case "${1:-}" in -h | --help)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
set -eu
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

case "${1:-}" in "" | -*)
    echo "error: the first word must be store or LOGIN:PORT; see --help" >&2
    exit 2
    ;;
esac
if [ "$1" = store ]; then
    exec "$PYTHON" -c "
import signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore('0.0.0.0', int(sys.argv[1]), is_master=True, wait_for_workers=False,
                 timeout=timedelta(days=1))
print('rendezvous store on port', sys.argv[1], flush=True)
signal.pause()" "$2"
fi

endpoint=$1 nodes=$2 ranks=$3
shift 3
exec "$PYTHON" launch/cluster/torchrun_elastic.py \
    --nnodes="$nodes" --nproc-per-node="$ranks" --max-restarts=1000 --monitor-interval=1 \
    --rdzv-backend=c10d --rdzv-id="${RUN_ID:-deberta}" --rdzv-endpoint="$endpoint" \
    --rdzv-conf="is_host=0,join_timeout=${JOIN_SECONDS:-600},last_call_timeout=5,\
keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=20" \
    --local-addr="$(hostname)" launch/pretrain.py "$@"
