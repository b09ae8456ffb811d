#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for tests: slurm_here.sh start|stop FOLDER (as root; Debian's slurm-wlm
# and munge). Prints the SLURM_CONF to use.
set -euo pipefail
action=$1
folder=$(realpath -m "$2")
if [ "$action" = stop ]; then
  for file in "$folder"/*.pid; do kill "$(cat "$file")" 2>/dev/null || true; done
  exit
fi
mkdir -p "$folder"/{state,spool0,spool1,munge}
host=$(hostname -s)
cores=$(nproc)
cat > "$folder/slurm.conf" <<END
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${SLURM_PORT:-26817}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MinJobAge=10
JobRequeue=1
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=26820 CPUs=$cores State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=26821 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=300 State=UP
END
sed -i "s#spool%n#spool-%n#" "$folder/slurm.conf"
mkdir -p "$folder"/spool-node{0,1}
dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 status=none
chmod 700 "$folder/munge"
chmod 400 "$folder/munge/key"
chown -R munge "$folder/munge"
chmod 755 "$folder/munge"
runuser -u munge -- munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
cp "$folder/munge/pid" "$folder/munged.pid"
export SLURM_CONF=$folder/slurm.conf
slurmctld -L "$folder/slurmctld.log"
for node in node0 node1; do slurmd -N "$node" -L "$folder/$node.log"; done
echo "SLURM_CONF=$folder/slurm.conf"
