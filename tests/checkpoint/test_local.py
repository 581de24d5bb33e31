"""Hosts that are lost with their memory, which in a test is a folder: "memory0" and so on."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs, victims
from tests.checkpoint.folders import flip_a_bit
from tests.checkpoint.test_resume import mapping
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.hosts import Hosts, meet
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.checkpoint.saver import Saver
from titanmoe.checkpoint.write_tensors import Piece
from titanmoe.config.schema import Checkpoint

TWO = (0, 1)
"""The host of each rank."""
LOCAL = {"checkpoint.local_folder": "$MEMORY", "checkpoint.interval": 0, "checkpoint.local": 2}
LOCAL |= {"model.num_layers": 1, "training.global_batch_size": 2}
END = 4


def on_hosts(folder: str, hosts: tuple[int, ...], changes: dict[str, Any], until: int) -> runs.Went:
    os.environ["MEMORY"] = f"{folder}/memory{hosts[dist.get_rank()]}"
    return runs.go(folder, LOCAL | changes, until, until)


def go(folder: Path, until: int, hosts: tuple[int, ...] = TWO, **changes: Any) -> runs.Went:
    changes = changes.pop("shape", mapping(ep=2)) | {f"checkpoint.{name}": value for name, value in changes.items()}
    return world.run(len(hosts), on_hosts, str(folder), hosts, changes, until, timeout=120)[0]


def lose(folder: Path, host: int) -> None:
    shutil.rmtree(folder / f"memory{host}")


def sets(folder: Path, host: int = 0) -> dict[int, Path]:
    found = sorted((folder / f"memory{host}").glob("titanmoe-*/step-*"))
    return {layout.step_of(path): path for path in found}


def begun(went: runs.Went) -> int:
    """The step of the local copies that the run resumed from."""
    origin, _, step = went.notes["begins from"].partition(", after step ")
    assert origin.startswith("local copies in ")
    return int(step)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> runs.Went:
    return go(tmp_path_factory.mktemp("straight"), END, local=0)


def same(went: runs.Went, straight: runs.Went) -> bool:
    assert went.loss and all(straight.loss[step] == loss for step, loss in went.loss.items())
    assert all(straight.norm[step] == norm for step, norm in went.norm.items())
    assert went.loader == straight.loader
    return all(torch.equal(went.state[name], tensor) for name, tensor in straight.state.items())


@pytest.mark.parametrize(
    ("hosts", "shape", "end"),
    [
        (TWO, mapping(ep=2), END),
        pytest.param((0, 0, 1, 1), mapping(tp=2, ep=4), 8, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_hosts_lost_one_after_the_other_cost_no_more_than_the_steps_between_copies(
    tmp_path, straight, hosts, shape, end
) -> None:
    """After each step of the run one of the two hosts is lost. Its replacement gets its copies at once; otherwise the
    next loss could not be repaired."""
    straight = straight if hosts == TWO else go(tmp_path / "straight", end, hosts, shape=shape, local=0)
    for killed in range(1, end + 1):
        went = go(tmp_path / "lost", killed, hosts, shape=shape)
        before = (killed - 1) // 2 * 2
        assert list(went.loss) == list(range(before + 1, killed + 1))
        assert killed == 1 or begun(went) == before
        assert all(list(sets(tmp_path / "lost", host)) == [killed // 2 * 2] for host in (0, 1)), "the newest alone"
        for step in went.loss:
            assert (went.loss[step], went.norm[step]) == (straight.loss[step], straight.norm[step])
        lose(tmp_path / "lost", killed % 2)
    assert same(went, straight)


# Where the run goes on after host 1 is lost: hosts of its ranks, and its mapping.
ELSEWHERE = {
    "four on three hosts": ((0, 2, 2, 3), mapping(tp=2, etp=2, ep=2)),
    "two on the one that is left": ((0, 0), mapping(etp=2)),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_another_mapping_on_other_hosts(tmp_path, straight, case) -> None:
    hosts, shape = ELSEWHERE[case]
    go(tmp_path, 3)
    lose(tmp_path, 1)
    went = go(tmp_path, END, hosts, shape=shape)
    assert begun(went) == 2
    worst, name = parity.error(went.state, straight.state)
    assert worst < 1e-9, name


def test_a_damaged_copy_is_read_from_the_other_host_and_a_set_that_is_not_whole_is_not_read(tmp_path, straight) -> None:
    go(tmp_path, 2)
    for host, name in ((0, "rank-00000-000.distcp"), (0, "manifest.json")):
        flip_a_bit(sets(tmp_path, host)[2] / name)
    (sets(tmp_path, 1)[2] / "rank-00001-000.distcp").unlink()
    went = go(tmp_path, 3)
    assert begun(went) == 2 and same(go(tmp_path, END), straight)

    for host in (0, 1):
        flip_a_bit(sets(tmp_path, host)[4] / "rank-00001-000.distcp")
    assert "begins from" not in go(tmp_path, 1).notes


def test_whichever_was_made_later(tmp_path, straight) -> None:
    folder, often = tmp_path / "run/checkpoints", {"interval": 3, "save": "sync"}
    go(tmp_path, 3, **often)
    kept = sets(tmp_path)[2]
    assert go(tmp_path, 4, **often).notes["begins from"] == f"{folder / 'step-00000003'}, after step 3"
    assert not kept.exists() and list(sets(tmp_path)) == [4]
    assert begun(go(tmp_path, 4, **often)) == 4, "local, and later than the ordinary one"

    shutil.rmtree(tmp_path)
    go(tmp_path, 3, **often)
    flip_a_bit(next((folder / "step-00000003").glob("*.distcp")))
    went = go(tmp_path, END, **often)
    assert begun(went) == 2 and same(went, straight), "the newer one is damaged"


def test_a_run_that_went_back_does_not_return_to_the_future_it_left(tmp_path) -> None:
    """Host 1 is away meanwhile. It has copies of steps that the run went back from."""
    go(tmp_path, 4, interval=1)
    shutil.copytree(tmp_path / "memory1", tmp_path / "away", copy_function=shutil.copy2)
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08}")
    lose(tmp_path, 1)
    lose(tmp_path, 0)
    go(tmp_path, 2, interval=3)
    lose(tmp_path, 1)
    shutil.move(tmp_path / "away", tmp_path / "memory1")
    assert begun(go(tmp_path, 2)) == 2


def test_a_start_without_local_copies_ends_those_there_are(tmp_path) -> None:
    go(tmp_path, 3)
    assert "begins from" not in go(tmp_path, 1, local=0).notes
    assert "begins from" not in go(tmp_path, 1).notes


def test_without_its_ledger_a_run_has_no_local_copies(tmp_path) -> None:
    go(tmp_path, 3)
    (tmp_path / "run/checkpoints/local.json").write_text("{")
    assert "begins from" not in go(tmp_path, 1).notes


def test_copies_of_another_run_are_removed_not_used(tmp_path, straight) -> None:
    go(tmp_path, 3)
    shutil.rmtree(tmp_path / "run")
    went = go(tmp_path, END)
    assert "begins from" not in went.notes and same(went, straight)
    assert list(sets(tmp_path)) == [4]


def test_a_run_without_another_host_still_outlives_its_processes(tmp_path, straight) -> None:
    go(tmp_path, 3, (0, 0))
    went = go(tmp_path, END, (0, 0))
    assert begun(went) == 2 and same(went, straight)


# ---- killed while the copies are made


def found_by_the_next_start(folder: str) -> tuple[int, bool]:
    """Returns the step of the local copies, and whether every rank reads what was written."""
    saver = Saver(Path(folder), Checkpoint(enable=True, local=1), lambda line: None)
    copies = victims.local_of(saver, Path(folder)).newest(verify=True)
    step = copies.manifest.step
    wanted = victims.contents(step)
    read = {name: torch.full_like(tensor, -1.0) for name, tensor in wanted.items()}
    copies.fill({name: (name, Piece(x, (0,) * x.dim(), tuple(x.shape))) for name, x in read.items()})
    return step, all(torch.equal(read[name], tensor) for name, tensor in wanted.items())


def local_saves(tmp: Path, victim: int = -1, at: int = 0) -> list[list[str]]:
    """Make copies of step 1, then of step 2, in which a rank is killed before its at-th file operation. Returns what
    each rank did if none was killed."""
    seen = tmp / "seen"
    seen.mkdir(parents=True)
    with victims.pair(victims.save_two, str(tmp), "local", victim, at, str(seen), log=tmp / "log") as ranks:
        ranks[victim].join(60)
        ranks[1 - abs(victim)].join(60 if victim < 0 else 0.1)
        assert ranks[victim].exitcode == (0 if victim < 0 else -9), (tmp / "log").read_text()
    return [(seen / str(rank)).read_text().splitlines() for rank in (0, 1)] if victim < 0 else []


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return local_saves(tmp_path_factory.mktemp("whole"))


def lost_with_its_memory(tmp: Path, victim: int, at: int) -> int:
    local_saves(tmp, victim, at)
    lose(tmp, victim)
    ends = world.run(2, found_by_the_next_start, str(tmp))
    assert ends[0] == ends[1] and ends[0][1], (victim, at)
    return ends[0][0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_is_lost_while_copies_are_made(tmp_path, operations, victim) -> None:
    done = operations[victim]
    assert {"os.mkdir", "open for writing", "write", "fsync", "os.rename", "os.remove", "os.rmdir"} <= set(done)
    last_open = len(done) - done[::-1].index("open for writing")  # of what it copies or describes
    for at in (last_open, done.index("os.rename") + 1):
        assert lost_with_its_memory(tmp_path / str(at), victim, at) in (1, 2)
    assert lost_with_its_memory(tmp_path / "removing", victim, len(done)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_is_lost_before_each_operation_on_its_files(tmp_path, operations, victim) -> None:
    steps = [lost_with_its_memory(tmp_path / str(at), victim, at) for at in range(1, len(operations[victim]) + 1)]
    assert steps == sorted(steps) and set(steps) == {1, 2}


# ---- the end, and room


def train(folder: str, hosts: tuple[int, ...], changes: dict[str, Any]) -> tuple[str, list[str], int]:
    """Returns the final state of a whole run, what it says about checkpoints, and how far it gets."""
    from titanmoe.checkpoint.inside import CheckpointError
    from titanmoe.train import checkpoints

    os.environ["MEMORY"] = f"{folder}/memory{hosts[dist.get_rank()]}"
    said: list[str] = []
    with mock.patch.object(checkpoints, "say", said.append):
        trainer = parity.make_trainer(runs.RUN | LOCAL | {"job.dump_folder": folder, "training.steps": END} | changes)
        try:
            trainer.train()
            error = ""
        except CheckpointError as failure:
            error = str(failure)
    return error, [line for line in said if line.startswith("checkpoint:")], trainer.step


def test_a_run_that_ends_leaves_no_copies(tmp_path) -> None:
    assert world.run(2, train, str(tmp_path), (0, 1), mapping(ep=2))[0] == ("", [], END)
    assert [list((tmp_path / f"memory{host}").iterdir()) for host in (0, 1)] == [[], []]
    assert not (tmp_path / "run/checkpoints/local.json").exists()
    assert list(layout.steps(tmp_path / "run/checkpoints")) == [END]


def train_without_room(folder: str) -> tuple[str, list[str], int]:
    from titanmoe.checkpoint import local

    with mock.patch.object(local, "_free", lambda path: 10**9 if "memory0" in str(path) else 100_000):
        return train(folder, (0, 1), mapping(ep=2))


def test_too_little_room_is_refused_with_its_numbers(tmp_path) -> None:
    ends = world.run(2, train_without_room, str(tmp_path))
    (error, _, step), _ = ends
    assert [end[0] for end in ends] == [error, error] and step < END
    assert "has 100,000 bytes free in $MEMORY and needs " in error and error.count("bytes free") == 1
    own, copies = (int(number.replace(",", "")) for number in re.findall(r"the ([\d,]+) (?:of its|it keeps)", error))
    assert f"needs {2 * (own + copies):,}: " in error and min(own, copies) > 25_000


def train_while_memory_fills(folder: str) -> tuple[str, list[str], int]:
    from titanmoe.checkpoint import write_tensors

    write = write_tensors._Summing.write

    def full(self: Any, data: bytes) -> int:
        if "memory1" in str(self.path) and "step-00000004" in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with mock.patch.object(write_tensors._Summing, "write", full):
        return train(folder, (0, 1), mapping(ep=2))


def test_memory_that_fills_later_costs_a_copy_and_not_the_run(tmp_path) -> None:
    error, said, step = world.run(2, train_while_memory_fills, str(tmp_path))[0]
    assert (error, step, len(said)) == ("", END, 1)
    assert said[0].startswith("checkpoint: no local copies of step 4: ") and "No space left on device" in said[0]


def train_beside_a_slow_disk(folder: str) -> list[int]:
    """Returns the steps with local copies while the ordinary checkpoint of step 1 is being written."""
    import threading

    from titanmoe.checkpoint import write_tensors
    from titanmoe.train.checkpoints import Checkpoints

    write, go_on, made = write_tensors._Summing.write, threading.Event(), []
    os.environ["MEMORY"] = f"{folder}/memory{dist.get_rank()}"

    def slow(self: Any, data: bytes) -> int:
        if "step-00000001.writing" in str(self.path) and dist.get_rank() == 1:
            go_on.wait(60)
        return write(self, data)

    changes = mapping(ep=2) | {"job.dump_folder": folder, "checkpoint.interval": 100}
    trainer = parity.make_trainer(runs.RUN | LOCAL | changes | {"checkpoint.local": 1})
    with mock.patch.object(write_tensors._Summing, "write", slow), Checkpoints(trainer, Path(folder) / "run") as saving:
        saving.begin()
        for step in range(1, 5):
            trainer.train_step()
            if step == 1:
                saving._save()
            elif saving.after_step():
                made.append(step)
            if step == 3:
                go_on.set()
                saving.wait()
        saving.wait()
    return made


def test_training_does_not_wait_for_a_slow_disk_to_make_copies(tmp_path) -> None:
    assert world.run(2, train_beside_a_slow_disk, str(tmp_path)) == [[4], [4]]


# ---- hosts


def test_who_keeps_a_copy_for_whom() -> None:
    def keepers(*of: int) -> list[int | None]:
        hosts = Hosts(Path(), 0, of, tuple(map(str, sorted(set(of)))))
        return [hosts.keeper(rank) for rank in range(len(of))]

    assert keepers(0, 0, 0) == [None] * 3
    assert keepers(0, 0, 1, 1, 2, 2) == [2, 3, 4, 5, 0, 1]
    assert keepers(0, 0, 0, 1) == [3, 3, 3, 0]


def on_one_disk(folder: str) -> str:
    """Two machines that see the same folder."""
    from titanmoe.checkpoint import hosts
    from titanmoe.config import ConfigError

    own = hosts._own
    with mock.patch.object(hosts, "_own", lambda path: ((dist.get_rank(), own(path)[0]), "host")):
        try:
            on_hosts(folder, (0, 0), mapping(ep=2), 1)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_folder_that_hosts_share_is_refused(tmp_path) -> None:
    for error in world.run(2, on_one_disk, str(tmp_path)):
        assert "memory0/titanmoe-" in error and "is shared by several hosts" in error


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"local_folder: cannot write to .*: name another folder, or set"):
        meet(str(tmp_path / "file"), "run", None)


def test_a_folder_that_someone_else_has_prepared_is_refused(tmp_path) -> None:
    go(tmp_path, 1, (0,), shape=mapping())
    (own,) = (tmp_path / "memory0").iterdir()
    shutil.move(own, tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(world.RankError, match="is a link, or another user's"):
        go(tmp_path, 1, (0,), shape=mapping())
