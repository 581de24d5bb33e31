"""AdamW on plain local tensors, not on DTensors, whose dispatch on a four-dim mesh costs seconds per step."""

from __future__ import annotations

import torch
from torch import nn

from titanmoe.config.schema import Optimizer as Options
from titanmoe.ops.region import named
from titanmoe.parallel.materialize import piece
from titanmoe.parallel.norm import local_grad


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Not norms, biases and gates (router, shared expert): they are not feature matrices."""
    return parameter.dim() >= 2 and not name.endswith(("router.weight", "gate.weight", "bias"))


class Optimizer:
    def __init__(self, parameters: dict[str, nn.Parameter], options: Options):
        self.parameters = parameters
        self.pieces = {name: nn.Parameter(piece(p.detach())[0]) for name, p in parameters.items()}
        decayed = [n for n, p in parameters.items() if options.decay_all or decays(n, p)]
        groups = [
            {"params": [self.pieces[n] for n in decayed], "weight_decay": options.weight_decay},
            {"params": [p for n, p in self.pieces.items() if n not in set(decayed)], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=options.implementation == "fused",
            foreach=options.implementation == "foreach",
        )

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """AdamW's running means by parameter, not copied; zeros before the first step."""
        states = self._states()
        return {name: {key: state[key] for key in ("exp_avg", "exp_avg_sq")} for name, state in states.items()}

    def _states(self) -> dict[str, dict[str, torch.Tensor]]:
        out = {}
        for name, part in self.pieces.items():
            state = self.adamw.state[part]
            if not state:
                fused = self.adamw.defaults["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(part, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(part, memory_format=torch.preserve_format)
            out[name] = state
        return out

    def resume(self, step: int) -> None:
        """Continue after this step; the moments have been loaded."""
        for state in self._states().values():
            state["step"].fill_(step)

    @torch.no_grad()
    @named("optimizer")
    def step(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            self.pieces[name].grad = local_grad(parameter)
        self.adamw.step()
        for name, parameter in self.parameters.items():
            self.pieces[name].grad = parameter.grad = None
