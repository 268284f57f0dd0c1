#!/bin/bash
# Train on GKE through xpk (written for 1.16):
#
#     PROJECT=p ZONE=europe-west4-b CLUSTER=c IMAGE=i BUCKET=b launch/pods/gke_xpk.sh run
#     launch/pods/gke_xpk.sh cluster | storage | run | list | delete [train.py's arguments]
#
# `cluster` and `storage` once; then `run` for each training. IMAGE is built from
# launch/pods/Dockerfile. DRY=true prints what xpk would do.
set -euo pipefail

PROJECT=${PROJECT:?is needed}
ZONE=${ZONE:?is needed}
CLUSTER=${CLUSTER:?is needed}
IMAGE=${IMAGE:-}   # for run
BUCKET=${BUCKET:-} # for storage; best with a hierarchical namespace, see README.md
NAME=${NAME:-softbottle}
TPU=${TPU:-v5litepod-256}
SLICES=${SLICES:-1}
RESTARTS=${RESTARTS:-100}
GRACE=${GRACE:-120} # seconds in which a host that goes away can save
CONFIG=${CONFIG:-configs/lm1b.py:mos}
MODEL=${MODEL:-4} # chips that share a vocabulary
USER_ID=10001     # of the image's user, who writes to the bucket
STORAGE=softbottle-share
MOUNT=/mnt/share
WORKDIR=${WORKDIR:-$MOUNT/runs/$NAME}
DATA=${DATA:-$MOUNT/lm1b}
ROWS=${ROWS:-1024} # of a batch: a multiple of the chips
DRY=${DRY:-false}

where=(--project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER")
[[ $DRY != true ]] || where+=(--dry-run)

cluster() {
    xpk cluster create "${where[@]}" --tpu-type="$TPU" --num-slices="$SLICES" --spot \
        --enable-workload-identity --enable-gcsfuse-csi-driver
}

storage() {
    # xpk wants a size and does not use it: a bucket has none.
    xpk storage attach "$STORAGE" "${where[@]}" --type=gcsfuse \
        --bucket="${BUCKET:?is needed}" --size=1 --mount-point="$MOUNT" --readonly=false \
        --auto-mount=false \
        --mount-options="implicit-dirs,rename-dir-limit=100000,uid=$USER_ID,gid=$USER_ID"
}

run() {
    local command
    # A shell of the pod reads this: quoted, each word arrives whole and none is executed.
    # exec, or a signal to stop would reach that shell alone.
    printf -v command '%q ' exec env "NAME=$NAME" "CONFIG=$CONFIG" "MODEL=$MODEL" \
        "WORKDIR=$WORKDIR" bash launch/pods/worker.sh "--config.data.path=$DATA" \
        "--config.data.cache=$MOUNT/cache" "--config.data.rows=$ROWS" "$@"
    # Kubernetes replaces $(NAME) and $$ in a command by itself. Quoted they are apart, as
    # \$\(NAME\), except in a word with a control character, as $'\n$(NAME)'.
    if [[ $command == *"\$("* || $command == *"\$\$"* ]]; then
        echo "a setting has both a control character and \$( or \$\$: $command" >&2
        exit 64
    fi
    # Beside the statuses on which xpk restarts anyway: of a process that lost another
    # one, and of a run that was stopped early.
    xpk workload create "${where[@]}" --workload="$NAME" --tpu-type="$TPU" \
        --num-slices="$SLICES" --docker-image="${IMAGE:?is needed}" --storage="$STORAGE" \
        --max-restarts="$RESTARTS" --restart-on-exit-codes=70,75 \
        --termination-grace-period-seconds="$GRACE" --command="$command"
}

list() { xpk workload list "${where[@]}"; }

delete() { xpk workload delete "${where[@]}" --workload="$NAME" --force; }

stage=${1:-}
case $stage in
cluster | storage | run | list | delete)
    shift
    "$stage" "$@"
    ;;
*)
    echo "say what to do: cluster, storage, run, list or delete" >&2
    exit 64
    ;;
esac
