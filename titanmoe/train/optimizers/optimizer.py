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
        """Keep the weights to train, and views of this rank's shards of them.

        Args:
            parameters: this rank's trained weights, by name, possibly none. The gradient of a sharded weight covers
                only this rank's shard.
        """
        self.parameters = parameters
        self.local_shards = {name: nn.Parameter(local_shard(p.detach())[0]) for name, p in parameters.items()}
        """This rank's shard of every weight, in the weight's memory, as plain tensors: the dispatch of DTensors on a
        four-dim mesh costs seconds per step."""

    @classmethod
    def build(cls, parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes) -> Optimizer:
        """Make the optimizer of a run; a subclass that needs the model or the mapping overrides this."""
        return cls(parameters, config.optimizer)

    @abstractmethod
    def step(self, lr: float, norm: Tensor) -> None:
        """Update this rank's shards of all weights in place, and free the gradients, whose memory it may use.

        All ranks call it. `titanmoe.parallel.grad_norm.local_grad(parameter)` is the gradient of this rank's shard,
        summed over the ranks and clipped.

        Args:
            lr: learning rate of this step.
            norm: norm of the gradients of the full model, after clipping.
        """
        raise NotImplementedError

    @abstractmethod
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's optimizer state: tensors by name of the parameter, then by name of the moment.

        They are not copies, have the shape of this rank's shards, and exist before the first step. Checkpoints store
        them, and fill them in place on loading, under any mapping.
        """
        raise NotImplementedError

    @property
    def notes(self) -> dict[str, str]:
        """Lines that the optimizer adds to the header that a run prints at the start, by label; {} by default."""
        return {}

    def resume(self, updates: int) -> None:
        """Restore state other than the moments, such as counters, of a run that has made this number of updates.

        Called once a checkpoint has filled the moments. Here it does nothing.
        """

    @property
    def device_tensors(self) -> list[Tensor]:
        """Optimizer state and buffers now in device memory, to count their bytes; here all moments.

        A rank that is out of memory reads this, so a subclass must not allocate on the device here.
        """
        return [x for tensors in self.moments().values() for x in tensors.values()]

    @property
    def host_tensors(self) -> list[Tensor]:
        """Optimizer state in host memory, to count its bytes; [] here, and in subclasses that do not offload."""
        return []
