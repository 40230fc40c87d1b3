#!/usr/bin/env bash
# Prepares a job on this machine, inside a batch system or outside one, and runs commands in it:
#
#   source scripts/slurm_setup.sh
#   job_run python train.py experiment=paper_qwen1.7b
#
# Sourcing prints what the job may use, refuses GPUs that somebody else is on, and makes a private
# folder for Ray (RAY_TMPDIR), which goes when the shell ends; where the shell is killed, the next
# start on the machine removes it. A second time does nothing.
# job_run waits for the command and has its exit status; a signal of the batch system reaches the
# command, and only the command, as SIGTERM. After SIGUSR1, by which the system announces the end
# of the job's time, the job is put back into the queue.
#
#   GPU_BUSY_MIB   a GPU with so much memory in use counts as taken           (1024)
#   GPU_WAIT_S     seconds that a GPU has to become free                      (30)
#   STOP_WITHIN_S  seconds that the command has after SIGUSR1, then it is killed (150)
#   REQUEUE        how often the job may go back into the queue; 0: never     (100)
#
# With several machines job_run runs the command by "delta-belief node" on all of them: a job of
# SLURM with more than one node starts it there by srun, and without SLURM one calls job_run on
# every machine.
#
#   NNODES         machines; those of the job by default
#   NODE_RANK      without SLURM: number of this machine, from 0
#   MEET_DIR       folder that all machines share; with SLURM outputs/ by default
#   MEET_WITHIN_S  seconds until all machines must be there                   (300)
#   NET_INTERFACE  network interface between the machines; Ray's choice by default
#
# Ends with status 2 and one sentence where the job cannot run.

job_say() {
  echo "slurm_setup.sh: $1" >&2
}

# --- what the job may use -------------------------------------------------------------------------

# CPUs of the allocation: the least of what the batch system, the affinity and the cgroup grant.
job_count_cpus() {
  local asked="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}}" quota='' period=''
  # nproc takes a number of OpenMP threads for one of CPUs.
  job_cpus="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"
  if [[ $asked =~ ^[0-9]+$ ]] && ((asked < job_cpus)); then
    job_cpus=$asked
  fi
  if [[ -r /sys/fs/cgroup/cpu.max ]]; then
    read -r quota period </sys/fs/cgroup/cpu.max || :
  fi
  if [[ $quota =~ ^[0-9]+$ && $period =~ ^[0-9]+$ ]] && ((quota < job_cpus * period)); then
    job_cpus=$((quota / period > 0 ? quota / period : 1))
  fi
}

job_ask_gpu() {
  timeout 30 nvidia-smi "$@" --format=csv,noheader,nounits 2>/dev/null
}

# GPUs of the job as nvidia-smi knows them: those of CUDA_VISIBLE_DEVICES, else all that it shows.
job_find_gpus() {
  local text=''
  job_gpus=()
  if ! text="$(job_ask_gpu --query-gpu=index)" || [[ -z $text ]]; then
    return 0
  fi
  # Beside CUDA_VISIBLE_DEVICES they only contradict.
  unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
  # So that a number means the same GPU to CUDA as to nvidia-smi.
  export CUDA_DEVICE_ORDER="${CUDA_DEVICE_ORDER:-PCI_BUS_ID}"
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=', ' read -r -a job_gpus <<<"$CUDA_VISIBLE_DEVICES"
  else
    mapfile -t job_gpus <<<"$text"
  fi
  if [[ ${job_gpus[*]:-} == -1 ]]; then
    job_gpus=()
  fi
  if [[ ${SLURM_GPUS_ON_NODE:-} =~ ^[0-9]+$ ]] && ((${#job_gpus[@]} > SLURM_GPUS_ON_NODE)); then
    job_say "CUDA_VISIBLE_DEVICES names ${#job_gpus[@]} GPUs and the job has $SLURM_GPUS_ON_NODE\
 on this node: ask for more, or name fewer"
    return 2
  fi
}

# Who is on a GPU, in words.
job_holders() {
  local words='' line=()
  while IFS=', ' read -r -a line; do
    if [[ ${line[0]:-} =~ ^[0-9]+$ ]]; then
      words+="${words:+ and }process ${line[0]} (${line[1]:-?} MiB)"
    fi
  done < <(job_ask_gpu -i "$1" --query-compute-apps=pid,used_memory || :)
  echo "${words:-processes that cannot be seen from here}"
}

# Memory of a process that has just ended is given back within seconds, hence the wait.
job_check_gpus() {
  local gpu used limit="${GPU_BUSY_MIB:-1024}" last=$((SECONDS + ${GPU_WAIT_S:-30}))
  for gpu in ${job_gpus[@]+"${job_gpus[@]}"}; do
    while used="$(job_ask_gpu -i "$gpu" --query-gpu=memory.used)" && [[ $used =~ ^[0-9]+$ ]]; do
      if ((used < limit)); then
        continue 2
      fi
      if ((SECONDS >= last)); then
        job_say "GPU $gpu has $used MiB in use by $(job_holders "$gpu"): end what is on it, name\
 other GPUs in CUDA_VISIBLE_DEVICES, or raise GPU_BUSY_MIB ($limit)"
        return 2
      fi
      sleep 1
    done
    job_say "the memory of GPU $gpu cannot be asked for and is not checked"
  done
}

# --- Ray's folder ---------------------------------------------------------------------------------

# Ray puts Unix sockets into it, whose paths may have 107 bytes, 64 of which are Ray's own.
job_make_folder() {
  local place places=() tried=''
  for place in "${RAY_TMPDIR:-}" "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp /var/tmp /dev/shm; do
    place="${place%/}"
    if [[ $place == /* ]] && ((${#place} + 9 + 64 <= 107)); then
      places+=("$place")
    fi
  done
  job_sweep "${places[@]}" 2>/dev/null || :
  for place in "${places[@]}"; do
    if job_folder="$(mktemp -d "$place/r.XXXXXX" 2>/dev/null)"; then
      job_note_owner 2>/dev/null || :
      export RAY_TMPDIR="$job_folder"
      return 0
    fi
    tried+="${tried:+, }$place"
  done
  job_say "no folder for Ray can be made in any of $tried: set TMPDIR to a writable folder of at\
 most 34 characters"
  return 2
}

# What tells this machine, since it was started, and its namespace of processes from others.
job_here() {
  echo "$(</proc/sys/kernel/random/boot_id) $(readlink /proc/self/ns/pid)"
}

# Start time of a process in clock ticks; nothing where it is gone or a zombie.
job_born() {
  local text='' fields=()
  text="$(cat "/proc/$1/stat" 2>/dev/null)" || return 0
  # The name in brackets may hold blanks and brackets itself.
  IFS=' ' read -r -a fields <<<"${text##*)}"
  if [[ ${fields[0]:-Z} != [ZX] ]]; then
    echo "${fields[19]:-}"
  fi
}

# Says in the folder that this shell owns it: number, start time, machine, namespace.
job_note_owner() {
  local pid="$BASHPID" born='' here=''
  born="$(job_born "$pid")"
  here="$(job_here)"
  if [[ -n $born && $here == ?*' pid:'?* ]]; then
    # Whole or not at all.
    echo "$pid $born $here" >"$job_folder/.owner" &&
      mv -f -- "$job_folder/.owner" "$job_folder/owner"
  fi
}

# Removes the folders of shells that could not do it, in all places that are named. Those of other
# users, machines and namespaces stay, and so do those that do not say whose they are: they may
# just have been made. One that processes still use stays until a later start.
job_sweep() (
  # Where the shell writes down what it does, the environment of others is none of it.
  { set +x; } 2>/dev/null
  set +f
  shopt -u failglob
  shopt -s nullglob
  gone=() used=''
  for place in "$@"; do
    for folder in "$place"/r.??????; do
      if job_is_abandoned "$folder" "$(job_here)"; then
        gone+=("$folder")
      elif [[ ! -L $folder && -O $folder ]]; then
        # A shell that was killed before it could say whose the folder is has left it empty.
        find "$folder" -maxdepth 0 -type d -empty -mmin +60 -exec rmdir -- {} \;
      fi
    done
  done
  if ((${#gone[@]} == 0)); then
    return 0
  fi
  # Only now: while an owner lives, it may start more.
  job_find_used
  for folder in "${gone[@]}"; do
    # Where links lead to a folder it has other paths, and its random name is in each of them.
    if [[ "$* $used" != *"/${folder##*/}"* ]]; then
      job_delete "$folder"
    fi
  done
)

# Whether a folder, and each one that another shell has made in it, has lost its owner.
job_is_abandoned() {
  local pid='' born='' here='' inner=''
  if [[ -L $1 || ! -d $1 || ! -O $1 || -L $1/owner || ! -f $1/owner ]] ||
    ! IFS=' ' read -r pid born here <"$1/owner"; then
    return 1
  fi
  if [[ ! "$pid $born" =~ ^[0-9]+\ [0-9]+$ || $here != "$2" || $(job_born "$pid") == "$born" ]]
  then
    return 1
  fi
  for inner in "$1"/r.??????; do
    job_is_abandoned "$inner" "$2" || return 1
  done
  # On a disk that machines share, a run of several has a folder of each of them in it.
  for inner in "$1"/dbrl-*/owner.json; do
    [[ "$(<"$inner")" == *"${2%% *}"* ]] || return 1
  done
}

# What processes have as Ray's folder, which such paths are in their command lines, and where they
# work, as far as they can be looked into; goes to $used of job_sweep.
job_find_used() {
  local process='' word=''
  used="$(readlink /proc/[0-9]*/cwd)"
  for process in /proc/[0-9]*; do
    while IFS= read -r -d '' word; do
      if [[ $word == RAY_TMPDIR=* ]]; then
        used+=" $word"
      fi
    done <"$process/environ"
    while IFS= read -r -d '' word; do
      if [[ $word == */r.??????* ]]; then
        used+=" $word"
      fi
    done <"$process/cmdline"
  done
}

# The owner goes last, so that a folder that is left half removed still says whose it was.
job_delete() (
  set +f
  shopt -u failglob
  shopt -s nullglob dotglob
  inside=()
  for entry in "$1"/*; do
    if [[ $entry != "$1/owner" ]]; then
      inside+=("$entry")
    fi
  done
  rm -rf -- ${inside[@]+"${inside[@]}"}
  rm -rf -- "$1"
)

job_remove_folder() {
  if [[ -n ${job_folder:-} ]]; then
    job_delete "$job_folder"
    job_folder=''
  fi
}

# What the shell was to do at its end, it still does.
job_remove_folder_at_exit() {
  local before=()
  eval "before=($(trap -p EXIT))"
  # shellcheck disable=SC2064  # what is known now is meant
  trap "${before[2]:+${before[2]}$'\n'}job_remove_folder" EXIT
}

job_setup() {
  local where="${SLURM_JOB_ID:+job $SLURM_JOB_ID on }"
  job_count_cpus
  job_find_gpus || return
  job_check_gpus || return
  job_make_folder || return
  job_remove_folder_at_exit
  echo "$where${SLURMD_NODENAME:-$(uname -n)}: $job_cpus CPUs, ${#job_gpus[@]} GPUs\
${job_gpus[*]:+ (${job_gpus[*]})}, Ray in $job_folder"
}

# --- a command of the job -------------------------------------------------------------------------

job_pass_on() {
  job_woken=1
  # The announcement stays what it is when the end itself follows it.
  if [[ $job_signal != USR1 ]]; then
    job_signal="$1"
  fi
  if [[ -n $job_pid ]]; then
    kill -"$job_ask" "$job_pid" 2>/dev/null || :
  fi
}

# Waits for the command, of which a signal to this shell would make ``wait`` lose sight.
job_wait() {
  local last
  while :; do
    job_woken='' job_status=0
    wait "$job_pid" || job_status=$?
    if [[ -z $job_woken ]]; then
      return 0
    fi
    if [[ $job_signal == USR1 ]]; then
      last=$((SECONDS + ${STOP_WITHIN_S:-150}))
      while kill -0 "$job_pid" 2>/dev/null && ((SECONDS < last)); do
        sleep 1
      done
      if kill -KILL "$job_pid" 2>/dev/null; then
        job_say "the run did not stop within ${STOP_WITHIN_S:-150} s and was killed"
      fi
    fi
  done
}

job_requeue() {
  local most="${REQUEUE:-100}" count="${SLURM_RESTART_COUNT:-}"
  if [[ -z ${SLURM_JOB_ID:-} || $most == 0 ]]; then
    return 0
  fi
  # One whose first step takes longer than its time would come back for ever.
  if ((count >= most)); then
    job_say "job $SLURM_JOB_ID has been put back $count times, REQUEUE allows $most: it stays out"
    return 0
  fi
  # The batch system may end this shell at once.
  job_remove_folder
  job_say "job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || job_say "job $SLURM_JOB_ID could not be put back"
}

# The command as one of several machines runs it, in job_words; on one machine it stays as it is.
job_on_nodes() {
  local nodes="${NNODES:-${SLURM_JOB_NUM_NODES:-}}" meet="${MEET_DIR:-}"
  local root node=() start=()
  job_words=("$@")
  if [[ -z $nodes || $nodes == 1 ]]; then
    return 0
  fi
  if [[ ! $nodes =~ ^[1-9][0-9]*$ ]]; then
    job_say "NNODES=$nodes is no number of machines"
    return 2
  fi
  if [[ -z ${python:-} ]]; then
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    # shellcheck source=scripts/find_python.sh
    source "$root/scripts/find_python.sh"
    find_python "$root" delta_belief_rl.cli.front
  fi
  node=("$python" -m delta_belief_rl.cli.main node --deadline "${MEET_WITHIN_S:-300}")
  if [[ -n ${NET_INTERFACE:-} ]]; then
    node+=(--interface "$NET_INTERFACE")
  fi
  if [[ -n ${SLURM_JOB_ID:-} ]]; then
    # Each start of each job has a folder of its own.
    meet="${meet:-$PWD/outputs}/.meet-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}"
    # A machine that fails tells the others itself, so that the run can end in order.
    start=(srun "--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0)
    start+=(--cpu-bind=none --wait=0)
    # srun makes SIGKILL of a SIGTERM, and passes SIGUSR1 on to its tasks.
    job_ask=USR1
  elif [[ -n $meet && -n ${NODE_RANK:-} ]]; then
    node+=(--rank "$NODE_RANK" --nodes "$nodes")
  else
    job_say "NNODES=$nodes needs NODE_RANK, the number of this machine from 0, and MEET_DIR, a\
 folder that all machines share"
    return 2
  fi
  job_words=(${start[@]+"${start[@]}"} "${node[@]}" --meet "$meet" -- "$@")
}

# job_run COMMAND...: its exit status; 143 where it was asked to end.
job_run() {
  local before job_ask=TERM job_words=()
  job_on_nodes "$@" || return
  set -- "${job_words[@]}"
  before="$(trap -p INT HUP TERM USR1)"
  job_pid='' job_signal='' job_woken=''
  trap 'job_pass_on USR1' USR1
  trap 'job_pass_on TERM' TERM
  trap 'job_pass_on HUP' HUP
  # Ctrl-C reaches the command from the terminal.
  trap 'job_woken=1' INT
  # Where this shell itself is killed, the kernel asks the command to end.
  if command -v setpriv >/dev/null; then
    set -- setpriv --pdeathsig TERM -- "$@"
  fi
  # bash makes what runs in the background deaf to Ctrl-C. The end of the terminal is told by us.
  (
    trap - INT
    trap '' HUP
    exec "$@"
  ) &
  job_pid=$!
  if [[ -n $job_signal ]]; then
    kill -"$job_ask" "$job_pid" 2>/dev/null || :
  fi
  job_wait
  # A job that somebody cancels gets no announcement, and stays out of the queue.
  # 138 is one that the announcement met before it had begun.
  if [[ $job_signal == USR1 && $job_status =~ ^(143|138|137)$ ]]; then
    job_requeue
  fi
  job_pid=''
  trap - INT HUP TERM USR1
  eval "$before"
  return "$job_status"
}

if [[ ${job_shell:-} != "$BASHPID" ]]; then
  job_setup || return
  job_shell=$BASHPID
fi
