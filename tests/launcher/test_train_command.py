"""titanmoe train before any rank exists: its command line, how many ranks, the mapping that fits, what is refused."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.recipe import toml_module
from titanmoe.launcher import agent, fit_ranks, train_command
from titanmoe.launcher.agent import LaunchResult, RankLogs
from titanmoe.launcher.failure_message import RankFailure
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.launcher.train_command import Request, parse_words, prepare
from titanmoe.train import launch, launch_messages
from titanmoe.train.launch_messages import pass_config, read_passed_config

DEBUG = "train_configs/debug.toml"
CPUS, GPUS = Machine(0, 2), Machine(8, 64)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(fit_ranks, "this_machine", lambda device: CPUS)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def opened_recipes(monkeypatch) -> list[str]:
    """The names of all TOML files in the order in which they are opened, or parsed without being opened."""
    opened, parsed, real_open, real_loads = [], [], io.open, toml_module().loads

    def note_open(file, *rest, **options):
        if str(file).endswith(".toml"):
            opened.append(Path(file).name)
        return real_open(file, *rest, **options)

    def note_loads(text: str) -> dict:
        parsed.append(text)
        if len(parsed) > len(opened):
            opened.append("parsed again")
        return real_loads(text)

    monkeypatch.setattr(io, "open", note_open)  # pathlib's
    monkeypatch.setattr(builtins, "open", note_open)
    monkeypatch.setattr(toml_module(), "loads", note_loads)
    return opened


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as refusal:
        prepare(parse_words(words))
    return refusal.value


# ---- the command line


@pytest.mark.parametrize(
    ("words", "recipe", "options", "rest"),
    [
        ("a.toml --training.steps 5", "a.toml", {}, "--training.steps 5"),
        ("--ranks 2 a.toml --data.paths x y", "a.toml", {"ranks": "2"}, "--data.paths x y"),
        ("a.toml --data.paths x y --ranks=2 --fit", "a.toml", {"ranks": "2", "fit": "yes"}, "--data.paths x y"),
        ("--config a.toml --compile.enable --ranks 3", "a.toml", {"ranks": "3"}, "--compile.enable"),
        ("--fit a.toml --max_restarts 3", "a.toml", {"fit": "yes", "max-restarts": "3"}, ""),
        ("debug --ranks auto", "debug", {"ranks": "auto"}, ""),
        ("--training.steps 5 a.toml", "", {}, "--training.steps 5 a.toml"),  # a value, as far as can be known
    ],
)
def test_the_launchers_options_are_separated_from_the_runs(words, recipe, options, rest):
    request = parse_words(words.split())
    assert (request.recipe, request.options, request.rest, request.problems) == (recipe, options, rest.split(), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "which recipe? For example: titanmoe train train_configs/debug.toml"),
        ("debug --ranks many", "--ranks 'many' is not N|auto"),
        ("debug --ranks 0", "--ranks '0' is not N|auto"),
        ("debug --logs --fit", "--logs '--fit' is not FOLDER"),
        ("debug --nnodes some", "--nnodes 'some' is not N or MIN"),
        ("debug --nnodes some --nproc 4", "--nnodes 'some' is not N or MIN"),
        ("debug --nnodes 2 --ranks 2", "--nnodes 2: where do the nodes meet? --master-addr HOST --node-rank K"),
        ("nowhere.toml", "nowhere.toml: there is no such file"),
        ("debug --nproc 2", "--nproc is now --ranks 2, the ranks of all nodes together"),
        ("debug --nproc-per-node=4 --nnodes 2", "--nproc-per-node is now --ranks 8, the ranks of all nodes together"),
        ("debug --world 4 --nnodes 2", "--world is now --ranks 4,"),
        ("--gpus auto debug", "--gpus is now --ranks auto,"),
        ("deepseek_671b --training.stps 5", "unknown option --training.stps"),
        (
            "deepseek_671b --training.stps 5",
            "deepseek_671b is for 512 ranks (job.ranks) and this machine has 2 CPU cores",
        ),
    ],
)
def test_mistakes_on_the_command_line(words, message):
    assert any(message in problem for problem in refused(*words.split()).problems)


def test_help_has_the_launchers_options_and_every_field(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    for name in (*train_command.OUR_OPTIONS, *train_command.TORCHRUN_OPTIONS, "training.steps"):
        assert f"  --{name}" in printed
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "train a recipe here" in capsys.readouterr().out


def test_torchrun_gets_its_own_options():
    def words(text: str) -> set[str]:
        return set(train_command._torchrun_options(parse_words(text.split())))

    alone = words("debug --max-restarts 2")
    assert {"--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"} <= alone
    nodes = words("debug --nnodes 2 --node-rank 1 --master-addr a --master-port 7")
    assert nodes == {"--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=7"}
    elastic = words("debug --nnodes 1:2 --rdzv-endpoint a:7")
    assert elastic == {"--nnodes=1:2", "--rdzv-endpoint=a:7", "--rdzv-backend=c10d", "--master-port=29500"}


def test_the_environment_of_the_ranks(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    train_command._environment(
        train_command.PreparedRun(Request(options={"nnodes": "2"}), None, None, 4, Machine(0, 8))
    )
    assert os.environ["OMP_NUM_THREADS"] == "2" and os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    train_command._environment(train_command.PreparedRun(Request(), None, None, 4, Machine(0, 8)))
    assert os.environ["OMP_NUM_THREADS"] == "7" and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ


# ---- how many ranks


@pytest.mark.parametrize(
    ("requested", "nodes", "recipe_ranks", "machine", "count"),
    [
        ("", 1, 4, CPUS, 4),  # the recipe's own
        ("", 2, 8, GPUS, 8),
        ("3", 1, 4, CPUS, 3),
        ("auto", 1, 4, CPUS, 2),
        ("auto", 2, 4, GPUS, 16),
        ("", 1, 0, GPUS, 8),
    ],
)
def test_how_many_ranks(requested, nodes, recipe_ranks, machine, count):
    assert fit_ranks.choose_ranks(requested, nodes, recipe_ranks, machine) == count
    assert fit_ranks.why_too_many(count, nodes, machine, "" if requested else "r.toml") == ""


@pytest.mark.parametrize(
    ("world", "nodes", "machine", "recipe", "message"),
    [
        (128, 1, GPUS, "r.toml", "r.toml is for 128 ranks (job.ranks) and this machine has 8 GPUs: use --nnodes 16"),
        (64, 1, CPUS, "r.toml", "this machine has 2 CPU cores and no GPU in use"),
        (8, 3, GPUS, "r.toml", "which 3 nodes cannot share evenly: give --ranks 6 or 9"),
        (9, 1, GPUS, "", "--ranks = 9 and this machine has 8 GPUs: give 8 or fewer"),
        (18, 2, GPUS, "", "--ranks = 18, 9 of them here, and this machine has 8 GPUs: give 16 or fewer"),
    ],
)
def test_ranks_that_this_machine_does_not_have(world, nodes, machine, recipe, message):
    assert message in fit_ranks.why_too_many(world, nodes, machine, recipe)


# ---- a mapping that fits


def test_the_recipes_own_number_needs_no_option():
    prepared = prepare(parse_words(["debug"]))
    assert (
        prepared.nproc == 4
        and prepared.config.parallelism.experts.ep == 4
        and prepared.config.parallelism.dp_shard == 2
    )


def test_the_nearest_mapping_is_offered_and_taken(capsys):
    refusal = refused("debug", "--ranks", "auto")
    assert "parallelism.experts.ep = 4 does not divide the stage of 2 ranks" in refusal.problems[0]
    assert refusal.offer == ("The nearest mapping that fits 2 ranks: parallelism.experts.ep 4 -> 2; --fit takes it.")
    prepared = prepare(parse_words(["debug", "--ranks", "auto", "--fit"]))
    assert prepared.config.parallelism.experts.ep == 2 and prepared.request.words[-1] == "--parallelism.experts.ep=2"
    assert "fitted to 2 ranks: parallelism.experts.ep 4 -> 2" in capsys.readouterr().err
    assert launch.receive_config(prepared.checked, 2).parallelism.experts.ep == 2, "the ranks agree"
    assert main(["train", "debug", "--ranks", "auto"]) == 2
    assert capsys.readouterr().err.endswith("--fit takes it.\n")


def test_ranks_get_the_config_and_neither_read_nor_check_it_again(monkeypatch):
    words = ["debug", "--optimizer.lr=2.5e-4", "--data.skip_steps", "3", "5-7", "--job.name", 'say "ü"']
    prepared = prepare(parse_words(words))
    recipes = opened_recipes(monkeypatch)

    expected = launch.read_config(prepared.request.words, 4, COMPONENTS)
    assert len(recipes) == 1, "under torchrun each rank reads it once"
    with pass_config(prepared.checked) as file:
        monkeypatch.setenv(launch_messages.CONFIG_FILE, str(file))
        monkeypatch.setattr(launch, "refusals", None)
        assert launch.receive_config(read_passed_config(COMPONENTS), 4) == expected
    assert not file.exists()
    assert len(recipes) == 1, "a rank of titanmoe train does not read it"


@pytest.mark.parametrize(
    "words",
    [
        "debug",
        "debug --training.steps 3 --ranks 4",
        "debug --ranks auto --fit",
        "debug_pp --memory ignore",
        "debug --ranks auto",
        "debug --parallelism.tp 3",
        "deepseek_671b",
        "debug --print-config",
    ],
)
def test_the_launcher_reads_the_recipe_once(words, monkeypatch, capsys):
    recipes = opened_recipes(monkeypatch)
    with contextlib.suppress(ConfigError, SystemExit):
        prepare(parse_words(words.split()))
    assert recipes == [words.split()[0] + ".toml"]


def test_a_restart_on_other_ranks_is_fitted_and_checked(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    checked = prepare(parse_words(["debug", "--parallelism.dp_shard=2"])).checked
    config = launch.receive_config(checked, 8)
    assert config.job.ranks == 8 and config.parallelism.dp_shard == 4
    assert "mapping: restarted on 8 ranks: parallelism.dp_shard 2 -> 4" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"parallelism\.tp = 2") as refusal:
        launch.receive_config(checked, 3)
    assert refusal.value.source == "debug and the command line"
    with pytest.raises(ConfigError, match="global_batch_size = 16 is not a multiple"):
        launch.receive_config(checked, 12)


def test_a_number_of_ranks_without_any_mapping_offers_one_that_has_one():
    refusal = refused("debug", "--ranks", "7", "--fit")
    assert "No mapping of 7 ranks fits this model and batch; one of 6 does: --ranks 6 --fit (" in refusal.offer


def test_other_mistakes_get_no_offer():
    refusal = refused("debug", "--metrics.wandb", "x", "--training.steps", "0")
    assert not getattr(refusal, "offer", "")


def test_ctrl_c_before_there_are_ranks_is_quiet(tmp_path):
    """While it reads the recipe, which does not end."""
    os.mkfifo(recipe := tmp_path / "endless.toml")
    run = processes.Started(["-m", "titanmoe", "train", recipe])
    writer = None
    while writer is None and run.process.is_alive():
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # it is not open for reading yet
            writer = os.open(recipe, os.O_WRONLY | os.O_NONBLOCK)
    run.send_signal(signal.SIGINT)
    done = run.wait(60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# ---- one process


def test_one_process_gets_the_command_and_not_another_mapping(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refusal:
        launch.read_config(["--config", DEBUG, "--training.steps", "5"], 1, COMPONENTS)
    (problem,) = refusal.value.problems
    assert problem == (
        "this recipe is for 4 ranks, and this is one process without a launcher: "
        f"titanmoe train {DEBUG} --training.steps 5"
    )
    with pytest.raises(ConfigError) as refusal:
        launch.read_config([f"--config={DEBUG}", "--parallelism.tp=3"], 1, COMPONENTS)
    assert "does not divide the stage of 4 ranks" in refusal.value.problems[0]
    alone = ["--config", DEBUG, "--parallelism.tp", "1", "--parallelism.experts.ep", "1"]
    assert launch.read_config(alone, 1, COMPONENTS).parallelism.dp_shard == 1


# ---- this machine


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["train", "debug", "--master-addr", "here", "--master-port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: --master-port {port} is in use by another program on here: give another one, the same on every node\n"
    )


def test_logs_that_cannot_be_written_are_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "file").touch()
    assert main(["train", "debug", "--logs", str(tmp_path / "file" / "logs")]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot write the ranks' logs to {tmp_path}/file/logs: Not a directory: "
        "give --logs FOLDER, or another job.dump_folder\n"
    )


@pytest.mark.parametrize(("code", "left"), [(2, []), (1, ["launch"])], ids=["refused", "failed"])
def test_only_a_failure_leaves_logs(code: int, left: list[str], monkeypatch, capsys, tmp_path):
    def launch(options: object, words: list[str], logs: RankLogs) -> LaunchResult:
        found = logs.reify({0: {"RANK": "0"}})
        note = Path(found.error_files[0])
        note.write_text('{"message": "error: no", "timestamp": 0}')
        return LaunchResult(
            failures=[RankFailure(rank=0, exitcode=code, timestamp=0.0, log=Path(found.stderrs[0]), note_file=note)]
        )

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(agent, "launch", launch)
    assert main(["train", "debug", "--job.dump_folder", str(tmp_path)]) == code
    assert "error: " in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == left


HOLDS = """
import sys
from titanmoe.config.schema import Config
from titanmoe.train.run_folder import claim_folder
config = Config()
config.job.dump_folder, config.job.name, config.checkpoint.enable = sys.argv[1], "debug", True
lock = claim_folder(config.job, config.checkpoint)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_start_next_to_a_live_run_is_refused_before_any_rank(tmp_path: Path):
    words = ["debug", "--job.dump_folder", str(tmp_path), "--checkpoint.enable"]
    live = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert live.stdout.readline() == "locked\n"
        (problem,) = refused(*words).problems
        assert f"a run is alive in {tmp_path}/debug (process {live.pid} on {socket.gethostname()}, since 2" in problem
        assert "start this one as a separate run with another --job.name" in problem
        assert prepare(parse_words([*words, "--job.name", "other"])).nproc == 4
    finally:
        live.communicate("")
    assert prepare(parse_words(words)).nproc == 4
