#!/bin/bash
# The process that trains on this host, known by its id and not by its name:
#
#     NAME=softbottle launch/pods/process.sh record PID   # refused while an earlier one lives
#     NAME=softbottle launch/pods/process.sh signal TERM  # all hosts save and leave
#     NAME=softbottle launch/pods/process.sh signal KILL  # at once; returns when it is gone
#
# The record is on the host's own disk, since an id means nothing on another host, in a
# folder that nobody else can write to. It holds the id and the time at which the process
# started: one that is given the same id later is left alone.
set -euo pipefail

NAME=${NAME:-softbottle}                   # of the run
RECORDS=${RECORDS:-/tmp/softbottle-$UID}
record_file=$RECORDS/$NAME.pid

# In clock ticks since boot. None if there is no such process, or only its zombie: one
# without threads, since those keep the device's memory after the first has ended.
start_time() {
    local stat fields
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    # The second field is a name in brackets, which may itself have brackets and spaces.
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} != Z || ${fields[17]} -gt 1 ]] && echo "${fields[19]}"
}

# The id of the recorded process, if that is still alive.
recorded() {
    local pid started
    [[ -f $record_file && -O $record_file ]] || return 1
    read -r pid started <"$record_file" || return 1
    [[ $pid =~ ^[0-9]+$ && -n $started && $(start_time "$pid") == "$started" ]] &&
        echo "$pid"
}

record() {
    local pid=$1 earlier started
    if earlier=$(recorded); then
        echo "process $earlier still trains $NAME on $HOSTNAME; first end it:" \
            "NAME=$NAME launch/pods/process.sh signal KILL" >&2
        return 1
    fi
    [[ -d $RECORDS ]] || mkdir -m 700 -- "$RECORDS"
    if [[ -L $RECORDS || ! -O $RECORDS ]]; then
        echo "$RECORDS is not this user's own folder; set RECORDS to one that is" >&2
        return 1
    fi
    started=$(start_time "$pid")
    (umask 077 && echo "$pid $started" >"$record_file")
}

signal() {
    local name=$1 pid
    if ! pid=$(recorded); then
        echo "no process trains $NAME on $HOSTNAME" >&2
        return 0
    fi
    # It may have ended by itself just now.
    kill -s "$name" "$pid" 2>/dev/null || ! recorded >/dev/null
    [[ $name == KILL ]] || return 0
    for _ in {1..300}; do
        recorded >/dev/null || return 0
        sleep 0.1
    done
    echo "process $pid on $HOSTNAME does not end" >&2
    return 1
}

case ${1:-} in
record | signal)
    "$1" "${2:?is needed: a process id, TERM or KILL}"
    ;;
*)
    echo "say what to do: record PID, signal TERM or signal KILL" >&2
    exit 64
    ;;
esac
