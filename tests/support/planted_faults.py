"""Mistakes that public trainers have made, each patched in on every rank; the parity tests must notice each of them.

A fault is a function that breaks something and returns a function that repairs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


def _expert_gradients_scaled_by(axis: str) -> Callable[[], None]:
    from titanmoe.train.gradients import Gradients

    def scaled(add: Any) -> Any:
        def run(self: Any) -> None:
            add(self)
            for name, p in self.parameters.items():
                if ".experts." in name:
                    p.grad.to_local().mul_(getattr(self.meshes.fold, axis))

        return run

    return _patch(Gradients, "finish_gradients", scaled)


def expert_gradients_scaled_by_ep() -> Callable[[], None]:
    return _expert_gradients_scaled_by("ep")


def expert_gradients_scaled_by_etp() -> Callable[[], None]:
    return _expert_gradients_scaled_by("etp")


def _routers_only_summed_over(axis: str) -> Callable[[], None]:
    from titanmoe.comm.collectives import NO_GROUP, Group
    from titanmoe.train import gradients

    def partial(sum_replicated: Any) -> Any:
        def run(parameters: Any, summed_over: Any, meshes: Any) -> None:
            ranks = Group.of(meshes.dense.get_group(axis))
            sum_replicated(parameters, summed_over, replace(meshes, sequence=ranks, data=NO_GROUP))

        return run

    return _patch(gradients, "sum_replicated", partial)


def router_not_reduced_over_tp() -> Callable[[], None]:
    return _routers_only_summed_over("fsdp")


def router_not_summed_over_cp() -> Callable[[], None]:
    return _routers_only_summed_over("tp")


def norm_without_experts() -> Callable[[], None]:
    from titanmoe.train import gradients

    def without(norm: Any) -> Any:
        return lambda parameters, *rest: norm({n: p for n, p in parameters.items() if ".experts." not in n}, *rest)

    return _patch(gradients, "grad_norm", without)


def loss_divided_by_local_tokens() -> Callable[[], None]:
    from titanmoe.train import gradients

    def local(count: Any) -> Any:
        def run(self: Any, batches: Any) -> Any:
            totals = count(self, batches)
            mine = sum(int((b.labels_BS != -100).sum()) for b in batches)
            dp = self.meshes.fold.dp
            return replace(totals, divisor=torch.tensor(float(mine * dp), dtype=torch.float64))

        return run

    return _patch(gradients.Slicer, "count", local)


def norm_of_own_heads_only() -> Callable[[], None]:
    """Let QK norm over all heads take the mean of squares over the heads of one tp rank."""
    from titanmoe.models import layers

    return _patch(layers, "all_reduce_autograd", lambda all_reduce_autograd: lambda x, group: x * group.size)


def rope_offset_wrong() -> Callable[[], None]:
    """Let each cp rank count RoPE positions from its own start."""
    from titanmoe.train import gradients

    def shifted(take_slice: Any) -> Any:
        def run(*args: Any) -> Any:
            batch_slice = take_slice(*args)
            position = torch.arange(batch_slice.tokens.position_BS.shape[1]).expand_as(batch_slice.tokens.position_BS)
            return batch_slice._replace(tokens=batch_slice.tokens._replace(position_BS=position))

        return run

    return _patch(gradients, "take_slice", shifted)


def label_shifted_across_shard_edge() -> Callable[[], None]:
    """Make labels from a rank's own ids, so that the last label of each shard is wrong."""
    from titanmoe.train import gradients

    def shifted(take_slice: Any) -> Any:
        def run(*args: Any) -> Any:
            batch_slice = take_slice(*args)
            labels = batch_slice.labels_BS.clone()
            labels[:, -1] = batch_slice.ids_BS[:, 0]
            return batch_slice._replace(labels_BS=labels.where(batch_slice.labels_BS != -100, -100))

        return run

    return _patch(gradients, "take_slice", shifted)


def next_token_within_a_shard() -> Callable[[], None]:
    """Make the input of multi-token prediction from a rank's own ids, so that the last of each shard is wrong."""
    from titanmoe.train import gradients

    def rolled(take_slice: Any) -> Any:
        def run(*args: Any) -> Any:
            batch_slice = take_slice(*args)
            return batch_slice._replace(tokens=batch_slice.tokens._replace(next_BS=batch_slice.ids_BS.roll(-1, 1)))

        return run

    return _patch(gradients, "take_slice", rolled)


def balance_terms_by_the_wrong_group() -> Callable[[], None]:
    """Sum per-sample counts over data ranks, and counts of all samples over the ranks of one sample."""
    from titanmoe.moe.balance import Balance

    def exchanged(terms: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            self.sequence, self.data = self.data, self.sequence
            try:
                return terms(self, *args)
            finally:
                self.sequence, self.data = self.data, self.sequence

        return run

    return _patch(Balance, "forward", exchanged)


def balance_terms_counted_in_recomputation_too() -> Callable[[], None]:
    from titanmoe.moe.balance import Balance

    def added(forward: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            m = args[-1].microbatch
            before = self.counts.counts_MX[m].clone()
            out = forward(self, *args)
            self.counts.counts_MX[m] += before
            return out

        return run

    return _patch(Balance, "forward", added)


def router_without_its_gradient() -> Callable[[], None]:
    """Detach the routing weights, so that routers only get the gradient of a balance term."""
    from titanmoe.moe.router import Router

    def detached(plain: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            scores, weights, *rest = plain(self, *args)
            return scores, weights.detach(), *rest

        return run

    return _patch(Router, "_plain", detached)


def garbage_gradients_without_tokens() -> Callable[[], None]:
    """Give experts without tokens a gradient that is not 0, as uninitialized memory would be."""
    from titanmoe.moe import expert_products

    def left(gradient: Any) -> Any:
        def run(grad: torch.Tensor, h: torch.Tensor, groups: Any) -> torch.Tensor:
            idle = groups.count_e == 0
            return gradient(grad, h, groups) + 0.1 * idle.view(-1, 1, 1)

        return run

    gradients = expert_products.GRADIENTS
    plain = gradients["loop"]
    gradients["loop"] = left(plain)
    return lambda: gradients.update(loop=plain)


def nan_in_a_gradient() -> Callable[[], None]:
    """Write a NaN into a gradient after the check of the norm, which would end the step."""
    from titanmoe.train.guard import Guard

    def spoiled(finite: Any) -> Any:
        def run(self: Any, *args: Any) -> None:
            finite(self, *args)
            list(self.gradients.parameters.values())[-1].grad.to_local().view(-1)[-1:] = float("nan")

        return run

    return _patch(Guard, "check_finite", spoiled)


def _spoiled_report(spoil: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    from titanmoe.train import trainer

    def spoiled(step: Any) -> Any:
        def run(self: Any) -> dict[str, Any]:
            report = step(self)
            spoil(report)
            return report

        return run

    return _patch(trainer.Trainer, "train_step", spoiled)


def nan_in_a_load() -> Callable[[], None]:
    return _spoiled_report(lambda report: report["layers.1.load"].__setitem__(-1, float("nan")))


def nan_in_an_aux_term() -> Callable[[], None]:
    return _spoiled_report(lambda report: report.update(aux_loss=float("nan")))


def nan_in_the_mtp_loss() -> Callable[[], None]:
    return _spoiled_report(lambda report: report.update(mtp_loss=float("nan")))


def muon_of_two_experts_as_one() -> Callable[[], None]:
    from titanmoe.train.optimizers import muon

    def pairs(orthogonalize: Any) -> Any:
        def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
            if x.dim() == 2:
                return orthogonalize(x, *args)
            return orthogonalize(x.reshape(len(x) // 2, -1, x.shape[-1]), *args).reshape(x.shape)

        return run

    return _patch(muon, "orthogonalize", pairs)


def muon_of_padded_rows() -> Callable[[], None]:
    """Orthogonalize rows of padding with a matrix, as where a rank has fewer rows than others."""
    from titanmoe.train.optimizers import muon

    def padded(orthogonalize: Any) -> Any:
        return lambda x, *args: orthogonalize(torch.cat((x, x[..., -2:, :]), -2), *args)[..., : x.shape[-2], :]

    return _patch(muon, "orthogonalize", padded)


def muon_scaled_by_local_shapes() -> Callable[[], None]:
    from titanmoe.train.optimizers.muon import Muon

    def scaled(move: Any) -> Any:
        def run(self: Any, name: str, update: torch.Tensor, lr: float) -> None:
            ratio = max(update.shape[-2:]) / max(self.parameters[name].shape[-2:])
            move(self, name, update * ratio**0.5, lr)

        return run

    return _patch(Muon, "_apply", scaled)


def muon_owners_that_rank_1_sees_otherwise() -> Callable[[], None]:
    from titanmoe.parallel import full_matrices

    def swapped(owners: Any) -> Any:
        def run(costs: list[int], loads: list[int]) -> list[int]:
            out = owners(costs, loads)
            if torch.distributed.get_rank() == 1:
                out[0], out[1] = out[1], out[0]
            return out

        return run

    return _patch(full_matrices, "assign_owners", swapped)


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
        expert_gradients_scaled_by_etp,
        router_not_summed_over_cp,
        balance_terms_by_the_wrong_group,
        balance_terms_counted_in_recomputation_too,
        router_without_its_gradient,
        garbage_gradients_without_tokens,
        nan_in_a_gradient,
        nan_in_a_load,
        nan_in_an_aux_term,
        nan_in_the_mtp_loss,
        muon_of_two_experts_as_one,
        muon_of_padded_rows,
        muon_scaled_by_local_shapes,
        muon_owners_that_rank_1_sees_otherwise,
    )
}
