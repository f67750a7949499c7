#!/usr/bin/env bash
# Starts this host's ranks. Run it on every host with the same values: by hand, by a service manager, or by the other
# files of this folder. Arguments go to finetune_llama.py. docs/multi-node.md explains each value.

# Edit here, or set these in the environment.
HOSTS=${HOSTS:-2}                                             # 2: wait for a lost host. 1:2: go on without it
RANKS_PER_HOST=${RANKS_PER_HOST:-auto}                        # auto: one for each GPU
HEAD=${HEAD:?set it to the host that keeps the rendezvous}    # an address that all hosts reach
PORT=${PORT:-29400}                                           # free on HEAD
OUT=${OUT:?set it to a folder that all hosts see}             # checkpoints and results
STARTS=${STARTS:-20}                                          # starts of torchrun, which may fail: without network, say
PAUSE=${PAUSE:-10}                                            # seconds between starts
LOCAL_ADDR=${LOCAL_ADDR:-}                                    # this host's address, if its name does not resolve to it
IS_HEAD=${IS_HEAD:-}                                          # true or false, if the name of HEAD does not show it
TRAINING=(examples/finetune_llama.py --config examples/configs/zero3_autocast_bf16.json
    --train-batch-size 256 --micro-batch-size 4 --steps 1000 --save-every 50 --resume auto --out "$OUT")

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
# Without it the ranks of a restart may read the addresses of those that are gone (pytorch/pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

AGENT=(torchrun --nnodes "$HOSTS" --nproc-per-node "$RANKS_PER_HOST" --max-restarts 20
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "${RUN:-finetune}"
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} ${IS_HEAD:+--rdzv-conf "is_host=$IS_HEAD"})

is_asked_to_end=
trap 'is_asked_to_end=1; [[ ${agent-} ]] && kill -TERM "$agent" 2>/dev/null' TERM INT
for ((start = 1; start <= STARTS; start++)); do
    "${AGENT[@]}" "${TRAINING[@]}" "$@" &
    agent=$!
    wait "$agent"
    status=$?
    if [[ $is_asked_to_end ]]; then
        wait "$agent" # the signal ended only the first wait; the ranks are saving
        exit 143
    fi
    [[ $status == 0 ]] && exit 0
    echo "torchrun ended with status $status; start $start of $STARTS" >&2
    sleep "$PAUSE"
    [[ $is_asked_to_end ]] && exit 143
done
exit "$status"
