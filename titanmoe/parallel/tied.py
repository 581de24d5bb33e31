"""A matrix that is both embedding and head, when a pipeline holds its two ends apart.

Each end has its own copy, equal from initialisation on: their gradients are added before they are used, so both copies
take the same steps. In the norm each counts half.
"""

from __future__ import annotations

import torch.distributed as dist

from titanmoe.config.schema import Config
from titanmoe.fold.groups import groups
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.norm import local_grad
from titanmoe.parallel.pipeline import stage_ranks


class TiedEnds:
    def __init__(self, parts: list[Transformer], config: Config, meshes: Meshes):
        """Collective over the world when the ends lie on different ranks."""
        self.active = config.model.tie_embeddings and meshes.pp.size > 1
        self.ends, self.group = [], None
        if not self.active:
            return
        self.ends = [part.embed.weight for part in parts if part.embed is not None]
        self.ends += [part.head.weight for part in parts if part.head is not None]
        ranks = stage_ranks(config, meshes.pp.size)
        if ranks[0] != ranks[-1]:
            pairs = [[group[ranks[0]], group[ranks[-1]]] for group in groups(meshes.fold, "attention", "pp")]
            self.group, _ = dist.new_subgroups_by_enumeration(pairs)

    def add_gradients(self) -> None:
        if len(self.ends) == 2:
            first, last = (local_grad(end) for end in self.ends)
            first += last
            last.copy_(first)
        elif self.ends:
            dist.all_reduce(local_grad(self.ends[0]), group=self.group)
