#!/usr/bin/env bash
# Starts a recipe on several machines over ssh and waits until all have ended. docs/launch.md explains it.
set -u -o pipefail

usage() {
    cat <<'END'
scripts/launch_ssh.sh --hosts a,b --gpus 8 [options] RECIPE.toml [--table.field value ...]

  --hosts a,b,...    machines, as ssh knows them; the first is node 0, which has the rendezvous
  --gpus N           ranks per machine
  --master HOST      name or address of node 0 as the other nodes reach it (default: the first host without user@)
  --port P           free port on node 0 (default 29500)
  --dir PATH         folder of titanmoe, the same on all machines (default: the one this script is in)
  --venv PATH        Python environment, absolute or in --dir (default .venv)
  --env NAME=VALUE   set on every node; may be repeated. OMP_NUM_THREADS is 1 unless set here or around this script
  --logs FOLDER      on this machine; gets node0.log, node1.log, ... (default runs/launch/RECIPE-DATE-TIME)
  --dry-run          print the command of every node and start nothing

SSH="ssh -p 2222" in the environment replaces the ssh command: it gets the host and one command line.
END
}

fail() {
    echo "launch_ssh.sh: $*" >&2
    exit 2
}

quote() { # for any POSIX shell, which is what ssh passes a command to
    local word quoted=()
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then quoted+=("$word"); else quoted+=("'${word//\'/\'\\\'\'}'"); fi
    done
    echo "${quoted[*]}"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hosts='' gpus='' master='' port=29500 dir=$root venv=.venv logs='' dry_run='' settings=()
while [[ $# -gt 0 && $1 == -* ]]; do
    case $1 in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=yes && shift && continue ;;
        --hosts | --gpus | --master | --port | --dir | --venv | --env | --logs) ;;
        *) fail "unknown option $1: see --help; overrides come after the recipe" ;;
    esac
    [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value: see --help"
    case $1 in
        --env) [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || fail "--env $2 is not NAME=VALUE" && settings+=("$2") ;;
        *) printf -v "${1#--}" %s "$2" ;;
    esac
    shift 2
done
[[ -n $hosts ]] || fail "--hosts is missing, such as --hosts node0,node1"
[[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "--gpus = '$gpus' is not a number of ranks per machine, such as --gpus 8"
[[ $port =~ ^[1-9][0-9]*$ ]] || fail "--port = '$port' is not a port, such as --port 29500"
[[ $# -gt 0 ]] || fail "the recipe is missing, such as train_configs/mixtral_8x22b.toml"
recipe=$1 && shift
cd "$root" || exit 1
[[ -f $recipe ]] || fail "there is no recipe $recipe (looked in $root)"
IFS=, read -r -a host <<<"$hosts"
nodes=${#host[@]}
master=${master:-${host[0]#*@}}
name=$(basename "$recipe" .toml)
logs=${logs:-runs/launch/$name-$(date +%Y%m%d-%H%M%S)}
[[ $venv == /* ]] || venv=$dir/$venv

# What node $1 runs. Its standard input is a lifeline: when that ends, because this script or the connection did, the
# ranks are stopped. Killing ssh alone would leave them running.
command_of() {
    local run
    run=$(quote env "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1 \
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ${settings[@]+"${settings[@]}"} "$venv/bin/python" \
        -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "$1" --master-addr "$master" \
        --master-port "$port" train.py --config "$recipe" "${@:2}")
    cat <<END
cd $(quote "$dir") || exit 1
exec 3<&0
$run </dev/null 3<&- &
run=\$!
{ while read -r line; do :; done; kill \$run; } <&3 3<&- 2>/dev/null &
lifeline=\$!
wait \$run; code=\$?
kill \$lifeline 2>/dev/null
exit \$code
END
}

ssh=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=8}
if [[ -n $dry_run ]]; then
    for ((node = 0; node < nodes; node++)); do
        echo "# node $node, output to $logs/node$node.log"
        echo "$ssh $(quote "${host[node]}" "$(command_of "$node" "$@")")"
    done
    exit 0
fi

mkdir -p "$logs" || fail "cannot write to $logs"
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
mkfifo "$pipes/life" "$pipes/ended"
exec 8<>"$pipes/ended" 9<>"$pipes/life"

start() { # node, overrides: reports to pipe 8 when it ended and how, even if all processes here are signalled
    local node=$1 code
    trap : INT TERM HUP
    # shellcheck disable=SC2086  # the ssh command is several words
    $ssh "${host[node]}" "$(command_of "$@")" <"$pipes/life" 8>&- 9>&- 2>&1 | {
        trap '' INT TERM HUP
        if ((node == 0)); then tee "$logs/node0.log"; else cat >"$logs/node$node.log"; fi
    } 8>&- 9>&-
    code=${PIPESTATUS[0]}
    echo "$node $code" >&8
}

echo "$nodes nodes of $gpus ranks: $recipe; logs in $logs; node 0's follows"
started=()
for ((node = 0; node < nodes; node++)); do
    start "$node" "$@" 9>&- &
    started+=($!)
done

stopping='' failed='' deadline=0 ended=()
stop() { # every node; each has a minute
    [[ -n $stopping ]] && return
    stopping=yes deadline=$((SECONDS + 60))
    exec 9>&-
}
trap 'echo "launch_ssh.sh: stopping all nodes" >&2; failed=${failed:-none}; stop' INT TERM HUP
while ((${#ended[@]} < nodes)); do
    if read -r -t 1 -u 8 node code; then
        ended[node]=$code
        if ((code != 0)) && [[ -z $failed ]]; then
            failed=$node
            echo "launch_ssh.sh: node $node (${host[node]}) failed with exit code $code, stopping the others;" \
                "its log: $logs/node$node.log" >&2
            stop
        fi
    elif [[ -n $stopping ]] && ((SECONDS > deadline)); then
        for ((node = 0; node < nodes; node++)); do
            [[ -n ${ended[node]:-} ]] && continue
            echo "launch_ssh.sh: node $node (${host[node]}) does not answer, its ranks may still run" >&2
            pkill -P "${started[node]}" 2>/dev/null
            ended[node]=124
        done
    fi
done
[[ -z $failed ]] && exit 0
[[ $failed == none ]] && exit 130
tail -n 15 "$logs/node$failed.log" >&2
for ((node = 0; node < nodes; node++)); do
    echo "  node $node (${host[node]}): exit code ${ended[node]}, $logs/node$node.log" >&2
done
exit 1
