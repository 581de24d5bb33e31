"""Mistakes that public trainers have made, each monkeypatched in on every rank: the oracle must notice every one.

A fault is a function that breaks something and returns what mends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


def expert_gradients_scaled_by_ep() -> Callable[[], None]:
    from titanmoe.train import trainer

    def scaled(add: Any) -> Any:
        def run(self: Any) -> None:
            add(self)
            for name, p in self.parameters.items():
                if ".experts." in name:
                    p.grad.to_local().mul_(self.fold.ep)

        return run

    return _patch(trainer.Trainer, "finish_gradients", scaled)


def router_not_reduced_over_tp() -> Callable[[], None]:
    from titanmoe.train import trainer

    def partial(sum_replicated: Any) -> Any:
        def run(parameters: Any, tp: Any) -> None:
            shapes = {p.shape for p in parameters if p.dim() == 1}
            sum_replicated([p for p in parameters if p.shape in shapes], tp)

        return run

    return _patch(trainer, "sum_replicated", partial)


def norm_without_experts() -> Callable[[], None]:
    from titanmoe.train import trainer

    def without(norm: Any) -> Any:
        return lambda parameters, *rest: norm({n: p for n, p in parameters.items() if ".experts." not in n}, *rest)

    return _patch(trainer, "grad_norm", without)


def loss_divided_by_local_tokens() -> Callable[[], None]:
    from titanmoe.train import trainer

    def local(count: Any) -> Any:
        def run(self: Any, batches: Any) -> Any:
            totals = count(self, batches)
            mine = sum(int((b.labels_BS != -100).sum()) for b in batches)
            return trainer.Totals(torch.tensor(float(mine * self.fold.dp), dtype=torch.float64), totals.tokens)

        return run

    return _patch(trainer.Trainer, "count", local)


def norm_of_own_heads_only() -> Callable[[], None]:
    """The mean of squares over the heads of one tp rank."""
    from titanmoe.models import layers

    return _patch(layers, "sum_over", lambda sum_over: lambda x, group: x * group.size)


def rope_offset_wrong() -> Callable[[], None]:
    """Each cp rank counts positions from its own start."""
    from titanmoe.train import trainer

    def shifted(cut: Any) -> Any:
        def run(*args: Any) -> Any:
            piece = cut(*args)
            position = torch.arange(piece.tokens.position_BS.shape[1]).expand_as(piece.tokens.position_BS)
            return piece._replace(tokens=piece.tokens._replace(position_BS=position))

        return run

    return _patch(trainer, "cut", shifted)


def label_shifted_across_shard_edge() -> Callable[[], None]:
    """Labels made from a rank's own ids: the last of each piece is lost."""
    from titanmoe.train import trainer

    def shifted(cut: Any) -> Any:
        def run(*args: Any) -> Any:
            piece = cut(*args)
            labels = piece.labels_BS.clone()
            labels[:, -1] = piece.ids_BS[:, 0]
            return piece._replace(labels_BS=labels.where(piece.labels_BS != -100, -100))

        return run

    return _patch(trainer, "cut", shifted)


def next_token_within_a_shard() -> Callable[[], None]:
    """What multi-token prediction sees, made of a rank's own ids: the last of each piece sees the piece's first."""
    from titanmoe.train import trainer

    def rolled(cut: Any) -> Any:
        def run(*args: Any) -> Any:
            piece = cut(*args)
            return piece._replace(tokens=piece.tokens._replace(next_BS=piece.ids_BS.roll(-1, 1)))

        return run

    return _patch(trainer, "cut", rolled)


FAULTS = {
    function.__name__: function
    for function in (
        expert_gradients_scaled_by_ep,
        router_not_reduced_over_tp,
        norm_without_experts,
        loss_divided_by_local_tokens,
        norm_of_own_heads_only,
        rope_offset_wrong,
        label_shifted_across_shard_edge,
        next_token_within_a_shard,
    )
}
