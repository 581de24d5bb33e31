"""Process groups: only those that something is sent in, and none shared by two senders that may be active together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tests import parity, world
from tests.support.covering_mappings import all_folds, case_id
from tests.support.fake_gpu import GPU
from titanmoe.config.schema import Checkpoint, Experts, Parallelism
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.meshes import Meshes, build_meshes
from titanmoe.fold.rank_groups import group_of

FIVE = Parallelism(pp=2, cp=2, tp=2, experts=Experts(ep=2, etp=2))
LARGE = Parallelism(pp=4, dp_replicate=2, cp=4, tp=4, experts=Experts(ep=8, etp=2))


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[None]:
    """This process as a rank whose messages go nowhere."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def living() -> list[dist.ProcessGroup]:
    """Groups that cost anything."""
    return [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]


def groups_by_kind(meshes: Meshes) -> dict[str, set[str]]:
    """The names of the groups of each kind."""
    names: dict[str, set[str]] = {}
    for (kind, _), group in meshes.communicators.groups.items():
        names.setdefault(kind, set()).add(group.group_name)
    return names


def sharding(meshes: Meshes) -> set[str]:
    """Names of the groups that FSDP sends in."""
    both = (meshes.dense_data, meshes.expert_data)
    return {mesh.get_group(i).group_name for mesh in both for i in range(mesh.ndim) if mesh.size(i) > 1}


@pytest.mark.parametrize(
    ("world_size", "parallelism", "node", "want"),
    [
        (1, Parallelism(), -1, {"blocking": 1}),
        (8, Parallelism(), -1, {"blocking": 1, "shards": 1}),  # attention and experts are sharded over the same ranks
        (8, Parallelism(experts=Experts(ep=8)), -1, {"blocking": 1, "dispatch": 1, "shards": 1}),
        (8, Parallelism(cp=2, tp=4, experts=Experts(ep=8)), -1, {"blocking": 3, "dispatch": 1, "shards": 1}),
        (8, FIVE, -1, {"blocking": 4, "dispatch": 1, "shards": 1, "stages": 1}),
        (16, FIVE, -1, {"blocking": 5, "dispatch": 1, "shards": 2, "stages": 1}),
        (1024, LARGE, -1, {"blocking": 5, "dispatch": 1, "shards": 2, "replicas": 1, "stages": 1}),
        # Nothing is sent to the whole of a dispatch group that is split at nodes.
        (1024, LARGE, 4, {"blocking": 5, "dispatch": 2, "shards": 2, "replicas": 1, "stages": 1}),
    ],
)
def test_as_many_groups_as_somebody_sends_in(world_size: int, parallelism: Parallelism, node: int, want: Any) -> None:
    for rank in {0, world_size // 2 + 1, world_size - 1} & set(range(world_size)):
        with rank_of(world_size, rank):
            meshes = build_meshes(derive(world_size, parallelism), "cpu", node)
            assert Counter(kind for kind, _ in meshes.communicators.groups) == want
            assert len(living()) == (sum(want.values()) if world_size > 1 else 0)


def ranks_of(name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))


@pytest.mark.parametrize("fold", all_folds(8)[::9], ids=case_id)
def test_who_may_send_at_the_same_time_shares_no_group(fold: Fold) -> None:
    rank = 5
    with rank_of(8, rank):
        meshes = build_meshes(fold, "cpu")
        communicators = groups_by_kind(meshes)
        names = [name for kind in communicators.values() for name in kind]
        assert len(names) == len(set(names)) == max(len(living()), 1)
        assert sharding(meshes) <= communicators.get("shards", set()) | communicators.get("replicas", set())
        for group, kind, view, axes in (
            (meshes.pp, "stages", "attention", ("pp",)),
            (meshes.cp, "blocking", "attention", ("cp",)),
            (meshes.tp, "blocking", "attention", ("tp",)),
            (meshes.data, "blocking", "attention", ("dp",)),
            (meshes.sequence, "blocking", "attention", ("cp", "tp")),
            (meshes.expert_group, "dispatch", "experts", ("ep", "etp")),
        ):
            ranks = group_of(fold, view, axes, rank)
            assert (group.size, group.rank) == (len(ranks), ranks.index(rank))
            if group.size > 1:
                assert group.name in communicators[kind] and ranks_of(group.name) == ranks
        assert ranks_of(meshes.world.name) == tuple(range(8))
        for mesh, view, axes in (
            (meshes.dense_data, "attention", ("dp_replicate", "dp_shard", "cp")),
            (meshes.expert_data, "experts", ("edp_replicate", "edp")),
        ):
            assert tuple(mesh.mesh.flatten().tolist()) == group_of(fold, view, axes, rank)
        parts = zip(meshes.dense["tp"].mesh.tolist(), group_of(fold, "attention", "tp", rank), strict=True)
        assert all(a == b for a, b in parts)
        assert tuple(meshes.experts["ep", "etp"].mesh.flatten().tolist()) == group_of(fold, "experts", ("ep", "etp"), 5)


@pytest.mark.parametrize("rank", [0, 5])
def test_over_nccl_every_group_is_split_off_the_world_in_the_same_order(rank: int) -> None:
    """Each split is one call of all ranks, with all parts of it: nobody makes a group that others know nothing of."""
    calls: list[tuple[str, list[list[int]], Any]] = []

    def split_group(split_ranks: list[list[int]], timeout: Any, group_desc: str, **_: Any) -> dist.ProcessGroup:
        calls.append((group_desc, split_ranks, timeout))
        (own,) = (part for part in split_ranks if rank in part)
        return dist.new_group(own, timeout, "fake", use_local_synchronization=True, group_desc=group_desc)

    fold, patience = derive(8, FIVE), timedelta(seconds=77)
    with rank_of(8, rank), pytest.MonkeyPatch.context() as patch:
        plain = list(build_meshes(fold, "cpu").communicators.groups)
        patch.setattr(dist.ProcessGroup, "bound_device_id", property(lambda group: GPU, lambda group, device: None))
        patch.setattr(dist, "split_group", split_group)
        patch.setattr("titanmoe.fold.meshes._high_priority_options", lambda: None)  # a test of its own, below
        meshes = build_meshes(fold, "cpu", timeout=patience)
        assert list(meshes.communicators.groups) == plain
        assert [(kind, tuple(map(tuple, parts))) for kind, parts, _ in calls] == plain[1:]
        assert all(sorted(chain(*parts)) == list(range(8)) and wait == patience for _, parts, wait in calls)
        assert {g.group_desc for g in list(meshes.communicators.groups.values())[1:]} == {kind for kind, *_ in calls}


def test_an_axis_on_which_nobody_sends_says_so() -> None:
    with rank_of(8, 0):
        meshes = build_meshes(derive(8, FIVE), "cpu")
        for axis in ("ep", "etp"):
            with pytest.raises(RuntimeError, match="nobody sends along this axis"):
                meshes.experts[axis].get_group()
        whole = build_meshes(derive(8, Parallelism(tp=2)), "cpu", trains=False)
        assert set(groups_by_kind(whole)) == {"blocking"}


@pytest.mark.parametrize(
    ("node", "communicators"),
    [(-1, {"dispatch": 1, "shards": 2, "stages": 1}), (2, {"dispatch": 2, "shards": 2, "stages": 1})],
)
def test_groups_for_dispatch_and_shards_have_nccl_streams_of_high_priority_and_no_others(
    node: int, communicators: Any
) -> None:
    """ProcessGroupNCCL.Options is replaced by a stand-in, and a split by a group of torch's `fake` backend."""
    config, patience = SimpleNamespace(cga_cluster_size=4), timedelta(seconds=77)
    of_world = SimpleNamespace(is_high_priority_stream=False, _timeout=timedelta(seconds=600), config=config)
    of_world.simulate_uniform_ranks = False  # torch 2.15 asks the `fake` backend for it
    before, splits = dict(vars(of_world)), []

    def split_group(*, split_ranks: list, timeout: Any, pg_options: Any, group_desc: str) -> dist.ProcessGroup:
        splits.append((group_desc, pg_options, timeout))
        own = next(ranks for ranks in split_ranks if dist.get_rank() in ranks)
        return dist.new_group(own, backend="fake", use_local_synchronization=True)

    with (
        rank_of(16, 5),
        mock.patch.object(dist, "split_group", split_group),
        mock.patch.object(FakeProcessGroup, "options", of_world, create=True),
    ):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        build_meshes(derive(16, FIVE), "cpu", node, patience)
    high = [(kind, options) for kind, options, _ in splits if options is not None]
    assert Counter(kind for kind, _, _ in splits) == {"blocking": 4} | communicators
    assert Counter(kind for kind, _ in high) == {kind: communicators[kind] for kind in ("dispatch", "shards")}
    for _, options in high:
        assert options.is_high_priority_stream and options._timeout == of_world._timeout and options.config == config
    # Each is a copy of its own, because torch writes into it; and the time-out of the groups is the one asked for.
    assert len({id(options) for _, options in high} | {id(of_world)}) == len(high) + 1
    assert vars(of_world) == before and {timeout for _, _, timeout in splits} == {patience}


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def of_a_trainer(folder: str) -> tuple[int, int, int, bool]:
    """How many groups it made, threads per group, those of a group made by hand, and whether saving has its own."""
    before, threads_before = set(living()), threads()
    dist.new_group([0, 1])
    by_hand, threads_then = set(living()), threads()
    trainer = parity.make_trainer({"model.vocab_size": 320, "parallelism.tp": 2, "parallelism.experts.ep": 2})
    new_groups, more = set(living()) - by_hand, threads() - threads_then
    from titanmoe.checkpoint.saver import Saver

    saver = Saver(Path(folder), Checkpoint(save="sync"))
    own = (
        saver.group not in before | by_hand | new_groups
        and saver.group not in trainer.training.meshes.communicators.groups.values()
    )
    return len(new_groups), more, threads_then - threads_before, own


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where Linux lists them")
def test_a_trainer_makes_no_group_and_no_thread_but_those(tmp_path: Path) -> None:
    world.restart(2)  # ranks without groups from before
    for new_groups, more, each, own in world.run(2, of_a_trainer, str(tmp_path)):
        assert new_groups == 1  # rows: tp is the world, and nothing is sharded
        assert each > 0 and more == new_groups * each
        assert own
