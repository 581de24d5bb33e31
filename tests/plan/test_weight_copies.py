"""What FSDP copies, against the operations of a rehearsal, which runs torch's own FSDP."""

from __future__ import annotations

import pytest
import torch

from titanmoe.plan.sizes import Sizes, fsdp
from titanmoe.plan.weight_costs import WeightCopies
from titanmoe.rehearse.code_site import GATHER, REDUCE
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

SMALL = (
    "--model.family mixtral --model.size debug --model.vocab_size 256 --model.dim 512 --model.num_layers 2 "
    "--model.num_heads 8 --model.num_kv_heads 2 --model.head_dim 128 --model.expert_hidden 64 --training.seq_len 512 "
    "--training.local_batch_size 1 --data.source synthetic"
)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (8, "--parallelism.experts.ep 8 --training.global_batch_size 16"),  # experts that no other rank shares
        (16, "--parallelism.experts.ep 8 --training.global_batch_size 16"),  # cut along the model's width
        (4, "--parallelism.experts.ep 2 --training.global_batch_size 4 --training.dtype bfloat16"),
        (8, "--parallelism.pp 2 --parallelism.experts.ep 2 --training.global_batch_size 12"),  # summed before
        (8, "--parallelism.experts.ep 8 --training.global_batch_size 16 --moe.accumulate_weight_gradients"),
    ],
)
def test_copies_are_those_that_a_rehearsal_counts(world: int, changes: str) -> None:
    if "pp 2" in changes and int(torch.__version__.split(".")[1]) > 14:
        pytest.skip("from torch 2.15 on autograd adds up a pipeline's gradients, in no region of FSDP's")
    config = recipe_to_rehearse([*SMALL.split(), *changes.split()], world, "h100")
    rehearsal = rehearse(config, world, 0, "h100")
    fold, training = rehearsal.fold, config.training
    m, pipelined = training.global_batch_size // fold.dp, fold.pp > 1
    width = {"float32": 4, "bfloat16": 2}[training.dtype]
    accumulated = config.moe.accumulate_weight_gradients
    copies = WeightCopies(
        stored=width,
        computed=2,
        reduced=4,
        each_microbatch=not pipelined,
        pipelined=pipelined,
        microbatches=m,
        accumulated=accumulated,
    )
    sizes, data = Sizes(config.model, fold), fsdp(fold)
    units = [(sizes.embedding, data, 1)] + [(sizes.head, data, 1)] * (not pipelined)
    planned = 0
    for layer in range(config.model.num_layers // fold.pp):
        units.append((sizes.block(layer), data, 2))
        if fold.edp > 1:
            units.append((sizes.experts_of(layer), fold.edp, 2))
            continue
        experts = sizes.experts_of(layer)
        microbatch, step = copies.moved_unsharded(experts, fold.edp_replicate)
        first = (4 if pipelined else width) * experts.full_size * (not accumulated)  # as below
        planned += m * microbatch + step - first
    for unit, ranks, gathers in units:
        microbatch, step = copies.moved(unit, ranks, gathers)
        # A rehearsal takes all of what a piece is copied into for read and written.
        into_place = 4 * unit.sharded_size(ranks) * (ranks > 1) * (1 if pipelined else gathers * m)
        # The first of several gradients is only made wider, or takes the place of the sum.
        first = 4 * unit.trained.full_size if pipelined else 3 * width * unit.sharded_size(ranks) * (m > 1)
        planned += m * microbatch + step - into_place - first
    counted = sum(
        (operation.read + operation.written) * count
        for operation, count in rehearsal.operations.items()
        if operation.site.region in (GATHER, REDUCE) and operation.name != "all_gather_copy_in"
    )
    # Products that accumulate read and write sums in float32, where others write gradients in bfloat16.
    sums = [(one, count) for one, count in rehearsal.operations.items() if one.name == "add_gradient"]
    assert bool(sums) == accumulated
    counted += sum((2 - 1 / 2) * one.written * count for one, count in sums)
    assert counted == pytest.approx(planned, rel=0.01)
