#!/bin/bash
# Start and stop a Slurm of one node on loopback, for tests.
#
#   tools/slurm_up.sh up DIR      start munged, slurmctld and slurmd; print the line that configures commands to use them
#   tools/slurm_up.sh down DIR    cancel all jobs and stop the three
#
# Needs root and Debian's packages: apt-get install slurmctld slurmd slurm-client munge
# DIR holds settings, keys, state, logs and process ids. The script changes nothing outside of it, and stops only
# processes that it started.
set -euo pipefail

command=${1:?up or down}
mkdir -p "${2:?a folder}"
dir=$(realpath "$2")
export SLURM_CONF="$dir/slurm.conf"

free_ports() {
  python3 -c 'import socket; a, b = socket.socket(), socket.socket()
for one in (a, b): one.bind(("127.0.0.1", 0))
print(a.getsockname()[1], b.getsockname()[1])'
}

up() {
  read -r controller_port node_port < <(free_ports)
  mkdir -p "$dir/state" "$dir/spool" "$dir/log"
  chmod 700 "$dir"
  cat > "$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$node_port
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=120
InactiveLimit=0
SchedulerParameters=sched_min_interval=100000
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=one Nodes=localhost Default=YES MaxTime=INFINITE State=UP
CONF
  # No cgroups, because containers rarely allow them.
  echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"
  head -c 1024 /dev/urandom > "$dir/munge.key"
  chmod 600 "$dir/munge.key"
  munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
  slurmctld -c -f "$SLURM_CONF"
  slurmd -N localhost -f "$SLURM_CONF"
  for _ in $(seq 100); do
    [ "$(sinfo --noheader --format=%t 2> /dev/null)" = idle ] && echo "export SLURM_CONF=$SLURM_CONF" && return
    sleep 0.2
  done
  echo "Slurm did not come up; its logs are in $dir/log:" >&2
  tail -n 20 "$dir"/log/*.log >&2
  down
  exit 1
}

down() {
  scancel --user=root 2> /dev/null || true
  for daemon in slurmd slurmctld munged; do
    pid=$(cat "$dir/$daemon.pid" 2> /dev/null) || continue
    kill "$pid" 2> /dev/null || true
    for _ in $(seq 100); do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
    kill -KILL "$pid" 2> /dev/null || true
  done
}

case $command in
  up) up ;;
  down) down ;;
  *) echo "usage: $0 up|down DIR" >&2; exit 2 ;;
esac
