"""Repeat the forward and backward of a suspect step: do they give the same bits?

Each rank takes fingerprints of what it computed itself: its part of the loss, the routing of each layer (counts and
statistics that exist anyway) and its pieces of the gradients. Hidden states travel between ranks, so only the first
layer that came out differently shows where the fault is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.parallel.norm import local_grad
from titanmoe.train.gradients import Gradients, PassSums, StepWork, Sums
from titanmoe.watch.replicas import fingerprint, first_few


def pass_fingerprints(gradients: Gradients, own: PassSums) -> dict[str, int]:
    """Fingerprints of the last forward and backward, in the order in which a fault spreads. The host waits for them."""
    prints: dict[str, Tensor] = {}
    for number, moe in sorted(gradients.moe_layers.items()):
        prints[f"the router of layer {number}"] = fingerprint(moe.balance.counts.counts_MX)
    prints["the loss"] = fingerprint(torch.stack((own.loss, own.mtp_loss)))
    for name, parameter in gradients.trained.items():
        prints[f"the gradient of {name}"] = fingerprint(local_grad(parameter))
    return dict(zip(prints, torch.stack(list(prints.values())).tolist(), strict=True))


def repeat(gradients: Gradients, work: StepWork, own: PassSums) -> tuple[Sums, str]:
    """The sums of a second pass, whose gradients replace those of the first, and what differs.

    All ranks call it together. own: this rank's sums of the first pass.
    """
    first = pass_fingerprints(gradients, own)
    gradients.drop()
    sums = gradients.sums(work)
    second = pass_fingerprints(gradients, sums.own)
    own_differences = [name for name in first if first[name] != second[name]]
    differences: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(differences, own_differences)
    return sums, describe(differences)


def describe(differences: list[list[str]]) -> str:
    """Which rank's results are not reproducible; "" if all are.

    differences: by rank, what came out differently, in the order of `pass_fingerprints`.
    """
    differing = {rank: names for rank, names in enumerate(differences) if names}
    if not differing:
        return ""

    def order(name: str) -> tuple[int, int]:
        if name.startswith("the router"):
            return 0, int(name.rpartition(" ")[2])
        return (1, 0) if name == "the loss" else (2, 0)

    earliest = min((names[0] for names in differing.values()), key=order)
    ranks = [rank for rank, names in differing.items() if order(names[0]) == order(earliest)]
    earliest_text = "gradients" if earliest.startswith("the gradient") else earliest
    text = f"not reproducible on rank{'s' * (len(ranks) > 1)} {first_few(ranks)}, first seen in {earliest_text}"
    rest = len(differing) - len(ranks)
    return text + (f"; what {rest} other rank{'s' * (rest > 1)} computed from it differs too" if rest else "")
