#!/bin/bash
# Two machines by hand. On each of them, with the same folder and the same environment:
#
#   first machine:   bash examples/cluster/two_machines.sh 0 10.0.0.1
#   second machine:  bash examples/cluster/two_machines.sh 1 10.0.0.1
#
# 10.0.0.1 is an address of the first machine on the network between the two. Started again after an interruption, both go on
# from the newest checkpoint, if OUTPUT is on a file system that both of them see.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: $0 MACHINE_RANK ADDRESS_OF_MACHINE_0 [arguments of the script]" >&2
    exit 2
fi
MACHINE_RANK=$1
MAIN_ADDRESS=$2
shift 2

HOOK=${HOOK:-configs/powersgd_between_nodes.yaml}
OUTPUT=${OUTPUT:-out/classification}
PORT=${PORT:-29500}
# An Accelerate config for this kind of machine; machine, address and port below take the place of its own.
ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-configs/accelerate/two_nodes.yaml}

# Both libraries choose a network card by themselves, and often the wrong one: take the one that leads to the other machine.
if [ -z "${NETWORK_CARD:-}" ]; then
    if [ "$MACHINE_RANK" = 0 ]; then
        NETWORK_CARD=$(ip -o address show to "$MAIN_ADDRESS" | awk '{print $2; exit}')
    else
        NETWORK_CARD=$(ip -o route get "$MAIN_ADDRESS" | grep -oP 'dev \K\S+')
    fi
fi
export NCCL_SOCKET_IFNAME=$NETWORK_CARD
export GLOO_SOCKET_IFNAME=$NETWORK_CARD
echo "machine $MACHINE_RANK, network card $NETWORK_CARD, first machine $MAIN_ADDRESS:$PORT"

exec accelerate launch \
    --config_file "$ACCELERATE_CONFIG" \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MAIN_ADDRESS" \
    --main_process_port "$PORT" \
    examples/finetune_classification.py \
    --comm_hook "$HOOK" \
    --output_dir "$OUTPUT" \
    "$@"
