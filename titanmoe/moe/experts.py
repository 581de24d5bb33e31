"""The experts of one rank: a SwiGLU of each routed token by its expert's weights, with biases in some families.

Called by the MoE layer. `hidden` is gate and up, (R, F) each, or one tensor with both side by side, (R, 2F); `count_e`
is the number of each local expert's tokens, and a `multiplier` the object that multiplies, from `choose_products`.

Shapes: R routed tokens sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe import observe
from titanmoe.comm.collectives import to_local
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.expert_products import AddGradient, ExpertProducts, ProductMethod
from titanmoe.moe.fp8 import EightBitProducts, QuantisedWeights
from titanmoe.moe.grouped_mm import Groups, can_group
from titanmoe.moe.traced_products import TracedProducts
from titanmoe.observe import named


class Experts(nn.Module):
    """The experts of one MoE layer on this rank: w1 gate, w3 up, w2 down, stacked along dim 0.

    `w1_bias`, `w3_bias` and `w2_bias` are the linear biases of these projections. They are unrelated to a router's
    `expert_bias`.
    """

    def __init__(self, model: Model, options: MoEOptions, dtype: torch.dtype):
        super().__init__()
        shape = (model.num_experts, model.expert_hidden, model.dim)
        self.w1 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1], dtype=dtype))
        self.register_parameter("w1_and_w3", None)
        """(e, 2F, D): a copy in which both lie side by side, while a step computes with one
        (titanmoe.parallel.unsharded)."""
        self.accumulates = options.accumulate_weight_gradients
        """Whether gradients of weights are added to sums over microbatches (`[moe] accumulate_weight_gradients`)."""
        self.sums: dict[str, AddGradient] = {}
        """The functions that add a weight's gradient to a sum during a step, by its name; autograd does not get it."""
        self.has_unused_slots = DISPATCHERS.look_up(options.dispatcher).has_unused_slots
        self.even_rows = options.pad_to_capacity
        self.w1_bias = self.w3_bias = self.w2_bias = None
        if model.expert_linear_bias:
            self.w1_bias, self.w3_bias = (nn.Parameter(torch.empty(shape[:2], dtype=dtype)) for _ in range(2))
            self.w2_bias = nn.Parameter(torch.empty(shape[0], shape[2], dtype=dtype))
        self.clamped = model.expert_activation == "clamped_swiglu"
        self.grouped_mm, self.kernels, self.dtype = options.grouped_mm, options.kernels, options.expert_dtype
        self.rounded = QuantisedWeights(self.kernels)
        self.etp_rank = 0  # index among the etp ranks of its experts; set when the model is placed on the meshes

    # Replaced for halves of a microbatch, compilation and recomputation: so all run inside the hooks of the module.
    @named("experts")
    def forward(self, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        """Return each routed token's output of its expert, times the token's routing weight: (R, D).

        With etp the result is this rank's summand, over its part of the hidden width. Results of slots after the last
        expert's tokens are undefined. Sends nothing.
        """
        y_RD = self.products(x_RD, weight_R1, count_e)
        observe.products(self, (x_RD, weight_R1), y_RD)
        return y_RD

    def hidden_weights(self) -> dict[str, Tensor]:
        """Return the local weights of gate and up: "w1" and "w3", (e, F, D) each; in steps that copy them, "w1_and_w3".

        That copy, (e, 2F, D), is of experts that FSDP does not shard, and never stored (titanmoe.parallel.unsharded).
        """
        if self.w1_and_w3 is not None:
            return {"w1_and_w3": self.w1_and_w3}
        return {"w1": to_local(self.w1), "w3": to_local(self.w3)}

    # A method so that compilation and recomputation can wrap it.
    def products(self, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        """Return each routed token's output of its expert, times its routing weight: (R, D). Observers are not told."""
        multiplier = self.choose_products(x_RD, count_e)
        hidden = self.gate_and_up(multiplier, x_RD)
        if self.w1_bias is None:
            return self.down(multiplier, hidden, weight_R1)
        member_Re = expert_one_hot(count_e, x_RD.shape[0], self.w2.dtype)
        hidden = self.add_up_bias(hidden, member_Re, count_e)
        return self.add_down_bias(self.down(multiplier, hidden, weight_R1), member_Re * weight_R1)

    def choose_products(self, x_RD: Tensor, count_e: Tensor) -> ExpertProducts | TracedProducts:
        """Return the object that multiplies in this call: eager, in 8 bits, or, in traced code, TracedProducts.

        Its method is "grouped" where `can_group` and moe.grouped_mm allow it, else "even" with padded buffers, else
        "loop", as always with "fp8_emulated". Of `x_RD` only shape, dtype and device are read. On GPUs the host waits
        if torch.compile traces a loop over experts.
        """
        method: ProductMethod = "even" if self.even_rows else "loop"
        if self.grouped_mm != "loop" and can_group(x_RD, *to_local(self.w1).shape[1:]):
            method = "grouped"
        if torch.compiler.is_compiling():
            return TracedProducts.of(count_e, method, self.clamped, self.kernels)
        common = {"groups": Groups(count_e), "clamped": self.clamped, "kernels": self.kernels}
        if self.dtype == "compute":
            return ExpertProducts(method=method, **common)
        emulated = self.dtype == "fp8_emulated"
        method = "loop" if emulated else method
        return EightBitProducts(method=method, emulated=emulated, rounded=self.rounded, **common)

    def gate_and_up(self, multiplier: ExpertProducts, x_RD: Tensor) -> tuple[Tensor, ...]:
        """Compute gate and up without biases, (R, F) each, or with `w1_and_w3` side by side in one tensor (R, 2F).

        The activation is not applied. Differentiable.
        """
        weights = self.hidden_weights()
        return multiplier.up(x_RD, *weights.values(), sums=[self.sums.get(name) for name in weights])

    def down(self, multiplier: ExpertProducts, hidden: tuple[Tensor, ...], weight_R1: Tensor) -> Tensor:
        """Compute the activation times the routing weights, and its down projection without bias: (R, D).

        Differentiable. `multiplier` is the one that `gate_and_up` got.
        """
        (y_RD,) = multiplier.down(hidden, weight_R1, to_local(self.w2), add=self.sums.get("w2"))
        return y_RD

    def add_up_bias(self, hidden: tuple[Tensor, ...], member_Re: Tensor, count_e: Tensor) -> tuple[Tensor, ...]:
        """Return `hidden` plus the biases of gate and up. Slots that a dispatcher leaves unused at the end become 0.

        `member_Re` is the mask of `expert_one_hot`, 1 where a token belongs to an expert.
        """
        w1_eF, w3_eF = to_local(self.w1_bias), to_local(self.w3_bias)
        biases = (w1_eF, w3_eF) if len(hidden) == 2 else (torch.cat((w1_eF, w3_eF), 1),)
        hidden = tuple(torch.addmm(x, member_Re, bias) for x, bias in zip(hidden, biases, strict=True))
        if not self.has_unused_slots:
            return hidden
        used_R1 = torch.arange(member_Re.shape[0], device=count_e.device).unsqueeze(1) < count_e.sum()
        return tuple(x.where(used_R1, 0) for x in hidden)  # 0 * NaN is NaN: mask, do not multiply

    def add_down_bias(self, y_RD: Tensor, weight_Re: Tensor) -> Tensor:
        """Return y_RD plus the bias of the down projection, times each token's routing weight.

        With etp this rank adds only the columns of the bias that it has.

        Args:
            y_RD: the experts' outputs, already times the routing weight.
            weight_Re: the routing weight in the column of the token's expert, 0 elsewhere.
        """
        # The etp ranks of an expert return summands: each adds the bias to its own columns only.
        bias_ed = to_local(self.w2_bias)
        before = self.etp_rank * bias_ed.shape[1]
        bias_eD = F.pad(bias_ed, (before, y_RD.shape[1] - before - bias_ed.shape[1]))
        return torch.addmm(y_RD, weight_Re.to(y_RD.dtype), bias_eD)


def expert_one_hot(count_e: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a mask (R, e): 1 where a token belongs to an expert, else 0.

    The mask times the biases (e, F) gives each token the bias of its expert; the mask's transpose sums the gradients of
    the biases. `rows` is R, which may be more than all experts' tokens: the last rows are 0 then.
    """
    row_R1, end_e = torch.arange(rows, device=count_e.device).unsqueeze(1), count_e.cumsum(0)
    return ((row_R1 >= end_e - count_e) & (row_R1 < end_e)).to(dtype)
