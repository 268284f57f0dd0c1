#!/bin/bash
# Train on a Cloud TPU VM slice, until the run is finished:
#
#     PROJECT=p ZONE=europe-west4-b SHARE=10.0.0.2:/share launch/pods/tpu_vm.sh
#
# creates the slice, installs softbottle on all hosts, trains on all of them, makes the
# slice anew when it was preempted, and deletes it in the end. It must stay up itself: run
# it in tmux on a small machine. One stage alone:
#
#     launch/pods/tpu_vm.sh create | install | run | stop | delete [train.py's arguments]
#
# Run from the repository's root; needs gcloud, logged in, and git.
set -euo pipefail

PROJECT=${PROJECT:?is needed}
ZONE=${ZONE:?is needed}
SHARE=${SHARE:?is needed: HOST:/FOLDER of NFS (Filestore), or the name of a bucket}
NAME=${NAME:-softbottle}
ACCELERATOR=${ACCELERATOR:-v5litepod-256}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite} # the image that goes with the accelerator
JAX=${JAX:-0.10.2}                      # the version, which decides that of libtpu too
UV=${UV:-0.13.7}                        # the version that makes the environment
SPOT=${SPOT:-true}                      # cheaper, and can be taken away at any time
CONFIG=${CONFIG:-configs/lm1b.py:mos}
MODEL=${MODEL:-4}                       # chips that share a vocabulary
RETRIES=${RETRIES:-5}                   # failures in a row of a slice that is well
PAUSE=${PAUSE:-30}                      # seconds between looks at a state
MOUNT=/mnt/share
WORKDIR=${WORKDIR:-$MOUNT/runs/$NAME} # on the share: all hosts see it, and it outlives them
DATA=${DATA:-$MOUNT/lm1b}
ROWS=${ROWS:-1024} # of a batch: a multiple of the chips

where=(--project="$PROJECT" --zone="$ZONE")

say() { echo "$(date +%T) $*" >&2; }

# Words as the hosts' shell must read them to get each whole and to execute none of them.
quoted() { printf '%q ' "$@"; }

# on WORKER COMMAND: the hosts' shell reads the command, so its words are `quoted` before.
on() {
    gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker="$1" --command="$2"
}

# ACTIVE when the hosts are there; a preempted one is SUSPENDED, a deleted one nothing.
queue_state() {
    gcloud compute tpus queued-resources describe "$NAME" "${where[@]}" \
        --format='value(state.state)' 2>/dev/null || true
}

# READY, or PREEMPTED a while before the queue knows.
slice_state() {
    gcloud compute tpus tpu-vm describe "$NAME" "${where[@]}" \
        --format='value(state)' 2>/dev/null || true
}

is_well() { [[ $(queue_state) == ACTIVE && $(slice_state) == READY ]]; }

is_finished() {
    on 0 "venv/bin/python softbottle/launch/pods/finished.py -- $(quoted "$WORKDIR")"
}

create() {
    local options=() state
    [[ $SPOT != true ]] || options+=(--spot)
    gcloud compute tpus queued-resources create "$NAME" "${where[@]}" --node-id="$NAME" \
        --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME" "${options[@]}" ||
        return 1
    until is_well; do
        state=$(queue_state)
        say "the request is ${state:-unknown}"
        # It will never be granted, and its name is taken as long as it exists.
        [[ $state != FAILED && $state != SUSPENDED ]] || return 1
        sleep "$PAUSE"
    done
}

# Chained, not left to `set -e`, which a caller's `||` switches off.
install() {
    local archive=softbottle.tar.gz folder
    folder=$(mktemp -d)
    git archive --format=tar.gz --prefix=softbottle/ --output="$folder/$archive" HEAD &&
        gcloud compute tpus tpu-vm scp "$folder/$archive" "$NAME:" "${where[@]}" \
            --worker=all &&
        on all "set -e
            rm -rf softbottle && tar xzf $archive
            $(environment_command)
            $(mount_command)"
}

# The images' own Python is older than what softbottle needs.
environment_command() {
    cat <<COMMAND
python3 -m pip install --quiet --user $(quoted "uv==$UV")
~/.local/bin/uv venv --quiet --clear --python 3.12 venv
~/.local/bin/uv pip install --quiet --python venv/bin/python \
    -e './softbottle[train,data]' $(quoted "jax[tpu]==$JAX")
COMMAND
}

mount_command() {
    local share folder mount
    share=$(quoted "$SHARE")
    folder=$(quoted "$MOUNT")
    if [[ $SHARE == *:/* ]]; then
        mount="sudo apt-get -qq install -y nfs-common && sudo mount -t nfs $share $folder"
    else
        # A checkpoint is written under another name and then renamed: a bucket with a
        # hierarchical namespace does that at once, another one file by file.
        mount="sudo chown \$USER $folder &&
            gcsfuse --implicit-dirs --rename-dir-limit=100000 $share $folder"
    fi
    echo "sudo mkdir -p $folder"
    echo "mountpoint -q $folder || { $mount; }"
    quoted mkdir -p -- "$WORKDIR"
}

run() {
    on all "cd softbottle && PYTHON=\$HOME/venv/bin/python $(quoted env "NAME=$NAME" \
        "CONFIG=$CONFIG" "MODEL=$MODEL" "WORKDIR=$WORKDIR" bash launch/pods/worker.sh \
        "--config.data.path=$DATA" "--config.data.cache=$MOUNT/cache" \
        "--config.data.rows=$ROWS" "$@")"
}

# To the training process of every host, by its id.
signal() {
    on all "$(quoted env "NAME=$NAME" bash softbottle/launch/pods/process.sh signal "$1")"
}

# All hosts save at the same step and leave.
stop() { signal TERM; }

delete() {
    gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
}

# A run is finished when all hosts say so by their status and the share agrees. What the
# share says alone is not enough: it may be of an earlier run, which now is to go on.
until_finished() {
    local failures=0 installed=false finished=false
    until [[ $finished == true ]]; do
        if ! is_well; then
            say "no slice; the queue says '$(queue_state)'"
            failures=0
            installed=false
            [[ -z $(queue_state) ]] || delete
            create || { sleep "$PAUSE" && continue; }
        fi
        if [[ $installed == true ]] || install; then
            installed=true
            if run "$@"; then
                ! is_finished || finished=true
            else
                say "the run has stopped with status $?"
            fi
        fi
        if [[ $finished == false ]] && is_well; then
            failures=$((failures + 1))
            say "failure $failures of $RETRIES on a slice that is well"
            ((failures < RETRIES)) || exit 1
            # What a broken connection has left behind holds the chips.
            signal KILL || true
        fi
    done
    say "finished: $WORKDIR/summary.json on $SHARE"
    delete
}

case ${1:---} in
create | install | run | stop | delete)
    stage=$1
    shift
    "$stage" "$@"
    ;;
--*) until_finished "$@" ;;
*)
    say "no stage '$1'; there are create, install, run, stop and delete"
    exit 64
    ;;
esac
