"""A prompt that two completions share is computed once, and nothing is another number than with two copies of it: loss
and every gradient, under every kind of context parallelism, with windows, sinks and latent attention.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import parity, world
from tests.support.case_features import CP_KINDS, MODELS
from tests.support.masks import dense_mask
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.schema import Config
from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, Batch
from titanmoe.mask import branches
from titanmoe.models.count import TrainingWork
from titanmoe.observe import Observer, listening
from titanmoe.parallel.batch_slice import mask_of
from titanmoe.parallel.context import Placement
from titanmoe.tokens import IGNORE
from titanmoe.train.gradients import Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy

LENGTH = 32
BASE = {"training.seq_len": LENGTH, "training.global_batch_size": 4}


def sizes(number: int) -> tuple[int, list[int]]:
    """Lengths of a sample's prompt and of its completions."""
    return 5 + number, [3 + number % 3, 6 - number]


def pair(config: Config, number: int) -> tuple[list[int], list[list[int]]]:
    prompt, completions = sizes(number)
    tokens = iter(parity.sample(config, number, clean=True).tokens_BS.tolist())
    return [next(tokens) for _ in range(prompt)], [[next(tokens) for _ in range(n)] for n in completions]


def shared(config: Config, number: int) -> Batch:
    """Then a document of three tokens, then padding."""
    (prompt, completions), length = pair(config, number), config.training.seq_len
    shared = len(prompt) - 1
    tree = [
        [*prompt[:-1], *(token for completion in completions for token in (prompt[-1], *completion[:-1]))],
        [*[IGNORE] * shared, *(token for completion in completions for token in completion)],
        *branches(np.array([[shared, *map(len, completions)]])),
    ]
    count = len(tree[0])
    tokens, labels = np.zeros(length, np.int64), np.full(length, IGNORE)
    until, depth = np.arange(1, length + 1), np.zeros(length, np.int64)
    tokens[:count], labels[:count], until[:count], depth[:count] = tree
    tokens[count : count + 3], labels[count : count + 2] = [7, 8, 9], [8, 9]
    until[count : count + 3], depth[count : count + 3] = count + 3, range(3)
    completion = np.repeat([0, 0, 1, 2], [shared, *map(len, completions), length - count])
    fields = tokens, labels, np.arange(length) < count + 3, None, depth, until
    return Batch(
        *(x if x is None else torch.from_numpy(x).unsqueeze(0) for x in fields), extra_fields=numbered(completion)
    )


def numbered(completion: np.ndarray) -> dict[str, torch.Tensor]:
    """DPO's pairs; the document after them counts as a completion without a partner."""
    places = torch.from_numpy(completion).unsqueeze(0)
    return {COMPLETION: places, PAIRS: torch.tensor([1]), REFERENCE: -places.double()}


def unshared(config: Config, number: int) -> Batch:
    """Each completion in a document of its own, after a copy of the prompt."""
    prompt, completions = pair(config, number)
    texts = [(prompt + completion[:-1], [IGNORE] * (len(prompt) - 1) + completion) for completion in completions]
    texts.append(([7, 8, 9], [8, 9, IGNORE]))
    length = config.training.seq_len
    tokens, labels = np.zeros(length, np.int64), np.full(length, IGNORE)
    document, depth, first = np.full(length, -1), np.zeros(length, np.int64), 0
    for n, (ids, its) in enumerate(texts):
        at = slice(first, first + len(ids))
        tokens[at], labels[at], document[at], depth[at] = ids, its, n, range(len(ids))
        first = at.stop
    fields = tokens, labels, np.arange(length) < first, document, depth
    completion = np.where(document < 0, 2, document)
    return Batch(*(torch.from_numpy(x).unsqueeze(0) for x in fields), extra_fields=numbered(completion))


class Pairs(parity.Samples):
    def __init__(self, config: Config, rank: int, ranks: int, make: Any):
        super().__init__(config, rank, ranks, documents=False)
        self.make = make

    def peek(self) -> list[Batch]:
        return [self.make(self.config, m * self.ranks + self.rank) for m in range(self.microbatches)]


def step(changes: dict[str, Any], make: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """On a rank: loss and gradients."""
    trainer = parity.make_trainer(changes, loader=functools.partial(Pairs, make=make))
    training, grads = trainer.training, {}

    class Capture(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            own = {name: p.grad for name, p in parameters.items()}
            grads.update(parity.whole(own, training.runtime.rank, training.fold))

    with listening(Capture()):
        loss = trainer.train_step()["loss"]
    return loss, grads


@functools.cache
def expected(model: str, mtp: bool) -> tuple[float, dict[str, torch.Tensor]]:
    return world.run(1, step, BASE | SHAPES[model], shared if mtp else unshared)[0]


SHAPES = {
    "mixtral": {},
    "gpt_oss": MODELS["gpt_oss"],
    "latent": MODELS["deepseek_v3"],
    "mtp": {"model.mtp_depth": 1},
    "dpo": {"training.objective": "dpo", "data.source": "files", "data.paths": ["pairs.jsonl"]}
    | {"data.format": "preference", "data.share_prefixes": True},
}


@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        *(("mixtral", {"parallelism.cp": 2} | CP_KINDS[kind]) for kind in CP_KINDS),
        *(("gpt_oss", {"parallelism.cp": 2} | CP_KINDS[f"{kind}-zigzag"]) for kind in ("ring", "ulysses", "allgather")),
        ("gpt_oss", {"parallelism.tp": 2}),
        ("latent", {"parallelism.cp": 2}),
        ("latent", {"parallelism.tp": 2, "activation_checkpoint.mode": "selective"}),
        ("mtp", {"parallelism.cp": 2}),
        ("dpo", {"parallelism.cp": 2}),
    ],
)
def test_a_shared_prompt_changes_no_number(model: str, mapping: dict[str, Any]) -> None:
    want = expected(model, model == "mtp")
    loss, grads = world.run(2, step, BASE | SHAPES[model] | mapping, shared)[0]
    assert loss == pytest.approx(want[0], rel=1e-10)
    assert grads.keys() == want[1].keys()
    assert parity.worst_error(grads, want[1])[0] < 1e-10


def test_branches_go_on_from_their_stem() -> None:
    until, depth = branches(np.array([[2, 2, 3], [0, 1, 1]]))
    assert until.tolist() == [7, 7, 4, 4, 7, 7, 7, 8, 9]
    assert depth.tolist() == [0, 1, 2, 3, 2, 3, 4, 0, 0]


@pytest.mark.parametrize("make", [shared, unshared])
def test_flops_are_those_of_the_pairs_that_see_each_other(make: Any) -> None:
    config = parity.read(BASE, 1)
    batch, meshes = make(config, 1), SimpleNamespace(data=NO_GROUP)
    work, cpu = TrainingWork(10.0, {0: 1.0, 3: 100.0}), torch.device("cpu")
    slicer = Slicer(
        meshes=meshes,
        placement=Placement(1, zigzag=False),
        device=cpu,
        with_mtp=False,
        objective=CrossEntropy(meshes),
        work=work,
    )
    totals = slicer.count([batch, batch])
    once = dense_mask(mask_of(batch), LENGTH).sum() + 100 * dense_mask(mask_of(batch)._replace(window=3), LENGTH).sum()
    assert totals.flops == 2 * (10 * batch.valid_BS.sum() + once)
