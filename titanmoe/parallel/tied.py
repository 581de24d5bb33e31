"""The embedding, when a pipeline's last stage needs it too: as head where tied, and for multi-token prediction.

Each place has its own copy, equal from initialisation on: their gradients are added before they are used, so all copies
take the same steps. In the norm each counts its share. The last stage has two where it needs both: torch's schedules
that split backward cannot follow one parameter to two depths of a stage.
"""

from __future__ import annotations

import torch.distributed as dist

from titanmoe.config.schema import Config
from titanmoe.fold.groups import groups
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.schedules import stage_ranks
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.norm import local_grad


class TiedEnds:
    def __init__(self, parts: list[Transformer], config: Config, meshes: Meshes):
        """Collective over the world when the ends lie on different ranks."""
        model = config.model
        self.names: tuple[str, ...] = ()
        self.ends, self.group = [], None
        copies = ("head.weight",) * model.tie_embeddings + ("embed_copy.weight",) * model.mtp_depth
        if meshes.pp.size > 1 and copies:
            self.names = ("embed.weight", *copies)
        if not self.names:
            return
        self.ends = [p for part in parts for name, p in part.named_parameters() if name in self.names]
        ranks = stage_ranks(config, meshes.pp.size)
        if ranks[0] != ranks[-1]:
            pairs = [(group[ranks[0]], group[ranks[-1]]) for group in groups(meshes.fold, "attention", "pp")]
            self.group = meshes.lanes.group("waited", pairs)

    def add_gradients(self) -> None:
        grads = [local_grad(end) for end in self.ends]
        for other in grads[1:]:
            grads[0] += other
        if grads and self.group is not None:
            dist.all_reduce(grads[0], group=self.group)
        for other in grads[1:]:
            other.copy_(grads[0])
