"""Muon: the update of a matrix is its momentum with all singular values made 1 by Newton-Schulz; AdamW does the rest.

Momentum is that of torch.optim.Muon. The norm that a matrix is divided by before the iterations has ns_eps times the
gradient norm of the full model added: a gradient of rounding errors alone, as an expert without tokens may have, then
gives a small update and not a full one, without a threshold.

A matrix is on one rank, or sharded over several (titanmoe.parallel.full_matrices). All mappings make the same update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.meshes import Meshes
from titanmoe.models.matrices import Matrix, matrices_of, matrix_parameters
from titanmoe.ops.newton_schulz import orthogonalize, orthogonalizing_factor, step_coefficients
from titanmoe.parallel.data_parallel import shard_experts_on_model_dim
from titanmoe.parallel.full_matrices import plan_rounds, sum_grams
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.parallel.matrix_shards import NOT_SHARDED, ShardedWeight, ShardGroup, sharded_weights
from titanmoe.train.optimizers.adamw import AdamW, Rounding, moment_dtype, to_float32, weight_decay
from titanmoe.train.optimizers.offload import Offload
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.optimizers.optimizer_spec import GroupRates, group_rates, rate_factor

MAX_ELEMENTS = 1 << 27
"""Largest number of elements of expert matrices that Newton-Schulz works on at once."""


def muon_weights(parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes | None) -> list[ShardedWeight]:
    """Return this rank's weights that Muon trains, each with its matrices and the ranks that hold its other shards.

    Collective over the world, because it makes process groups.

    Args:
        parameters: this rank's trained weights, by name.
        meshes: the device meshes of the run; None for a single rank.
    """
    attention = experts = NOT_SHARDED
    if meshes is not None and meshes.fold.world > 1:
        fold = meshes.fold
        attention = ShardGroup.of(meshes, "attention", communicates=True)
        sliced = shard_experts_on_model_dim(config.model.num_experts, fold.ep, fold.edp)
        experts = ShardGroup.of(meshes, "experts", communicates=fold.etp > 1 or sliced)
    matrices = {
        name: matrices_of(shape, rows, config.optimizer.by_head)
        for name, (shape, rows) in matrix_parameters(config.model, config.optimizer.router_matrix).items()
        if name in parameters
    }
    return sharded_weights(parameters, matrices, lambda name: experts if ".experts." in name else attention)


class Muon(Optimizer):
    """Muon for matrices, AdamW for the other weights."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        options: Options,
        weights: Sequence[ShardedWeight] = (),
        groups: Mapping[str, GroupRates] | None = None,
        rounding: Rounding | None = None,
    ):
        """Allocate the momentum, plan which ranks exchange which shards, and make AdamW for the other weights.

        Args:
            parameters: this rank's trained weights, by name.
            weights: the weights among them that Muon trains.
            groups: rates of the parameters that are in [[optimizer.groups]], by name.
            rounding: how bfloat16 tensors are rounded; None to round to nearest.
        """
        super().__init__(parameters, options)
        self.options, names = options, {weight.name for weight in weights}
        self.steps = step_coefficients(options.ns_coefficients, options.ns_steps)
        others = {name: p for name, p in parameters.items() if name not in names}
        self.groups, rate = groups or {}, options.adamw_lr
        self.rounding = rounding or Rounding(parameters)
        self.rest = AdamW(others, options, self.groups, rate if rate >= 0 else None, self.rounding)
        shards = {weight.name: self.local_shards[weight.name] for weight in weights}
        wide = weights and shards[weights[0].name].dtype == torch.float64
        self.dtype = torch.float64 if wide else getattr(torch, options.ns_dtype)
        self.rounds = plan_rounds(list(weights), self.dtype.itemsize) if weights else []
        self.momentum: dict[str, Tensor] = {}
        self.offload: Offload | None = None
        if options.offload and shards:
            together = [[weight.name for weight in one.weights] for one in self.rounds]
            self.offload = Offload(shards, None, 1, moment_dtype(options), together)
        else:
            dtype = moment_dtype(options)
            self.momentum = {name: torch.zeros_like(shard, dtype=dtype) for name, shard in shards.items()}

    @classmethod
    def build(cls, parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes | None = None) -> Muon:
        return cls(
            parameters,
            config.optimizer,
            muon_weights(parameters, config, meshes),
            group_rates(parameters, config),
            Rounding.of(parameters, config),
        )

    @property
    def notes(self) -> dict[str, str]:
        """Lines of the header: "muon", how this rank orthogonalizes matrices, and "adamw", what AdamW trains."""
        owned = sum(len(exchange.matrices) for one in self.rounds for exchange in one.exchanges)
        grams = [weight for one in self.rounds for weights in one.grams.values() for weight in weights]
        summed, width = sum(len(weight.sharding.matrices) for weight in grams), self.dtype.itemsize
        sent = sum(exchange.sent_elements for one in self.rounds for exchange in one.exchanges) * width
        local = sum(sum(1 for _ in weight.sharding.local_matrices()) for one in self.rounds for weight in one.local)
        names = dict.fromkeys(re.sub(r"^layers\.\d+", "layers.*", name) for name in self.rest.parameters)
        return {
            "muon": f"{local:,} full matrices here, {owned:,} in shards that are sent to owners ({sent / 2**20:,.1f} "
            f"MiB of this rank's a step), {summed:,} by the sum of their Gram matrices",
            "adamw": ", ".join(names) or "trains nothing here",
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        moments = {name: {"momentum": mean} for name, mean in self.momentum.items()}
        if self.offload is not None:
            moments = {name: {"momentum": mean} for name, (mean,) in self.offload.moments().items()}
        return moments | self.rest.moments()

    def resume(self, updates: int) -> None:
        self.rest.resume(updates)

    @property
    def device_tensors(self) -> list[Tensor]:
        buffers = [] if self.offload is None else self.offload.buffers
        return [*self.momentum.values(), *buffers, *self.rest.device_tensors]

    @property
    def host_tensors(self) -> list[Tensor]:
        buckets = [] if self.offload is None else [bucket.host for bucket in self.offload.buckets]
        return [*buckets, *self.rest.host_tensors]

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor | float = 0.0) -> None:
        eps_norm = self.options.ns_eps * norm

        def work(x: Tensor) -> Tensor:
            return orthogonalize(x, self.steps, eps_norm)

        self.rest.step(lr)  # which counts the update
        visits = iter(()) if self.offload is None else self.offload.visit_buckets()
        for one in self.rounds:
            momentum = next(visits, None) or {weight.name: (self.momentum[weight.name],) for weight in one.weights}
            # In the gradients' memory, where each direction becomes the update.
            shards = {name: self._direction(name, mean) for name, (mean,) in momentum.items()}
            for weight in one.local:
                self._orthogonalize_local(weight, shards[weight.name], eps_norm)
            for group, weights in one.grams.items():
                self._orthogonalize_by_gram(weights, shards, sum_grams(weights, shards, group), eps_norm)
            for exchange in one.exchanges:
                exchange.run(shards, work, self.scale, self.dtype)
            for name in momentum:
                self._apply(name, shards.pop(name), lr)
        next(visits, None)  # the last bucket's copy to the host

    def _apply(self, name: str, update: Tensor, lr: float) -> None:
        """Apply weight decay and an update to this rank's shard of a weight, in place.

        Args:
            update: this rank's shard of the orthogonalized and scaled update.
            lr: the step's rate of weights in no group; that of the weight's group takes its place.
        """
        shard, options, group = self.local_shards[name], self.options, self.groups.get(name, GroupRates())
        decay = weight_decay(name, shard, group, options)
        lr *= rate_factor(group.lr, options)
        weight = shard.data
        wide = to_float32(weight).mul_(1 - lr * decay).sub_(update, alpha=lr)
        self.rounding.store(weight, wide, name, "weight")

    def scale(self, matrix: Matrix) -> float:
        """Return the factor of a matrix's update, by the full matrix's shape.

        It is sqrt(max(1, rows / columns)) with optimizer.adjust_lr = "original", else 0.2 * sqrt(max(rows, columns)).
        """
        rows, columns = matrix.shape
        if self.options.adjust_lr == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def _direction(self, name: str, momentum: Tensor) -> Tensor:
        """Update the momentum with the gradient; return the direction of the weight's update, not orthogonalized.

        The direction uses the gradient's memory, unless that is bfloat16: it is float32 then. The parameter's gradient
        is None afterwards.

        Args:
            momentum: this rank's shard of the weight's momentum, which is updated in place.
        """
        parameter, mean, mu = self.parameters[name], to_float32(momentum), self.options.momentum
        grad, parameter.grad = to_float32(local_grad(parameter)), None
        mean.lerp_(grad, 1 - mu)
        direction = grad.lerp_(mean, mu) if self.options.nesterov else grad.copy_(mean)
        self.rounding.store(momentum, mean, name, "momentum")
        return direction

    def _orthogonalize_local(self, weight: ShardedWeight, shard: Tensor, eps_norm: Tensor | float) -> None:
        """Orthogonalize and scale in place the matrices of a weight that this rank has in full.

        Args:
            shard: this rank's shard of the update's direction.
            eps_norm: what is added to a matrix's norm before it is divided by that.
        """
        if weight.sharding.has_full_experts:
            for some in shard.split(max(1, MAX_ELEMENTS // max(1, shard[:1].numel()))):
                some.copy_(orthogonalize(some.to(self.dtype), self.steps, eps_norm))
            shard.mul_(self.scale(weight.sharding.matrices[0]))
            return
        for matrix, part in weight.sharding.local_matrices():
            out = orthogonalize(part.read(shard).to(self.dtype), self.steps, eps_norm)
            part.write(shard, out.to(shard.dtype) * self.scale(matrix))

    def _orthogonalize_by_gram(
        self, weights: list[ShardedWeight], shards: dict[str, Tensor], grams: list[Tensor], eps_norm: Tensor | float
    ) -> None:
        """Orthogonalize and scale in place this rank's part of matrices that are sharded along their larger dim alone.

        Args:
            shards: this rank's shards of the update's directions, by name of the weight.
            grams: Gram matrix of each full matrix, summed over the ranks, in the order of weights and their matrices.
            eps_norm: what is added to a matrix's norm before it is divided by that.
        """
        every = ((weight, i) for weight in weights for i in range(len(weight.sharding.matrices)))
        for (weight, i), gram in zip(every, grams, strict=True):
            sharding, shard = weight.sharding, shards[weight.name]
            part, matrix = sharding.shards[i][sharding.shard_group.group.rank], sharding.matrices[i]
            if not part.rows:
                continue
            left, x = orthogonalizing_factor(gram, self.steps, eps_norm), part.read(shard).to(gram.dtype)
            out = left @ x if matrix.shape[0] == gram.shape[0] else x @ left.mT
            part.write(shard, out.to(shard.dtype) * self.scale(matrix))
