"""Samples for a rehearsal: the right shapes, without reading any file."""

from __future__ import annotations

import torch

from titanmoe.config.schema import Config
from titanmoe.data.batch import ANSWER, KEPT, KEPT_LOG_P, PAIRS, REFERENCE, WEIGHT, Batch
from titanmoe.data.loader import Share
from titanmoe.train.objectives.objective_rules import OBJECTIVES

DOCUMENTS = 4
"""Documents per sample, if the recipe packs several into one."""


class Samples:
    """Takes the place of a run's loader. Every position has a token and a label."""

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        self.share = Share(config, data_rank, data_ranks)
        self.objective = OBJECTIVES.look_up(config.training.objective)
        self.kept, _ = self.objective.kept(config)
        self.global_batch_size, self.microbatches = self.share.global_batch_size, self.share.microbatches

    def next_step(self) -> list[Batch]:
        share = self.share
        shape = share.size, share.seq_len
        ids = torch.zeros(shape, dtype=torch.int64)
        document = position = None
        if share.separate_documents:
            length = -(-share.seq_len // DOCUMENTS)
            place = torch.arange(share.seq_len).expand(shape)
            document, position = place // length, place % length
        further = {WEIGHT: torch.ones(shape)} if share.with_weights else {}
        if self.kept:
            further |= {KEPT: torch.zeros((*shape, self.kept), dtype=torch.int64)}
            further |= {KEPT_LOG_P: torch.zeros((*shape, self.kept + 1))}
        if self.objective.reference:
            further[REFERENCE] = torch.zeros(shape)
        if self.objective.answers > 1:
            further |= {ANSWER: document, PAIRS: torch.full(shape[:1], DOCUMENTS // 2)}
        batch = Batch(ids, ids, torch.ones(shape, dtype=torch.bool), document, position, further=further)
        return [batch] * self.microbatches

    def peek(self) -> list[Batch]:
        return self.next_step()
