"""Base class of optimizers, which update this rank's shard of every trained weight.

A new optimizer is a subclass with `moments` and `step`, an `OptimizerSpec`, and a line in
`titanmoe/train/optimizers/optimizer_spec.py`. `adamw.py` is the most complete example.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.meshes import Meshes
from titanmoe.parallel.materialize import local_shard


class Optimizer:
    """Base class of optimizers; one object updates all trained weights of a rank."""

    def __init__(self, parameters: dict[str, nn.Parameter], options: Options):
        """Take the weights to train.

        Args:
            parameters: this rank's trained weights, by name, possibly none; of a sharded weight the gradient has this
                rank's shard alone.
            options: the recipe's [optimizer].
        """
        self.parameters = parameters
        self.local_shards = {name: nn.Parameter(local_shard(p.detach())[0]) for name, p in parameters.items()}
        """This rank's shard of every weight, in the weight's memory, as plain tensors: the dispatch of DTensors on a
        four-dim mesh costs seconds per step."""

    @classmethod
    def build(cls, parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes) -> Optimizer:
        """Make the optimizer of a run; a subclass that needs the model or the mapping reads them here."""
        return cls(parameters, config.optimizer)

    @abstractmethod
    def step(self, lr: float, norm: Tensor) -> None:
        """Update the local shards in place and free the gradients, whose memory it may use.

        Args:
            lr: learning rate of this step.
            norm: norm of the gradients of the full model, after clipping.

        The gradient of a parameter's local shard, summed over the ranks and clipped, is
        `titanmoe.parallel.grad_norm.local_grad(parameter)`.
        """
        raise NotImplementedError

    @abstractmethod
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state tensors by parameter and name, not copied, shaped like the local shards.

        They exist before the first step. Checkpoints store them for any mapping, and fill them on loading.
        """
        raise NotImplementedError

    @property
    def notes(self) -> dict[str, str]:
        """Rows of the run's header."""
        return {}

    def resume(self, updates: int) -> None:
        """Restore state other than the moments, after `updates` updates; called once the moments are loaded."""

    @property
    def device_tensors(self) -> list[Tensor]:
        """Tensors on the device now. Must not allocate: a rank that is out of memory reads it."""
        return [x for tensors in self.moments().values() for x in tensors.values()]

    @property
    def host_tensors(self) -> list[Tensor]:
        """Tensors in host memory, if the moments are offloaded."""
        return []
