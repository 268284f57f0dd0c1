#!/bin/bash
# launch/pods/slurm.sbatch, really run: a Slurm of two nodes on this machine's loopback,
# and Open MPI. Not part of the test suite; from the repository's root:
#
#     PYTHON=.venv/bin/python tests/launch/slurm_run.sh
#
# On Debian: apt-get install munge slurm-wlm slurmctld slurmd slurm-client openmpi-bin
set -euo pipefail

PYTHON=${PYTHON:-python}   # an environment that has softbottle
ROOT=${ROOT:-$(mktemp -d)} # daemons' state, logs and runs: stays for a look
STEPS=${STEPS:-200}        # of each run
STRIKE=${STRIKE:-70}       # the step after which a run is disturbed
PORT=${PORT:-26817}        # this one and the two after it
PATIENCE=${PATIENCE:-300}  # seconds until a state that does not come is an error
CASES=${CASES:-calm extended killed outranked limit preempted hopeless every_gpu mpi}

root=$(cd "$ROOT" && pwd)
started=$(date +%s)
daemons=()

log() { printf '%4d s  %s\n' "$(($(date +%s) - started))" "$*"; }
fail() {
    log "FAILED: $*"
    exit 1
}

clean_up() {
    local pid
    if [[ ${SLURM_CONF:-} == "$root/slurm.conf" ]]; then
        scancel --user="$(id -un)" 2>/dev/null || true
        sleep 2
    fi
    for pid in "${daemons[@]}"; do
        kill "$pid" 2>/dev/null || true
    done
    wait
}
trap clean_up EXIT

# A command's output becomes true, or the time is up.
until_true() {
    local deadline=$(($(date +%s) + PATIENCE))
    until "$@"; do
        (($(date +%s) < deadline)) || fail "waited ${PATIENCE} s for: $*"
        sleep 0.3
    done
}

start_slurm() {
    local host
    host=$(hostname -s)
    mkdir -p "$root"/{munge,state,log,spool.n1,spool.n2}
    # munged refuses folders that others can write to.
    chmod 700 "$root/munge"
    dd if=/dev/urandom of="$root/munge/key" bs=1 count=1024 status=none
    chmod 600 "$root/munge/key"
    cat >"$root/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$root/munge/socket
CredType=cred/munge
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool.%n
MailProg=/bin/true
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd.%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
# What a container without systemd and without control groups can do.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# Nothing listens beyond loopback.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=10
MinJobAge=600
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 1)) CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 2)) CPUs=2 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
CONF
    # Devices that exist for the scheduler only: the runs are on CPU.
    printf 'Name=gpu File=/dev/%s\n' null zero >"$root/gres.conf"
    munged --foreground --force --key-file="$root/munge/key" \
        --socket="$root/munge/socket" --pid-file="$root/munge/pid" \
        --log-file="$root/munge/log" --seed-file="$root/munge/seed" \
        >"$root/log/munged" 2>&1 &
    daemons+=($!)
    until_true test -S "$root/munge/socket"
    export SLURM_CONF=$root/slurm.conf
    slurmctld -D >"$root/log/slurmctld.out" 2>&1 &
    daemons+=($!)
    local node
    for node in n1 n2; do
        slurmd -D -N "$node" >"$root/log/slurmd.$node.out" 2>&1 &
        daemons+=($!)
    done
    until_true nodes_idle
    log "$(slurmd -V), nodes: $(sinfo --noheader --Node --partition=low --format='%N %T' | paste -sd,)"
}

nodes_idle() { [[ $(sinfo --noheader --partition=low --states=idle --format=%D 2>/dev/null) == 2 ]]; }

# A small run, on two CPU devices in each process.
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 PYTHON
SMALL=(
    --config.train.steps="$STEPS" --config.train.equal_softmax=false
    --config.train.same_width_softmax=false
    --config.train.eval_every=100 --config.train.checkpoint_every=50
    --config.train.log_every=10 --config.data.rows=8 --config.data.length=16
    --config.data.synthetic.train_tokens=100000
    --config.data.synthetic.eval_tokens=5000 --config.model.vocab_multiple=8
)

# submit NAME [sbatch options]; EXTRA goes to launch/train.py
submit() {
    local name=$1
    shift
    CONFIG=configs/quickstart.py:mos,random WORKDIR=$root/$name MODEL=2 HEARTBEAT=10 \
        COORDINATOR=127.0.0.1 sbatch --parsable --nodes=2 --gpus-per-node=2 \
        --cpus-per-task=1 --output="$root/$name.log" "$@" \
        launch/pods/slurm.sbatch "${SMALL[@]}" ${EXTRA:+"$EXTRA"}
}

field() { scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p"; }
is() { [[ $(field "$1" "$2") == "$3" ]]; }
restarted() { (($(field "$1" Restarts) >= $2)) || ended "$1"; }
reached() { (($(step_of "$1") >= $2)); }

step_of() {
    local lines=$root/$1/metrics.jsonl
    [[ -e $lines ]] || { echo 0 && return; }
    sed -nE 's/.*"step": ([0-9]+).*/\1/p' "$lines" | sort -n | tail -n 1 | grep . || echo 0
}

# Slurm lets a job wait two minutes before it starts again. At once would be too early:
# its nodes refuse a job that they have just been told to forget.
start_soon() {
    until_true restarted "$1" 1
    until_true waiting "$1"
    scontrol update "JobId=$1" StartTime=now+5seconds || true
}

waiting() { is "$1" JobState PENDING || ended "$1"; }

# ends NAME STATE: what the job said, and how it ended
ends() {
    until_true ended "$job"
    log "job $job $(field "$job" JobState) $(field "$job" ExitCode), restarts: $(field "$job" Restarts)"
    grep --text "job $job, start" "$root/$1.log" | sed 's/^/        /'
    is "$job" JobState "$2" || fail "$2 was expected; see $root/$1.log"
}

ended() { [[ $(field "$1" JobState) =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED)$ ]]; }

ends_well() {
    ends "$1" COMPLETED
    compare "$1"
}

# The same run, whatever happened to it.
compare() {
    "$PYTHON" - "$root/calm/summary.json" "$root/$1/summary.json" <<'PYTHON_END' || fail "$1 differs"
import json
import sys

names = "steps", "valid_perplexity", "test_perplexity"
calm, other = (json.load(open(path)) for path in sys.argv[1:])
for name in names:
    print(f"        {name}: {other[name]!r}, undisturbed {calm[name]!r}")
sys.exit(any(calm[name] != other[name] for name in names))
PYTHON_END
}

disturb() {
    until_true reached "$1" "$STRIKE"
    log "job $job is at step $(step_of "$1"): $2"
}

calm() {
    job=$(submit calm)
    ends calm COMPLETED
}

preempted() {
    job=$(submit preempted)
    disturb preempted "scancel --signal=TERM"
    scancel --signal=TERM "$job"
    start_soon "$job"
    ends_well preempted
}

# A finished run is told to go on for longer, and is stopped on the way: its old summary
# must not make it finished.
extended() {
    local longer=$((STEPS + STRIKE))
    cp -r "$root/calm" "$root/extended"
    job=$(EXTRA=--config.train.steps=$longer submit extended)
    until_true reached extended $((STEPS + 10))
    log "job $job is at step $(step_of extended): scancel --signal=TERM"
    scancel --signal=TERM "$job"
    start_soon "$job"
    ends extended COMPLETED
    is "$job" Restarts 1 || fail "it was not put back into the queue"
    grep -q "\"steps\": $longer" "$root/extended/summary.json" || fail "it ended early"
    log "summary.json: $(grep '"steps"' "$root/extended/summary.json")"
}

limit() {
    job=$(submit limit)
    disturb limit "USR1 to the batch script, as --signal sends it before the time limit"
    scancel --batch --signal=USR1 "$job"
    start_soon "$job"
    ends_well limit
}

outranked() {
    local other
    job=$(submit outranked)
    disturb outranked "a job of a higher partition wants its nodes"
    other=$(sbatch --parsable --partition=high --nodes=2 --exclusive --output=/dev/null --wrap='sleep 2')
    until_true is "$other" JobState COMPLETED
    log "job $other of the higher partition COMPLETED"
    start_soon "$job"
    ends_well outranked
}

# The process of a workdir that has this number.
process() {
    local pid
    for pid in $(pgrep --full -- "--workdir $root/$1"); do
        if grep -qz "^SLURM_PROCID=$2\$" "/proc/$pid/environ" 2>/dev/null &&
            [[ $(readlink "/proc/$pid/exe") == *python* ]]; then
            echo "$pid"
        fi
    done
}

killed() {
    local at
    job=$(submit killed)
    disturb killed "kill -9 of process 1"
    at=$(date +%s)
    kill -9 "$(process killed 1)"
    until_true restarted "$job" 1
    log "back in the queue $(($(date +%s) - at)) s after the kill"
    start_soon "$job"
    ends_well killed
}

hopeless() {
    # No four devices share seven rows.
    job=$(RETRIES=1 EXTRA=--config.data.rows=7 submit hopeless)
    start_soon "$job"
    ends hopeless FAILED
}

# One process for each of the four devices.
every_gpu() {
    job=$(JAX_NUM_CPU_DEVICES=1 submit every_gpu --ntasks-per-node=2)
    ends_well every_gpu
}

mpi() {
    log "$(mpirun --version | head -n 1), mpirun -n 2"
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        mpirun -n 2 --oversubscribe --bind-to none --mca btl self,vader,tcp \
        --mca btl_tcp_if_include lo --mca oob_tcp_if_include lo \
        "$PYTHON" launch/train.py --config configs/quickstart.py:mos,random \
        --workdir "$root/mpi" --distributed --config.mesh.data=none \
        --config.mesh.model=2 "${SMALL[@]}" >"$root/mpi.log" 2>&1 || fail "mpirun: $?"
    compare mpi
}

start_slurm
for name in $CASES; do
    log "--- $name"
    "$name"
done
log "all passed"
