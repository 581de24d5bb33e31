import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from tests import world


def describe(x):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return dist.get_rank(), *(os.environ[name] for name in names), torch.get_num_threads(), x


def process_id():
    return os.getpid()


def summed(x):
    dist.all_reduce(x)
    return x


_kept = {}


def keep_group():
    _kept["pair"] = dist.new_group([0, 1])


def use_kept_group():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x, group=_kept["pair"])
    return x.item()


def groups(n):
    return [dist.new_group([0, 1]).group_name for _ in range(n)]


def rank_one_fails():
    if dist.get_rank() == 1:
        raise ValueError("the number seven")
    dist.all_reduce(torch.zeros(1))


def all_fail():
    raise LookupError(f"rank {dist.get_rank()}")


def rank_one_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def rank_one_crashes_once(marker):
    if dist.get_rank() == 1 and not os.path.exists(marker):
        if marker:
            open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    return summed(torch.ones(1)).item()


def forget_to_take_part():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))


def leave_the_world():
    dist.destroy_process_group()


def unpicklable():
    return lambda: None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_by_rank(size):
    expected = [(rank, str(rank), str(rank), str(size), "1", 1, "x") for rank in range(size)]
    assert world.run(size, describe, "x") == expected


def test_tensors_travel_by_value():
    x = torch.arange(4.0, dtype=torch.float64)
    results = world.run(2, summed, x)
    assert [r.tolist() for r in results] == [[0.0, 2.0, 4.0, 6.0]] * 2
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not results[0].is_shared()


def test_processes_and_groups_persist():
    before = world.run(2, process_id)
    world.run(2, keep_group)
    assert world.run(2, use_kept_group) == [3.0, 3.0]
    assert world.run(2, process_id) == before


def test_restart_ends_the_processes():
    before = world.run(2, process_id)
    world.restart(2)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(before) & set(world.run(2, process_id))


def test_too_many_groups_renew_the_pool(monkeypatch):
    monkeypatch.setattr(world, "MAX_GROUPS", 5)
    world.restart(2)
    before = world.run(2, process_id)
    first = world.run(2, groups, 3)
    assert len(set(first[0])) == 3
    assert world.run(2, groups, 3) == first, "those of the call before"
    assert world.run(2, process_id) == before
    world.run(2, groups, 4)
    assert not set(before) & set(world.run(2, process_id))


def test_a_destroyed_world_renews_the_pool():
    world.run(2, leave_the_world)
    assert world.run(2, describe, 0)[1][0] == 1


def test_failure_is_shown_and_does_not_hang_the_others():
    world.run(2, process_id)
    with pytest.raises(world.RankError, match=r"rank 1 of 2 failed in tests.test_world.rank_one_fails") as caught:
        world.run(2, rank_one_fails)
    message = str(caught.value)
    assert "ValueError: the number seven" in message
    assert 'raise ValueError("the number seven")' in message
    assert f"ranks [0] of 2 had not returned {world.GRACE_S} s after that failure" in message
    assert "all_reduce" in caught.value.stuck[0]
    assert list(caught.value.failures) == [1]
    assert [r[0] for r in world.run(2, describe, 0)] == [0, 1]


def test_failure_of_all_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(world, "GRACE_S", 60)
    world.run(2, process_id)
    with pytest.raises(world.RankError, match=r"then rank . failed: LookupError: rank .") as caught:
        world.run(2, all_fail)
    assert not caught.value.stuck


@pytest.mark.parametrize(("size", "does", "text"), [(2, rank_one_dies, "exit code 7"), (1, unpicklable, "unpicklable")])
def test_a_rank_without_a_result_is_an_error(size, does, text):
    with pytest.raises(world.RankError, match=text):
        world.run(size, does)


def test_a_crash_in_compiled_code_gets_one_more_try_and_is_reported(tmp_path):
    with pytest.warns(UserWarning, match=r"a rank of 2 crashed in .*rank_one_crashes_once .*rank 1, SIGSEGV"):
        assert world.run(2, rank_one_crashes_once, str(tmp_path / "crashed")) == [2.0, 2.0]
    with pytest.raises(world.RankError), pytest.warns(UserWarning, match="crashed"):
        world.run(2, rank_one_crashes_once, "")  # and again


def test_hang_is_shown_with_its_stacks():
    world.run(2, process_id)
    with pytest.raises(world.RankError) as caught:
        world.run(2, forget_to_take_part, timeout=1)
    message = str(caught.value)
    assert "of 2 had not returned after 1 s in tests.test_world.forget_to_take_part" in message
    assert 0 in caught.value.stuck
    assert "in all_reduce" in message and "in forget_to_take_part" in message
    assert not caught.value.failures
    assert world.run(2, process_id)


def test_nothing_is_left_at_exit():
    """Not even when the session is killed while a rank hangs in a collective."""
    script = """
import os, signal, threading
from tests import test_world, world
world.PRELOAD = ("torch",)
print(*world.run(2, test_world.process_id), flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
world.run(2, test_world.forget_to_take_part)
"""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: the name of a socket in it must stay short
        # Returns when the last process that inherited the pipe is gone.
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=world.ROOT,
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            timeout=60,
        )
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2
