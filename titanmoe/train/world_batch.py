"""Batches given by content: checked and padded, cut into each data rank's microbatches, and results in their order.

`titanmoe.session.Session` gets a batch of any number of samples. Sample j of a call is row b of microbatch m of data
rank d, with j = (m * data_ranks + d) * local_batch_size + b, as in a run with a loader; what remains is padding. Such
a run has a `NoLoader`.

Shapes: N samples of a call, L ids of the longest (in experts_NSLK MoE layers), S positions of the recipe
(training.seq_len), s those that a rank owns, B samples of a microbatch, T tokens that a rank owns, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.comm.collectives import all_reduce
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config, Model
from titanmoe.data.batch import ROUTES, Batch
from titanmoe.data.loader import BatchLayout
from titanmoe.data.routes import Routes, digest_routes, find_route_problems, find_shape_problem
from titanmoe.fold.meshes import Meshes
from titanmoe.parallel.context import Placement
from titanmoe.tokens import IGNORE, NO_EXPERT, NOT_RECORDED

Samples = Tensor | Sequence[Sequence[int]]
"""Ids of samples: a tensor (N, L), or a sequence of N sequences of different lengths."""


class NoLoader:
    """Stand-in for the loader of a run that has none: it knows the number of microbatches of a step."""

    mix = SimpleNamespace(tokenizer=None, sources=())

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        layout = BatchLayout(config, data_rank, data_ranks)
        self.microbatches, self.global_batch_size = layout.microbatches, layout.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return {}, the entry "loader" of checkpoints: which data was seen is the caller's to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore a checkpoint's place in its data."""

    def digest_samples(self, batches: list[Batch]) -> dict[int, str]:
        """Return {}: samples have no numbers in such a run, and so no digests by number."""
        return {}


def make_batch(
    ids: Samples,
    labels: Samples | None = None,
    *,
    documents: Samples | None = None,
    columns: Mapping[str, Any] | None = None,
    seq_len: int,
    model: Model,
) -> Batch:
    """Check samples given as ids and return them as one batch on the CPU, padded to seq_len positions.

    Args:
        ids: the samples.
        labels: next token of each position, IGNORE (-100) where there is no loss; None: every next token of a document.
        documents: number of the document that each position belongs to, ascending; a document sees only itself, and
            its positions begin at 0. None: each sample is one document.
        columns: further fields that the objective reads, by name: numbers per position, or a number per sample.
            "routes" are the experts to choose: Routes, or for each sample a tensor (positions, MoE layers, K).
        seq_len: positions of a sample, as the recipe has them.
        model: the recipe's [model].

    Raises:
        ConfigError: with every problem.
    """
    lengths = [len(sample) for sample in ids]
    N, problems = len(lengths), list[str]()
    if too_long := [i for i, n in enumerate(lengths) if n > seq_len]:
        problems.append(
            f"sample {too_long[0]} has {lengths[too_long[0]]} ids, and training.seq_len is {seq_len}: shorten it, or "
            "raise seq_len"
        )

    def pad(name: str, rows: Any, value: float, dtype: torch.dtype | None = None) -> Tensor:
        counts = [len(row) for row in rows]
        if counts != lengths:
            which = next(
                (i for i, (a, b) in enumerate(zip(counts, lengths, strict=False)) if a != b), min(len(counts), N)
            )
            problems.append(
                f"{name} has {len(counts)} samples and ids {N}: give one of each"
                if len(counts) != N
                else f"{name} has {counts[which]} values for {lengths[which]} ids of sample {which}: give one for each"
            )
            return torch.zeros(0)
        rows = [torch.as_tensor(row, dtype=dtype) for row in rows]
        if too_long or not N:
            return torch.zeros(0, seq_len, dtype=dtype or torch.float32)
        return torch.stack(
            [F.pad(row, (0, 0) * (row.dim() - 1) + (0, seq_len - len(row)), value=value) for row in rows]
        )

    tokens_NS = pad("ids", ids, 0, torch.int64)
    place_S = torch.arange(seq_len)
    valid_NS = place_S < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)
    document_NS = position_NS = None
    if documents is not None:
        document_NS = pad("documents", documents, -1, torch.int64)
    extra_fields = {}
    for name, values in (columns or {}).items():
        if name == ROUTES:
            experts = values
            if isinstance(values, Routes):  # recorded with padding
                experts = [row[:n] for row, n in zip(values.experts_NSLK, lengths, strict=False)]
            extra_fields[name] = pad(name, experts, NOT_RECORDED, torch.int16)
            continue
        per_sample = len(values) == N and (values.dim() == 1 if isinstance(values, Tensor) else not _nested(values))
        extra_fields[name] = torch.as_tensor(values) if per_sample else pad(name, values, 0)
    labels_NS = None if labels is None else pad("labels", labels, IGNORE, torch.int64)
    if not problems and N:
        given_labels = tokens_NS[:0] if labels_NS is None else labels_NS[labels_NS != IGNORE]
        for name, values in (("id", tokens_NS), ("label", given_labels)):
            if len(outside := values[(values < 0) | (values >= model.vocab_size)]):
                problems.append(f"{name} {int(outside[0])} is none of the vocabulary's {model.vocab_size} ids")
    if ROUTES in extra_fields and not problems:
        given = columns[ROUTES]
        digest_N = given.digest_N if isinstance(given, Routes) else None
        problems += find_route_problems(extra_fields[ROUTES], tokens_NS, valid_NS, digest_N, model)
    if problems:
        raise ConfigError(problems, "the batch")
    if document_NS is not None:
        begins_NS = document_NS.diff(dim=1, prepend=document_NS[:, :1] - 1) != 0
        position_NS = place_S - (place_S * begins_NS).cummax(1).values
    if labels_NS is None:
        labels_NS = F.pad(tokens_NS[:, 1:], (0, 1)).where(F.pad(valid_NS[:, 1:], (0, 1)), IGNORE)
        if document_NS is not None:
            labels_NS = labels_NS.where(~F.pad(begins_NS[:, 1:], (0, 1), value=True), IGNORE)
    labels_NS = labels_NS.where(valid_NS, IGNORE)
    return Batch(tokens_NS, labels_NS, valid_NS, document_NS, position_NS, extra_fields=extra_fields)


def _nested(values: Any) -> bool:
    return bool(len(values)) and hasattr(values[0], "__len__")


@dataclass(frozen=True)
class DataRankBatch:
    """One data rank's microbatches of a batch that the user gave as ids, and which given sample is in which row."""

    microbatches: list[Batch]
    sample_of_row: Tensor
    """Index in the given batch of each sample of all microbatches, one microbatch after the other; -1 for padding."""
    first: int
    """Index of the first sample of the given batch whose results this rank gets."""
    end: int
    """One past the index of the last sample whose results this rank gets."""
    samples: int
    """Number of samples given on all data ranks together."""
    given: Batch
    """Samples that this rank gets results of."""

    def gather(
        self, values_of_microbatch: Sequence[Tensor], meshes: Meshes, placement: Placement, device: torch.device
    ) -> Tensor:
        """Gather numbers of each position from all ranks; return them (N, S) in the order of the given samples.

        Collective over the world.

        Args:
            values_of_microbatch: this rank's numbers of each microbatch (B, attention slice); [] on ranks without the
                last pipeline stage. The ranks of a tp group have the same ones.

        Returns:
            Float64 numbers of all samples, or if each data rank gave its own, of this data rank's samples.
        """
        S = self.microbatches[0].tokens_BS.shape[1]
        out_NS = torch.zeros(self.samples + 1, S, dtype=torch.float64, device=device)
        if values_of_microbatch and meshes.tp.rank == 0:
            place_S = placement.rank_slice(torch.arange(S).view(1, -1), meshes.cp.rank).flatten().to(device)
            rows = self.sample_of_row.to(device)  # padding goes to the last row
            out_NS[rows.unsqueeze(1), place_S] = torch.cat(list(values_of_microbatch)).double()
        return all_reduce(out_NS, meshes.world)[self.first : self.end]

    def gather_routes(self, routes_of_microbatch: Sequence[Tensor], meshes: Meshes, placement: Placement) -> Routes:
        """Gather the experts that routers chose, (N, S, MoE layers, K) on the CPU, and their digests, on every rank.

        They are in the order of the given samples; if each data rank gave its own, of its samples alone. Collective
        over the world.

        Args:
            routes_of_microbatch: what this rank's routers wrote for its owned tokens of each microbatch (T, MoE
                layers of the model, K), and NO_EXPERT where they wrote nothing. The result has NO_EXPERT for padding,
                too.
        """
        S = self.microbatches[0].tokens_BS.shape[1]
        written = torch.stack(list(routes_of_microbatch))
        layers, K = written.shape[2:]
        place_S = placement.rank_slice(torch.arange(S).view(1, -1), meshes.cp.rank).chunk(meshes.tp.size, 1)
        place_s = place_S[meshes.tp.rank].flatten().to(written.device)
        rows = self.sample_of_row.view(-1, 1).to(written.device)
        written = written.view(len(rows), -1, layers, K)
        out = torch.empty(self.end - self.first, S, layers, K, dtype=torch.int16)
        for layer in range(layers):  # in a message each: all layers together take layers x K x 4 bytes a token
            of_layer = torch.zeros(self.samples + 1, S, K, dtype=torch.int32, device=written.device)
            of_layer[rows, place_s] = written[:, :, layer].to(torch.int32) - NO_EXPERT
            of_layer = all_reduce(of_layer, meshes.world)[self.first : self.end]
            out[:, :, layer] = (of_layer + NO_EXPERT).to(device="cpu", dtype=torch.int16)
        out[~self.given.valid_BS] = NO_EXPERT
        return Routes(out, digest_routes(self.given.tokens_BS, out, self.given.valid_BS))


def data_rank_batch(
    batch: Batch | None, meshes: Meshes, *, model: Model, rows: int, multiple: int, offset: int, per_data_rank: bool
) -> DataRankBatch:
    """Split a batch into microbatches, and return those of this data rank, padded to full ones, at least one.

    Collective over the world.

    Args:
        batch: all samples, on every rank or on some, None on the others; with `per_data_rank` this data rank's own
            samples.
        rows: number of samples in a microbatch (training.local_batch_size).
        multiple: number that the number of microbatches must be a multiple of.
        offset: number of samples of the step in earlier calls, which is added to the samples' numbers.
        per_data_rank: whether each data rank gives samples of its own; their order is that of the data ranks.

    Raises:
        ConfigError: on all ranks, if one lacks a batch that it must give, or has routes of another model.
    """
    data = meshes.data
    given = _given_samples(batch, model)
    if per_data_rank:
        if None in given:
            raise ConfigError("with per_data_rank every rank gives the samples of its data rank, possibly none")
        ranks = dist.get_process_group_ranks(data.process_group) if data.size > 1 else [dist.get_rank()]
        counts = [given[rank] for rank in ranks]
        first = sum(counts[: data.rank])
        local, most = torch.arange(len(batch.tokens_BS)), max(counts)
        samples, end = sum(counts), first + len(batch.tokens_BS)
    else:
        batch = _from_any_rank(batch, given)
        samples, first, end = len(batch.tokens_BS), 0, len(batch.tokens_BS)
        of_round = torch.arange(samples) // rows
        local = (of_round % data.size == data.rank).nonzero().flatten()
        most = -(-samples // (rows * data.size)) * rows
    microbatches = max(-(-most // rows), 1)
    microbatches = -(-microbatches // multiple) * multiple
    padding = microbatches * rows - len(local)

    def pick(x: Tensor | None, value: float) -> Tensor | None:
        return None if x is None else torch.cat((x[local], x.new_full((padding, *x.shape[1:]), value)))

    number = local + first if per_data_rank else local
    padded = Batch(
        pick(batch.tokens_BS, 0),
        pick(batch.labels_BS, IGNORE),
        pick(batch.valid_BS, False),
        document_BS=pick(batch.document_BS, 0),
        position_BS=pick(batch.position_BS, 0),
        until_BS=pick(batch.until_BS, 0),
        number_B=torch.cat((number + offset, torch.zeros(padding, dtype=torch.int64))),
        extra_fields={name: pick(x, 0) for name, x in batch.extra_fields.items()},
    )
    sample_of_row = torch.cat((number, torch.full((padding,), -1)))
    return DataRankBatch(padded.chunk(microbatches), sample_of_row, first, end, samples, batch)


def _given_samples(batch: Batch | None, model: Model) -> list[int | None]:
    """Return how many samples each rank of the world gives, None for one without a batch. Collective over the world.

    Raises:
        ConfigError: on all ranks, if one gives routes that are none for its samples or the model.
    """
    problem = ""
    if batch is not None and ROUTES in batch.extra_fields:
        problem = find_shape_problem(batch.extra_fields[ROUTES], batch.tokens_BS, model)
    count = None if batch is None else len(batch.tokens_BS)
    reports = on_all_ranks(dist.group.WORLD, lambda: (count, problem))
    if problems := [*dict.fromkeys(problem for _, problem in reports if problem)]:
        raise ConfigError(problems, "the batch")
    return [count for count, _ in reports]


def _from_any_rank(batch: Batch | None, given: list[int | None]) -> Batch:
    """Return on all ranks a batch that some ranks have: the first of them broadcasts it. Collective over the world.

    If every rank has one, each returns its own, and nothing is sent or compared.

    Args:
        given: number of samples of each rank's batch; None where there is none.

    Raises:
        ConfigError: if no rank has one.
    """
    if None not in given:
        return batch
    has = [count is not None for count in given]
    if not any(has):
        raise ConfigError("no rank has a batch: give it on all ranks, or on one and None on the others")
    shared = [batch]
    dist.broadcast_object_list(shared, src=has.index(True))
    return shared[0]
