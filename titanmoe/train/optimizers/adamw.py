"""AdamW on local shards: torch's own, or in float32 with `Rounding` of weights and moments in bfloat16.

Chosen by optimizer.name. It works on plain tensors, because the dispatch of DTensors costs the host time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.fold.meshes import Meshes
from titanmoe.models.tensors import stored_name
from titanmoe.ops import counter_rng
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.parallel.materialize import local_shard, row_blocks
from titanmoe.train.optimizers.offload import Offload
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.optimizers.optimizer_spec import GroupRates, group_rates, rate_factor


def to_float32(x: Tensor) -> Tensor:
    """Convert a bfloat16 tensor to float32; return any other tensor unchanged, not copied."""
    return x.float() if x.dtype == torch.bfloat16 else x


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, away from zero with a probability equal to the dropped fraction; keep inf and NaN.

    Args:
        x: float32 numbers.
        bits: a random integer for each, of which the lowest 16 bits are used.
    """
    mantissa = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (mantissa & -0x10000).view(torch.float32).where(x.isfinite(), x).to(torch.bfloat16)


class Rounding:
    """Rounding of numbers that are updated in float32 and stored in bfloat16.

    Rounding to nearest loses a change of a weight by less than 1 / 512 of it: with weight decay 0.1 and rate 1e-3
    nothing decays. With stochastic rounding the mean of many changes is right. Random bits are a function of the seed,
    the update, the tensor and the element's index in the full tensor, so every mapping and a resumed run round alike.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int | None = None, tied: bool = False):
        """Record where this rank's shards are in the full tensors.

        Args:
            seed: seed of the random bits; None to round to nearest.
            tied: whether the head shares the embedding's weight.
        """
        self.seed, self.update = seed, 0
        self.names = {name: stored_name(name, tied) for name in parameters}
        self.places = {name: (local_shard(p.detach())[1], p.shape) for name, p in parameters.items()}

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], config: Config) -> Rounding:
        """Make the recipe's rounding: stochastic with optimizer.stochastic_rounding, else to nearest."""
        seed = config.training.seed if config.optimizer.stochastic_rounding else None
        return cls(parameters, seed, config.model.tie_embeddings)

    def store(self, target: Tensor, value: Tensor, name: str, what: str) -> None:
        """Round `value` into the stored tensor `target`, in place; do nothing if they are the same tensor.

        Random bits depend on `update`, which the optimizer counts up in each step.

        Args:
            target: the stored tensor, in bfloat16.
            value: its new value in float32.
            name: name of the parameter.
            what: which tensor of the parameter this is: "weight", or the name of a moment.
        """
        if value is target:
            return
        if self.seed is None:
            target.copy_(value)
            return
        key, done = counter_rng.key("rounding", self.seed, self.update, self.names[name], what), 0
        for rows, index in row_blocks(target, *self.places[name]):
            random = counter_rng.bits(key, index) >> 48
            rows.copy_(round_stochastically(value[done : done + len(rows)].contiguous(), random))
            done += len(rows)


MOMENTS = "exp_avg", "exp_avg_sq"


def weight_decay(name: str, parameter: Tensor, group: GroupRates, options: Options) -> float:
    """Return the weight decay of a parameter: that of its group of [[optimizer.groups]], else optimizer.weight_decay.

    Vectors, biases, routers and the shared expert's gate have 0 if their group has none, unless optimizer.decay_all.
    """
    if group.weight_decay is not None:
        return group.weight_decay
    decays = parameter.dim() >= 2 and not name.endswith(("router.weight", "gate.weight", "bias"))
    return options.weight_decay if decays or options.decay_all else 0.0


def moment_dtype(options: Options) -> torch.dtype | None:
    """Return the dtype of the optimizer's moments; None if each has the dtype of its weight."""
    return torch.bfloat16 if options.moments_dtype == "bfloat16" else None


class AdamW(Optimizer):
    """AdamW with decoupled weight decay."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        options: Options,
        groups: Mapping[str, GroupRates] | None = None,
        lr: float | None = None,
        rounding: Rounding | None = None,
    ):
        """Group the parameters by learning rate and weight decay, and make torch's AdamW of these groups.

        Args:
            parameters: this rank's trained weights, by name.
            groups: rates of the parameters that are in [[optimizer.groups]], by name.
            lr: peak rate of the other parameters; None for optimizer.lr.
            rounding: how bfloat16 tensors are rounded, None to nearest. Read only with bfloat16 moments or
                stochastic_rounding, which update in float32; else torch's AdamW updates.
        """
        super().__init__(parameters, options)
        self.rounding, self.options = rounding or Rounding(parameters), options
        # torch's own update, which takes all parameters at once, cannot round.
        self.narrow = options.moments_dtype == "bfloat16" or options.stochastic_rounding
        alike: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, p in parameters.items():
            group = (groups or {}).get(name, GroupRates())
            decay = weight_decay(name, p, group, options)
            rate = rate_factor(lr if group.lr is None else group.lr, options)
            alike.setdefault((rate, decay), []).append(self.local_shards[name])
        groups_of_torch = [{"params": ps, "weight_decay": decay, "rate": rate} for (rate, decay), ps in alike.items()]
        # torch refuses an optimizer without parameters, which a stage that trains nothing would have.
        self.adamw = torch.optim.AdamW(
            groups_of_torch or [{"params": [torch.empty(0)], "rate": 1.0}],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=options.implementation == "fused",
            foreach=options.implementation == "foreach",
        )
        self.offload = (
            Offload(self.local_shards, dtype=moment_dtype(options)) if options.offload and self.local_shards else None
        )

    @classmethod
    def build(cls, parameters: dict[str, nn.Parameter], config: Config, meshes: Meshes | None = None) -> AdamW:
        return cls(parameters, config.optimizer, group_rates(parameters, config), None, Rounding.of(parameters, config))

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's shards of the moments "exp_avg" and "exp_avg_sq", by name of the parameter.

        They are not copies, and are zeros before the first step. With optimizer.offload they are in host memory, and
        this waits for copies to it.
        """
        states = self._states()
        if self.offload is not None:
            return {name: dict(zip(MOMENTS, both, strict=True)) for name, both in self.offload.moments().items()}
        return {name: {key: state[key] for key in MOMENTS} for name, state in states.items()}

    @property
    def device_tensors(self) -> list[Tensor]:
        states = [x for state in self.adamw.state.values() for x in state.values()]
        return states if self.offload is None else [*states, *self.offload.buffers]

    @property
    def host_tensors(self) -> list[Tensor]:
        return [] if self.offload is None else [bucket.host for bucket in self.offload.buckets]

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Return torch's optimizer state of each parameter, by its name; before the first step it is made, of zeros.

        It has "step", a scalar, and unless the moments are offloaded "exp_avg" and "exp_avg_sq".
        """
        out = {}
        for name, shard in self.local_shards.items():
            state = self.adamw.state[shard]
            if not state:
                fused = self.adamw.defaults["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device if fused else "cpu")
                for key in MOMENTS if self.offload is None else ():
                    dtype = moment_dtype(self.options)
                    state[key] = torch.zeros_like(shard, dtype=dtype, memory_format=torch.preserve_format)
            out[name] = state
        return out

    def resume(self, updates: int) -> None:
        self.rounding.update = updates
        for state in self._states().values():
            state["step"].fill_(updates)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor | None = None) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["rate"]
        self.rounding.update += 1
        states = self._states() if self.narrow or self.offload is not None else {}
        if self.offload is None:
            self._update(self.parameters)
            return
        for bucket in self.offload.visit_buckets():
            for name, both in bucket.items():
                states[name].update(zip(MOMENTS, both, strict=True))
            self._update(bucket)
            for name in bucket:
                for key in MOMENTS:
                    del states[name][key]

    def _update(self, names: Iterable[str]) -> None:
        """Make the AdamW update of the named parameters, and free their gradients.

        The gradients of all other shards are None, so torch's AdamW skips them.
        """
        if self.narrow:
            for name in names:
                self._update_narrow(name)
            return
        for name in names:
            self.local_shards[name].grad = local_grad(self.parameters[name])
        self.adamw.step()
        for name in names:
            self.local_shards[name].grad = self.parameters[name].grad = None

    def _update_narrow(self, name: str) -> None:
        """Update one parameter in float32, round it and its moments to their stored dtypes, and free its gradient."""
        shard, parameter, options = self.local_shards[name], self.parameters[name], self.options
        group = next(group for group in self.adamw.param_groups if any(p is shard for p in group["params"]))
        state, grad = self.adamw.state[shard], to_float32(local_grad(parameter))
        tensors = {"weight": shard.data} | {key: state[key] for key in MOMENTS}
        wide = {what: to_float32(x) for what, x in tensors.items()}
        adamw(
            [wide["weight"]],
            [grad],
            *([wide[key]] for key in MOMENTS),
            [],
            [state["step"]],
            fused=options.implementation == "fused",
            amsgrad=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=options.eps,
            maximize=False,
        )
        for what, x in tensors.items():
            self.rounding.store(x, wide[what], name, what)
        parameter.grad = None
