"""Keep the copies of the embedding equal, where a pipeline's last stage needs it too.

The last stage needs it as a tied head, and for multi-token prediction. Each use has its own copy, all with the same
initial values: their gradients are summed before the optimizer step, so they stay equal. In the gradient norm each copy
counts 1 / copies. The last stage has two copies if it needs both, because torch's schedules that split backward cannot
handle one parameter at two depths of a stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from titanmoe.config.schema import Model
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.rank_groups import groups
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.grad_norm import local_grad


class TiedEmbeddings:
    """The copies of the embedding that this rank has, whose gradients are summed over all copies."""

    def __init__(self, stages: list[Transformer], model: Model, ranks: list[int], meshes: Meshes):
        """Find this rank's copies. `ranks` has the pipeline rank of each stage.

        There are none without a pipeline, or if all stages share the vocabulary. Collective over the world if there are
        copies and the first and last stage are on different ranks.
        """
        self.names: tuple[str, ...] = ()
        self.ends, self.group = [], None
        copies = ("head.weight",) * model.tie_embeddings + ("embed_copy.weight",) * model.mtp_depth
        if meshes.pp.size > 1 and copies and meshes.vocabulary_mesh is None:
            self.names = ("embed.weight", *copies)
        if not self.names:
            return
        self.ends = [p for stage in stages for name, p in stage.named_parameters() if name in self.names]
        if any(not end.requires_grad for end in self.ends):  # frozen, and then all copies are
            self.ends = []
        if ranks[0] != ranks[-1]:
            pairs = [(group[ranks[0]], group[ranks[-1]]) for group in groups(meshes.fold, "attention", "pp")]
            self.group = meshes.communicators.group("blocking", pairs)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Replace each copy's gradient by the sum over all copies, in place. Called once per step, after its backward.

        Collective over the two ranks of a pipeline group that have the first and the last stage; does nothing on
        others, without copies, or if these are frozen.
        """
        grads = [local_grad(end) for end in self.ends]
        for other in grads[1:]:
            grads[0] += other
        if grads and self.group is not None:
            dist.all_reduce(grads[0], group=self.group)
        for other in grads[1:]:
            other.copy_(grads[0])
