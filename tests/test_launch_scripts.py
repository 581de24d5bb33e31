"""The multi-node launchers: two 'nodes' on this machine, reached by an ssh and an srun that run things here."""

import contextlib
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

from tests.support import processes
from titanmoe.cli import main

ROOT = Path(__file__).resolve().parent.parent
SSH = ROOT / "scripts" / "launch_ssh.sh"
RECIPE = "train_configs/debug.toml"
FAKE_SSH = 'test $# = 2 && echo "$1" >> "$0.hosts" && exec bash -c "$2"\n'
FAKE_SRUN = """\
#!/bin/bash
out= tasks=
while [[ $1 == -* ]]; do
    case $1 in --output=*) out=${1#*=} ;; --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
for ((node = 0; node < tasks; node++)); do
    SLURM_NODEID=$node "$@" > "${out/\\%n/$node}" 2>&1 &
done
for ((node = 0; node < tasks; node++)); do
    wait -n || { echo "a task failed" >&2; kill $(jobs -p) 2>/dev/null; exit 1; }
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
# Replaces a node's Python: writes down its words and its environment.
NOTING_PYTHON = """\
#!/bin/bash
printf '%s\\0' "$@" > "$0.words$SLURM_NODEID"
env -0 > "$0.env$SLURM_NODEID"
"""


@pytest.fixture
def fake(tmp_path):
    """A folder with a fake ssh, srun and venv/bin/python."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "srun").write_text(FAKE_SRUN)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
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


def free_port(first: int = 0) -> int:
    """Any, or one of the 10,000 from `first` on."""
    for port in range(first + os.getpid() % 10_000, first + 10_000) if first else [0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError("no port is free")


def test_syntax():
    assert subprocess.run(["bash", "-n", str(SSH)], capture_output=True, text=True, check=False).stderr == ""
    assert os.access(SSH, os.X_OK)


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


def job_of(fake: Path, capsys: pytest.CaptureFixture[str], *words: object) -> Path:
    """The script that `titanmoe slurm` prints."""
    capsys.readouterr()
    assert main(["slurm", *map(str, words)]) == 0
    script = fake / "job.sh"
    script.write_text(capsys.readouterr().out)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False).stderr == ""
    return script


def submit(fake: Path, script: Path, nodes: int = 2, timeout: float = 60, **more: str) -> subprocess.CompletedProcess:
    """Run it as Slurm would, in an allocation whose first node is this machine."""
    (fake / "scontrol").write_text(more.pop("scontrol", "#!/bin/bash\nprintf '127.0.0.1\\nn2\\n'\n"))
    for name in ("scontrol", "srun"):
        (fake / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port(20000) - 20000), "SLURM_JOB_NUM_NODES": str(nodes)}
    job |= {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{fake}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(script)],
        cwd=fake,
        env=environment(PYTHONPATH=str(ROOT), **(job | more)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def small(fake: Path) -> list[object]:
    """Two ranks, each of which is a node."""
    settings = dict(steps=2, seq_len=32, local_batch_size=2, global_batch_size=4, device="cpu")
    return [
        *("debug", "--ranks", 2, "--gpus-per-node", 1, "--job.dump_folder", fake / "runs", "--job.name", "it's small"),
        *(word for name, value in settings.items() for word in (f"--training.{name}", value)),
        *("--parallelism.experts.ep", 2, "--parallelism.tp", 1, "--data.source", "synthetic"),
        *("--metrics.tensorboard", "false", "--validation.interval", 0, "--validation.held_out", 0),
    ]


def has_trained(fake: Path, submitted: subprocess.CompletedProcess, log: str) -> None:
    steps = [json.loads(line) for line in (fake / "runs" / "it's small" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and "1 rank on each of 2 nodes" in log
    assert "nodes: 2, ranks on each: 1, meeting at 127.0.0.1:" in submitted.stdout


def test_a_slurm_job_of_two_nodes_trains(fake, capsys):
    """Run what the job starts on two nodes, in processes that need not import torch."""
    python = fake / "venv" / "bin" / "python"
    python.write_text(NOTING_PYTHON)
    submitted = submit(fake, job_of(fake, capsys, *small(fake), "--python", python))
    assert submitted.returncode == 0, submitted.stderr
    (words, variables) = (
        [Path(f"{python}.{kind}{node}").read_text().split("\0")[:-1] for node in (0, 1)] for kind in ("words", "env")
    )
    nodes = [
        processes.Started(each, dict(line.split("=", 1) for line in environment), fake, forks=True)
        for each, environment in zip(words, variables, strict=True)
    ]
    done = [node.wait(150) for node in nodes]
    assert [each.returncode for each in done] == [0, 0], done
    has_trained(fake, submitted, done[0].stdout)


def test_a_slurm_job_of_two_nodes_trains_in_new_processes(fake, capsys):
    submitted = submit(fake, job_of(fake, capsys, *small(fake)), timeout=150)
    (folder,) = (fake / "runs" / "launch").iterdir()
    logs = [(folder / f"node{node}.log").read_text() for node in (0, 1)]
    assert submitted.returncode == 0, submitted.stderr + "\n".join(logs)
    has_trained(fake, submitted, logs[0])


def test_what_a_slurm_job_asks_for(fake, capsys):
    options = ["--account", "me", "--partition", "gpu", "--time", "4:00:00", "--sbatch=--qos=high"]
    script = job_of(fake, capsys, "mixtral_8x22b", *options).read_text()
    asked = {line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=16", "--gpus-per-node=8", "--ntasks-per-node=1", "--account=me", "--partition=gpu"}
    assert asked >= {"--time=4:00:00", "--qos=high", "--requeue", "--signal=B:USR1@120", "--open-mode=append"}
    assert not any("gpus" in line for line in job_of(fake, capsys, *small(fake)).read_text().splitlines()[:12])


@pytest.mark.parametrize("image", ["nvcr.io#me/titanmoe:1", "my images/titanmoe.sif"])
def test_a_slurm_job_in_a_container_checks_its_nodes_first(fake, capsys, image):
    (fake / "srun").write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" -- >> "$0.words"; [[ $* != *"${REFUSES:-nothing}"* ]]\n'
    )
    words = ["--container-image", image, "--container-mounts", "/data:/data", "--check", "--ranks", 16]
    script = job_of(fake, capsys, "mixtral_8x7b", *words)
    assert submit(fake, script).returncode == 0
    check, train = [call.splitlines() for call in (fake / "srun.words").read_text().split("\n--\n")[:2]]
    at = "$SLURM_NODEID"
    meet = ["--nnodes", "2", "--node-rank", at, "--master-addr", "$MASTER", "--master-port", "$PORT"]
    assert shlex.split(train[-1]) == [
        *("exec", "python", "-m", "titanmoe", "train", "mixtral_8x7b", "--ranks", "16", *meet),
        *("--logs", f"$LOGS/node{at}"),
    ]
    assert shlex.split(check[-1]) == [
        *("exec", "python", "-m", "torch.distributed.run", *meet, "--nproc-per-node", "8"),
        *("-m", "titanmoe.launcher.check_cluster", "--device", "auto"),
    ]
    mounts = f"{fake}:{fake},/data:/data"
    inside = [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={fake}"]
    if image.endswith(".sif"):
        inside = ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", str(fake), image]
    assert train[-3 - len(inside) : -1] == check[-3 - len(inside) : -1] == [*inside, "bash", "-c"]
    done = submit(fake, script, REFUSES="check_cluster")
    assert done.returncode == 1 and "this cluster is not fit to train on, or could not be checked" in done.stderr
    assert (fake / "srun.words").read_text().count("\n--\n") == 3, "it does not train"


def test_a_slurm_node_that_fails_is_reported(fake, capsys):
    python = ["--python", fake / "venv" / "bin" / "python"]
    done = submit(fake, job_of(fake, capsys, *small(fake), *python), FAILS="3")
    assert done.returncode == 1 and "a node failed (exit code 1) and the others were stopped" in done.stderr
    assert f"{fake}/runs/launch/it's small-" in done.stderr


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
def test_slurm_queues_a_job_again_whose_time_is_up(fake, capsys, more, code, message, requeued):
    (fake / "srun").write_text(FAKE_LONG_SRUN)
    scontrol = '#!/bin/bash\n[[ $1 == show ]] && echo n1 && exit\necho "$*" >> "$0.requeued"; [[ -z ${REFUSES:-} ]]\n'
    done = submit(fake, job_of(fake, capsys, *small(fake)), scontrol=scontrol, SLURM_JOB_ID="7", **more)
    assert done.returncode == code and message in done.stdout + done.stderr, done.stderr
    seen = fake / "scontrol.requeued"
    assert (seen.read_text() if seen.exists() else "") == requeued
    logs = fake / "runs" / "launch" / f"it's small-7{'-1' if 'SLURM_RESTART_COUNT' in more else ''}"
    assert (logs / "node0.log").exists(), "each time its own logs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "on how many ranks? Give --ranks N"),
        ("no.toml --ranks 8", "no.toml: there is no such file"),
        ("debug --ranks 12", "12 ranks do not fill nodes of 8: give --gpus-per-node 6, or other --ranks"),
        ("mixtral_8x22b --ranks 8", "parallelism."),
        ("debug --container-mounts a:b", "--container-mounts is about a container: give --container-image too"),
        ("debug --lr 3", "unknown option --lr: it is --optimizer.lr 3 here"),
    ],
)
def test_slurm_refuses(capsys, words, message):
    assert main(["slurm", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out
