"""The dispatcher `hierarchical`: each token crosses once to every node that has experts of it, and is copied there.

It goes to the rank with this rank's position on that node, then by an all-to-all inside the node, which makes the
copies for several experts and for etp. On the way back the node sums, and one row crosses. Inside one node it is
AllToAll. Between nodes a slot has a token for a node: C = T * N choices of a node, with X = 1 slot each.

Shapes: T tokens this rank owns, D model, K top-k, J choices of a token, E experts, e local experts, G ranks of the
dispatch group (ep x etp), S slots of this rank's send buffer, R routed tokens that it receives for its experts, N nodes
of the group, V tokens that arrive here from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm import interleave
from titanmoe.comm.all_to_all import InFlight, finish_all_to_all, start_all_to_all
from titanmoe.comm.host_sync import CountExchange
from titanmoe.moe.dispatchers.alltoall import AllToAll, AllToAllExchange
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, Exchange, ExpertRanks
from titanmoe.moe.permute import permute_tokens, unpermute_tokens
from titanmoe.moe.send_slots import Route, assign_slots, local_choices, sort_by_expert, truncate_buffer, truncate_route
from titanmoe.observe import named
from titanmoe.ops import device


class Hierarchical(Dispatcher):
    """The dispatcher with two hops: an all-to-all across nodes, then one inside the node."""

    def place(self, ranks: ExpertRanks) -> None:
        """Set the ranks that hold this layer's experts, and place `inner`, the AllToAll within this node."""
        super().place(ranks)
        nodes = ranks.across.size
        self.node_experts = self.num_experts // nodes
        self.inner = AllToAll(self.node_experts, self.kernels)
        self.inner.place(ExpertRanks(ranks.within if nodes > 1 else ranks.group, self.ep // nodes, self.etp))

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Start to send each token once to every node that has an expert of it.

        Collective over the dispatch group. The host waits for counts, unless expert buffers are padded. Within a single
        node, start the all-to-all to experts.
        """
        across = self.ranks.across
        T, N = x_TD.shape[0], across.size
        if N == 1:
            return self.inner.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
        choice_S, slot_CX, counts = self.assign(chosen_TK, slots_per_expert)
        route = Route(choice_S // N, slot_CX.view(T, N))
        x_SD, weights_SK = (permute_tokens(x, route.source_S, route.slot_TJ, self.kernels) for x in (x_TD, weights_TK))
        choices_SK = F.pad(chosen_TK, (0, 0, 0, 1), value=self.num_experts).index_select(0, route.source_S)
        if counts is None:
            send = receive = [T] * N
        else:
            interleave.yield_in_backward(x_SD)
            _, send, receive = counts.read()  # the first of two host syncs
            route = truncate_route(route, sum(send))
        x_VD, weights_VK, choices_VK = (
            start_all_to_all(truncate_buffer(rows, sum(send)), across, send, receive, small)
            for rows, small in ((x_SD, False), (weights_SK, True), (choices_SK.to(torch.int32), True))
        )
        return HierarchicalExchange(
            dispatcher=self,
            x_VD=x_VD,
            weights_VK=weights_VK,
            choices_VK=choices_VK,
            slots_per_expert=slots_per_expert * N,
            route=route,
            leaving=send,
            arriving=receive,
        )

    def assign(self, chosen_TK: Tensor, slots_per_expert: int) -> tuple[Tensor, Tensor, CountExchange | None]:
        """Assign a slot of the send buffer to each copy of a token, one for each node that has experts of it.

        Collective over the nodes (`ranks.across`), unless expert buffers are padded (`slots_per_expert` is not 0).

        Returns:
            The copy in each slot, numbered token * N + node; the slot of each copy (C, X); and the started exchange of
            counts between nodes, None if expert buffers are padded.
        """
        T, N = chosen_TK.shape[0], self.ranks.across.size
        # A token visits each of its nodes once; "no expert" is on node N, which does not exist.
        visits_TN = torch.zeros(T, N + 1, dtype=torch.bool, device=chosen_TK.device)
        visits_TN = visits_TN.scatter_(1, chosen_TK // self.node_experts, True)[:, :N]
        node_TN = torch.arange(N, device=chosen_TK.device).where(visits_TN, N)
        order_C, count_N = sort_by_expert(node_TN, N)
        on_gpu = device.kind(chosen_TK) == "cuda"
        counts = None if slots_per_expert else CountExchange(count_N.view(N, 1), self.ranks.across, on_gpu)
        # A static size with padded expert buffers, where a token may visit every node; otherwise the largest possible.
        most = T * N if slots_per_expert else T * min(N, chosen_TK.shape[1])
        return *assign_slots(
            node_TN, order_C, count_N, ep=N, etp=1, slots_per_expert=T if slots_per_expert else 0, num_slots=most
        ), counts


@dataclass(kw_only=True)
class HierarchicalExchange:
    """An exchange in two hops: tokens in flight to the nodes of their experts, then inside the node to the experts."""

    dispatcher: Hierarchical
    x_VD: InFlight
    weights_VK: InFlight
    choices_VK: InFlight
    slots_per_expert: int
    route: Route
    leaving: list[int]
    """The number of tokens that this rank sends to each node."""
    arriving: list[int]
    """The number of tokens that this rank receives from each node."""

    @named("dispatch")
    def relay(self) -> AllToAllExchange:
        """Wait for the tokens from other nodes, and start to send them to their experts inside this node.

        Called once, before `start_combine`: directly, or by `receive_routed`. Collective over the node's ranks. The
        host waits for counts, unless expert buffers are padded.

        Returns:
            The exchange inside the node, which brings the tokens to the experts.
        """
        x_VD, weights_VK = finish_all_to_all(self.x_VD), finish_all_to_all(self.weights_VK)
        inner, rank = self.dispatcher.inner, self.dispatcher.ranks.across.rank
        chosen_VK = local_choices(finish_all_to_all(self.choices_VK).long(), rank, inner.num_experts)
        self.node_exchange = inner.dispatch(x_VD, weights_VK, chosen_VK, self.slots_per_expert)
        return self.node_exchange

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Run the second hop, wait for it, and return the routed tokens of this rank's experts. Not after `relay`.

        They are tokens (R, D), their weights (R, 1) and each local expert's number of them (e,).
        """
        return self.relay().receive_routed()

    def combine(self, y_RD: Tensor) -> Tensor:
        return self.finish_combine(self.start_combine(y_RD))

    def start_combine(self, y_RD: Tensor) -> InFlight:
        """Start the first hop back. Collective over the node's ranks."""
        return self.node_exchange.start_combine(y_RD)

    @named("combine")
    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """Wait for the first hop back, sum the outputs by token, send the sums across nodes, and wait.

        Collective over the nodes (`ranks.across`).

        Returns:
            Each own token's sum over its experts (T, D).
        """
        y_VD, across = self.node_exchange.finish_combine(in_flight), self.dispatcher.ranks.across
        y_SD = finish_all_to_all(start_all_to_all(y_VD, across, self.arriving, self.leaving))
        return unpermute_tokens(y_SD, self.route.source_S, self.route.slot_TJ, self.dispatcher.kernels)
