#!/bin/bash
# One host's part of a job; run the same on every host of a pod, from the repository's
# root. Arguments go to launch/train.py; jax finds the other hosts by itself.
#
# Whoever started the job must tell a finished run from one that was asked to stop and
# has saved, or a preempted job counts as done, so this ends with:
#
#     0      the run is finished
#     75     stopped early, saved: start again with the same WORKDIR
#     1      failed by itself, and would again
#     other  70, 134 and 137 are a job that lost a process: start again
set -euo pipefail

CONFIG=${CONFIG:-configs/lm1b.py:mos}
WORKDIR=${WORKDIR:?is needed: a folder that all hosts share}
MODEL=${MODEL:-4}          # devices that share a vocabulary; the rest share rows
PYTHON=${PYTHON:-python}
HEARTBEAT=${HEARTBEAT:-60} # seconds of silence after which a process is dead
SETTLE=${SETTLE:-60}       # seconds after which the share shows a new file to all hosts
export NAME=${NAME:-softbottle} # of the run; launch/pods/process.sh finds it by this
STOPPED=75

if [[ $WORKDIR == *://* ]]; then
    echo "WORKDIR=$WORKDIR is a bucket's address; give a folder: mount the bucket" >&2
    exit 64
fi

# In a container this script is process 1, and a signal to stop reaches only it.
asked=false
training=
stop() {
    asked=true
    [[ -z $training ]] || kill -TERM "$training" 2>/dev/null || true
}
trap stop TERM INT

# exec keeps the id that was recorded.
(
    bash launch/pods/process.sh record "$BASHPID"
    exec "$PYTHON" launch/train.py --config "$CONFIG" --workdir "$WORKDIR" \
        --distributed --heartbeat_seconds="$HEARTBEAT" --stopped_status="$STOPPED" \
        --config.mesh.data=none --config.mesh.model="$MODEL" "$@"
) &
training=$!
[[ $asked == false ]] || stop
# A trapped signal ends `wait`, not the training.
while true; do
    status=0
    wait "$training" || status=$?
    kill -0 "$training" 2>/dev/null || break
done
if [[ $status == 0 ]]; then
    "$PYTHON" launch/pods/finished.py --wait="$SETTLE" -- "$WORKDIR" || status=$STOPPED
fi
exit "$status"
