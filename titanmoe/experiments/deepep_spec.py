"""The spec of the dispatcher `deepep`, without torch: what it refuses and costs.

Read by config and planner; titanmoe.experiments.deepep is the implementation. Limits are those of DeepEP 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.moe.dispatchers.dispatcher_spec import DispatcherSpec, ExchangeCosts


class DeepEPSpec(DispatcherSpec):
    """The spec of the dispatcher deepep: what DeepEP 1.2 supports and costs."""

    help = (
        "deepep (experimental, not run on GPUs) sends a token once to each rank that has experts of it, by the kernels "
        "of DeepEP: for bfloat16 on GPUs with NVLink in a node and RDMA between nodes, with its package deep_ep."
    )
    implementation = "titanmoe.experiments.deepep:DeepEP"
    cannot_overlap = "sends a token once for all its experts on a rank"
    asks_machine = True
    own_buffers = True
    model_width_only = True
    cannot_pad = 'and moe.dispatcher = "deepep" has none: use dispatcher = "alltoall", or pad_to_capacity = false'

    # deep_ep/buffer.py and csrc/kernels of DeepEP 1.2: sizes that it has options for, lanes of a warp, a token's
    # half in a warp's buffer, 32 bytes at a time.
    sizes = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
    node = 8
    param = "bfloat16"
    dim_of, most_dim = 16, 8176

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield what every dispatcher refuses, then options that DeepEP's kernels do not support.

        Those are another mixed_precision_param than bfloat16, another router_dtype than float32, some model widths.
        """
        yield from super().contradictions(config)
        param, router, dim = config.training.mixed_precision_param, config.moe.router_dtype, config.model.dim
        if self.param and param != self.param:
            yield Violation(
                ("moe.dispatcher", "training.mixed_precision_param"),
                f'moe.dispatcher = "deepep" sends {self.param} alone, and training.mixed_precision_param = "{param}": '
                f'use "{self.param}" there, or dispatcher = "alltoall"',
            )
        if self.param and router != "float32":
            yield Violation(
                ("moe.dispatcher", "moe.router_dtype"),
                f'moe.dispatcher = "deepep" sends routing weights in float32, and moe.router_dtype = "{router}": use '
                '"float32" there, or dispatcher = "alltoall"',
            )
        if dim % self.dim_of or dim > self.most_dim:
            yield Violation(
                ("moe.dispatcher", "model.dim"),
                f'moe.dispatcher = "deepep" sends multiples of {self.dim_of} numbers, at most {self.most_dim}, and '
                f'model.dim is {dim}: use dispatcher = "alltoall"',
            )

    def limits(self, config: Config, ep: int, etp: int) -> Iterator[str]:
        """Yield a message for each reason why DeepEP's kernels do not support a dispatch group of ep * etp ranks.

        Reasons are the number of a token's copies, the number of ranks, and, if parallelism.node is above 1, nodes of
        a size that does not fit the group.
        """
        ranks, top_k = ep * etp, config.model.top_k
        if top_k * etp > 32:
            yield (
                'moe.dispatcher = "deepep" takes at most 32 copies of a token, and model.top_k * etp = '
                f'{top_k} * {etp} is {top_k * etp}: use another ep or etp, or dispatcher = "alltoall"'
            )
        if ranks not in self.sizes:
            yield (
                f'moe.dispatcher = "deepep" is made for {", ".join(map(str, self.sizes))} ranks, and ep * etp = {ep} * '
                f'{etp} is {ranks}: use another ep or etp, or dispatcher = "alltoall"'
            )
        node = config.parallelism.node  # 1 also where no launcher says
        if node > 1 and (node != self.node if ranks > self.node else node % ranks):
            yield (
                f'moe.dispatcher = "deepep" needs its group within a node, or nodes of {self.node} ranks, and ep * etp '
                f'= {ep} * {etp} ranks are on nodes of {node}: use another ep or etp, or dispatcher = "alltoall"'
            )

    def seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        """Estimate the seconds of a layer's dispatch and combine in one forward.

        Each token goes once to each rank that has experts of it, and one row comes back.

        Args:
            costs: the planner's model and network.
            tokens: the number of tokens that a rank owns.
        """
        domains = costs.domains(ep, etp)
        across = tokens * costs.routed_token_bytes * costs.visits(domains) * (domains - 1) / domains
        within = tokens * costs.routed_token_bytes * costs.visits(ep) * etp
        return 2 * costs.links.relay(costs.expert_group(ep, etp), across, within)


SPEC = DeepEPSpec()
