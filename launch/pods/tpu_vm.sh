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

on() {
    local worker=$1
    shift
    gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker="$worker" --command="$*"
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

is_finished() { on 0 "test -e $WORKDIR/summary.json"; }

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
    cat <<'COMMAND'
python3 -m pip install --quiet --user uv
~/.local/bin/uv venv --quiet --clear --python 3.12 venv
~/.local/bin/uv pip install --quiet --python venv/bin/python -e softbottle 'jax[tpu]'
COMMAND
}

mount_command() {
    local mount
    if [[ $SHARE == *:/* ]]; then
        mount="sudo apt-get -qq install -y nfs-common && sudo mount -t nfs $SHARE $MOUNT"
    else
        # A checkpoint is written under another name and then renamed: a bucket with a
        # hierarchical namespace does that at once, another one file by file.
        mount="sudo chown \$USER $MOUNT &&
            gcsfuse --implicit-dirs --rename-dir-limit=100000 $SHARE $MOUNT"
    fi
    echo "sudo mkdir -p $MOUNT"
    echo "mountpoint -q $MOUNT || { $mount; }"
    echo "mkdir -p $WORKDIR"
}

run() {
    local arguments=""
    (($# == 0)) || printf -v arguments '%q ' "$@"
    on all "cd softbottle && PYTHON=\$HOME/venv/bin/python CONFIG=$CONFIG MODEL=$MODEL \
        WORKDIR=$WORKDIR bash launch/pods/worker.sh --config.data.path=$DATA \
        --config.data.cache=$MOUNT/cache --config.data.rows=$ROWS $arguments"
}

# All hosts save at the same step and leave.
stop() { on all "pkill -TERM -f launch/train.py || true"; }

delete() {
    gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
}

until_finished() {
    local failures=0 installed=false
    until is_well && is_finished; do
        if ! is_well; then
            say "no slice; the queue says '$(queue_state)'"
            failures=0
            installed=false
            [[ -z $(queue_state) ]] || delete
            create || { sleep "$PAUSE" && continue; }
        fi
        if [[ $installed == true ]] || install; then
            installed=true
            run "$@" || say "the run has stopped with status $?"
        fi
        if is_well && ! is_finished; then
            failures=$((failures + 1))
            say "failure $failures of $RETRIES on a slice that is well"
            ((failures < RETRIES)) || exit 1
            # What a broken connection has left behind holds the chips.
            on all "pkill -KILL -f launch/train.py || true" || true
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
