"""What an optimizer is. It knows this rank's part of every weight; the model and the mapping only if it asks.

A new optimizer is a subclass of `Optimizer` with its own `moments` and `step`, and its `spec`, and a line in
`titanmoe/train/optimizers/optimizer_spec.py`. `adamw.py` is the one with most in it.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.meshes import Meshes
from titanmoe.parallel.materialize import piece


class Optimizer:
    """One for all weights of a rank."""

    def __init__(self, parameters: dict[str, nn.Parameter], options: Options):
        """parameters: those of this rank that are trained, by name, if any; with a sharded one comes only its own part
        of the gradient."""
        self.parameters = parameters
        self.local_shards = {name: nn.Parameter(piece(p.detach())[0]) for name, p in parameters.items()}
        """This rank's part of every weight, in the weight's own memory: never DTensors, whose dispatch on a four-dim
        mesh costs seconds per step."""

    @classmethod
    def build(cls, parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes) -> Optimizer:
        """As a run makes it. For one that has to know the model or the mapping."""
        return cls(parameters, config.optimizer)

    @abstractmethod
    def step(self, lr: float, norm: Tensor) -> None:
        """Changes the local shards in place, by `titanmoe.parallel.norm.local_grad` of every parameter, and frees the
        gradients, whose memory it may use. They are summed over the ranks, and clipped. norm: of all gradients of the
        model, as they are now."""
        raise NotImplementedError

    @abstractmethod
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Its own tensors, not copied, by parameter and name, shaped like the local shards; before the first step too.
        Checkpoints store them for any mapping and fill them."""
        raise NotImplementedError

    @property
    def notes(self) -> dict[str, str]:
        """Rows of the run's header."""
        return {}

    def resume(self, updates: int) -> None:
        """Continue after this many; the moments have been loaded. Here they are all there is."""

    @property
    def on_device(self) -> list[Tensor]:
        """What the device holds for it now. Nothing is allocated to say so: a rank out of memory asks too."""
        return [x for tensors in self.moments().values() for x in tensors.values()]

    @property
    def on_host(self) -> list[Tensor]:
        """What is kept in the host's memory instead."""
        return []
