"""The multi-node launchers: two 'nodes' on this machine, reached by an ssh and an srun that run things here."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SSH, SLURM = ROOT / "scripts" / "launch_ssh.sh", ROOT / "scripts" / "launch_slurm.sh"
RECIPE = "train_configs/debug.toml"
FAKE_SSH = 'test $# = 2 && echo "$1" >> "$0.hosts" && exec bash -c "$2"\n'
FAKE_SRUN = """\
out= tasks=
while case $1 in -*) true ;; *) false ;; esac; do
    case $1 in --output=*) out=${1#*=} ;; --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
for ((node = 0; node < tasks; node++)); do
    SLURM_NODEID=$node "$@" > "${out/\\%n/$node}" 2>&1 || { echo "task $node failed" >&2; exit 1; }
done
"""
# Replaces a node's Python: node 1 ends as FAILS says, the others stay until they are stopped.
FAKE_PYTHON = """\
#!/bin/bash
echo "here are $*"
if [[ -n ${FAILS:-} && $* == *"--node-rank 1 "* ]]; then sleep 0.5; echo boom; exit "$FAILS"; fi
echo $$ > "$(dirname "$0")/pid.$$"
[[ -n ${STAY:-} ]] && exec sleep 300
exit 0
"""


@pytest.fixture
def fake(tmp_path):
    """A folder with a fake ssh, srun and venv/bin/python."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "srun").write_text("#!/bin/bash\n" + FAKE_SRUN)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (tmp_path / "srun").chmod(0o755)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """Without what a Slurm job or torchrun around the tests would set."""
    foreign = ("SLURM_", "SCONTROL", "SRUN", "SSH", "GPUS", "VENV", "PORT", "LOGS", "MASTER_", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | more


def launch(script: Path, *words: object, timeout: float = 60, **more: str) -> subprocess.CompletedProcess:
    command = [str(script), *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )


def over_ssh(fake: Path, *words: object) -> list[str]:
    options = ["--hosts", "me@a,b", "--gpus", "2", "--venv", fake / "venv", "--logs", fake / "logs", *words, RECIPE]
    return [str(word) for word in options]


def running(fake: Path) -> list[int]:
    """The fake nodes that are still running."""
    pids = [int(file.read_text() or 0) for file in (fake / "venv" / "bin").glob("pid.*")]
    return [pid for pid in pids if pid and Path(f"/proc/{pid}/cmdline").exists() and not zombie(pid)]


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would everything that it starts, including these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("script", [SSH, SLURM], ids=lambda path: path.name)
def test_syntax(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False).stderr == ""
    assert os.access(script, os.X_OK)


# ---- ssh


def test_two_nodes_train(fake):
    settings = dict(steps=2, seq_len=32, local_batch_size=2, global_batch_size=4, device="cpu")
    done = launch(
        SSH,
        *("--hosts", "a,b", "--gpus", 1, "--master", "127.0.0.1", "--port", free_port(), "--logs", fake / "logs"),
        *("--venv", sys.prefix, RECIPE),
        *(word for name, value in settings.items() for word in (f"--training.{name}", value)),
        *("--parallelism.experts.ep", 2, "--data.source", "synthetic", "--metrics.tensorboard", "false"),
        *("--job.dump_folder", fake / "runs", "--job.name", "it's two nodes"),
        timeout=150,
        SSH=f"bash {fake / 'ssh'}",
    )
    logs = [(fake / "logs" / f"node{node}.log").read_text() for node in (0, 1)]
    assert done.returncode == 0, done.stderr + "\n".join(logs)
    assert sorted((fake / "ssh.hosts").read_text().split()) == ["a", "b"]
    steps = [json.loads(line) for line in (fake / "runs" / "it's two nodes" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert "2 ranks" in logs[0] and "loss" in logs[0]  # rank 0 prints, and node 0's log is shown as it comes
    assert "loss" in done.stdout and "loss" not in logs[1]


def test_ssh_dry_run_is_what_would_run(fake):
    more = ["--port", "1234", "--env", "NCCL_DEBUG=INFO", "--dir", "/far away", "--dry-run"]
    done = launch(SSH, *over_ssh(fake, *more), "--job.name", "it's", SSH="my ssh", OMP_NUM_THREADS="3")
    assert done.returncode == 0 and not (fake / "logs").exists()
    words = shlex.split(done.stdout, comments=True)
    assert words[:3] == ["my", "ssh", "me@a"] and words[4:7] == ["my", "ssh", "b"]
    for node, script in enumerate((words[3], words[7])):
        line = next(line for line in script.splitlines() if line.startswith("env "))
        run = shlex.split(line.partition(" </dev/null")[0])
        assert shlex.split(script.splitlines()[0])[:2] == ["cd", "/far away"]
        assert run == [
            *("env", "OMP_NUM_THREADS=3", "PYTHONUNBUFFERED=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
            *("NCCL_DEBUG=INFO", f"{fake}/venv/bin/python"),
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)),
            *("--master-addr", "a", "--master-port", "1234", "train.py", "--config", RECIPE, "--job.name", "it's"),
        ]


def test_a_node_that_fails_ends_the_others(fake):
    done = launch(SSH, *over_ssh(fake), SSH=f"bash {fake / 'ssh'}", FAILS="3", STAY="yes", timeout=150)
    assert done.returncode == 1
    assert f"node 1 (b) failed with exit code 3, stopping the others; its log: {fake}/logs/node1.log" in done.stderr
    assert "boom" in done.stderr and f"node 0 (me@a): exit code 143, {fake}/logs/node0.log" in done.stderr
    assert "--node-rank 1" in (fake / "logs" / "node1.log").read_text()
    assert wait_for(lambda: running(fake) == [])


@pytest.mark.parametrize(
    "how, send",
    [(signal.SIGTERM, os.kill), (signal.SIGINT, os.kill), (signal.SIGTERM, os.killpg), (signal.SIGKILL, os.kill)],
    ids=["TERM", "INT", "TERM to all", "KILL"],
)
def test_no_node_outlives_the_launcher(fake, how, send):
    command = [str(SSH), *over_ssh(fake)]
    env = environment(SSH=f"bash {fake / 'ssh'}", STAY="yes")
    with (fake / "said").open("w") as said:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True, preexec_fn=heed_interrupts
        )
    try:
        assert wait_for(lambda: len(running(fake)) == 2)
        send(launcher.pid, how)
        assert launcher.wait(20) == (130 if how != signal.SIGKILL else -signal.SIGKILL)
        assert wait_for(lambda: running(fake) == [])
    finally:
        launcher.kill()
    assert how == signal.SIGKILL or "stopping all nodes" in (fake / "said").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        ([RECIPE], "--hosts is missing"),
        (["--hosts", "a", RECIPE], "--gpus = ''"),
        (["--hosts", "a", "--gpus", "8"], "the recipe is missing"),
        (["--hosts", "a", "--gpus", "8", "no.toml"], "there is no recipe no.toml"),
        (["--hosts", "a", "--gpu", "8", RECIPE], "unknown option --gpu"),
        (["--hosts", "a", "--gpus", "8", "--env", "X", RECIPE], "--env X is not NAME=VALUE"),
        (["--hosts"], "--hosts needs a value"),
    ],
)
def test_ssh_refuses(words, message):
    done = launch(SSH, *words)
    assert done.returncode == 2 and message in done.stderr


# ---- Slurm


def test_slurm_dry_run_is_what_a_job_would_run(fake):
    job = dict(SLURM_JOB_ID="4242", SLURM_JOB_NUM_NODES="16", SLURM_JOB_NODELIST="n[01-16]", SLURM_SUBMIT_DIR=str(ROOT))
    done = launch(SLURM, "--dry-run", RECIPE, "--job.name", "it's", SCONTROL=r"printf n01\nn02\n", **job)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:5] == ["cd", str(ROOT), "&&", "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1"]
    assert words[5:10] == [
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "srun",
        "--nodes=16",
        "--ntasks=16",
        "--ntasks-per-node=1",
    ]
    assert words[10] == "--kill-on-bad-exit=1"
    assert f"--output=runs/launch/{Path(RECIPE).stem}-4242/node%n.log" in words
    assert words[words.index(f"{ROOT}/.venv/bin/python") + 1 :] == [
        *("--nnodes", "16", "--nproc-per-node", "8", "--master-addr", "n01", "--master-port", "24242"),
        *("train.py", "--config", RECIPE, "--job.name", "it's"),
    ]


def test_slurm_starts_a_torchrun_per_node(fake):
    job = dict(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]", SCONTROL=r"printf n1\nn2\n")
    job |= dict(SRUN=str(fake / "srun"), VENV=str(fake / "venv"), LOGS=str(fake / "logs"), GPUS="4", PORT="1234")
    done = launch(SLURM, RECIPE, "--training.steps", "2", **job)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        assert (fake / "logs" / f"node{node}.log").read_text() == (
            f"here are -m torch.distributed.run --node-rank {node} --nnodes 2 --nproc-per-node 4 --master-addr n1 "
            f"--master-port 1234 train.py --config {RECIPE} --training.steps 2\n"
        )
    done = launch(SLURM, RECIPE, FAILS="3", **job)
    assert done.returncode == 1
    assert "a node failed (exit code 1) and the others were stopped" in done.stderr
    assert f"the logs are {fake}/logs/node*.log" in done.stderr


# Replaces srun when the job's time runs out: the run trains, saves when signalled, and ends like torchrun.
FAKE_LONG_SRUN = """\
#!/bin/bash
for word in "$@"; do case $word in --output=*) out=${word#*=} ;; esac; done
trap 'echo "saved      step-00000007" > "${out/\\%n/0}"; exit 143' TERM
[[ ${SAVES:-yes} == yes ]] || trap 'echo stopped > "${out/\\%n/0}"; exit 143' TERM
kill -USR1 "$PPID"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("more", "code", "message", "requeued"),
    [
        ({}, 0, "has saved: requeued", "requeue 7\n"),
        ({"SLURM_RESTART_COUNT": "1"}, 0, "has saved: requeued", "requeue 7\n"),
        ({"SAVES": "no"}, 143, "the run did not save: not requeued", ""),
        ({"REFUSES": "yes"}, 1, "scontrol requeue 7 failed", "requeue 7\n"),
    ],
)
def test_slurm_queues_a_job_again_whose_time_is_up(fake, more, code, message, requeued):
    for name, text in {
        "srun": FAKE_LONG_SRUN,
        "scontrol": '#!/bin/bash\necho "$*" >> "$0.requeued"; [[ -z ${REFUSES:-} ]]\n',
    }.items():
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "VENV": str(fake / "venv"),
        "LOGS": str(fake / "logs"),
        "PATH": f"{fake}:{os.environ['PATH']}",
    }
    done = launch(SLURM, RECIPE, **(job | more))
    assert done.returncode == code and message in done.stdout + done.stderr, done.stderr
    seen = fake / "scontrol.requeued"
    assert (seen.read_text() if seen.exists() else "") == requeued
    logs = fake / f"logs{'-1' if 'SLURM_RESTART_COUNT' in more else ''}"
    assert (logs / "node0.log").exists(), "each time its own logs"


def test_slurm_asks_for_the_signal_and_the_queue():
    requeued = [line.split()[1] for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append"} <= set(requeued)


def test_slurm_refuses(tmp_path):
    for words, message, more in [
        ([RECIPE], "no Slurm job: start with sbatch", {}),
        (["--dry-run"], "the recipe comes first", {}),
        (["--dry-run", "no.toml"], "there is no recipe no.toml", {}),
        (["--dry-run", RECIPE], "has no train.py", {"SLURM_SUBMIT_DIR": str(tmp_path)}),
        ([RECIPE], "there is no /nowhere/bin/python", {"SLURM_JOB_ID": "1", "VENV": "/nowhere"}),
    ]:
        done = launch(SLURM, *words, **more)
        assert done.returncode == 2 and message in done.stderr
