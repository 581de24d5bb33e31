"""Muon for the reference model: Newton-Schulz by its effect on singular values, and matrices listed by family.

It shares no code with titanmoe's and knows no ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from titanmoe.config.schema import Config, Model

POLAR = [
    [8.28721201814563, -23.595886519098837, 17.300387312530933],
    [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
    [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
    [3.3184196573706015, -2.488488024314874, 0.51004894012372],
    [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
    [1.891301407787398, -1.2679958271945868, 0.37680408948524835],
    [1.8750014808534479, -1.2500016453999487, 0.3750001645474248],
]


def newton_schulz(x: Tensor, kind: str, steps: int, small: float) -> Tensor:
    """Return the matrix with its singular values changed by Newton-Schulz steps.

    Args:
        x: the matrix.
        kind: optimizer.ns_coefficients, "classic" or "polar_express".
        steps: number of steps.
        small: number added to the Frobenius norm that the matrix is divided by first.
    """
    norm = float(x.norm()) + small
    if norm == 0:
        return x
    u, s, v = torch.linalg.svd(x / norm, full_matrices=False)
    for k in range(steps):
        a, b, c = 3.4445, -4.7750, 2.0315
        if kind == "polar_express":
            a, b, c = POLAR[k] if k < 7 else (1.875, -1.25, 0.375)
            if k < 7:
                a, b, c = a / 1.01, b / 1.01**3, c / 1.01**5
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def rows_of(model: Model, name: str, rows: int, by_head: bool) -> list[list[int]]:
    """Return the row numbers of each matrix that Muon treats on its own in a weight: mostly one with all rows.

    Fused weights of latent attention are divided, and with `by_head` attention's projections into heads. `name` is the
    weight's full name, `rows` the number of its rows, of experts of one expert's.
    """
    latent, nope, value = model.kv_lora_rank, model.qk_nope_head_dim, model.v_head_dim
    every, leaf = list(range(rows)), name.split(".")[-2]
    if ".attention." not in name:
        return [every]
    if leaf == "wkv_a":
        return [every[:latent], every[latent:]]
    if leaf == "wkv_b":
        heads = [every[i : i + nope + value] for i in range(0, rows, nope + value)]
        keys, values = [rows[:nope] for rows in heads], [rows[nope:] for rows in heads]
        return keys + values if by_head else [[i for rows in some for i in rows] for some in (keys, values)]
    if by_head and leaf in ("wq", "wk", "wv", "wz", "wg", "wq_b"):
        width = head_width(model, name, leaf)
        return [every[i : i + width] for i in range(0, rows, width)]
    return [every]


def head_width(model: Model, name: str, leaf: str) -> int:
    """Return the number of rows of one head in a weight of attention.

    `name` is the weight's full name, `leaf` its last part but ".weight", such as "wq".
    """
    from tests.reference import blocks, own_layer

    if any(own_layer(model, i) for i, block in blocks(model).items() if name.startswith(f"{block}.")):
        return model.own["linear_key_dim" if leaf in ("wq", "wk") else "linear_value_dim"]
    return model.head_dim


def is_matrix(name: str, weight: Tensor, router: bool) -> bool:
    """Return whether Muon trains the weight; `router` says whether it trains routers.

    It never trains the embedding, the head, norms, biases, convolutions and narrow gates such as wb.
    """
    if name.endswith("router.weight"):
        return router
    if weight.dim() < 2 or name.startswith(("embed.", "head.")) or name.endswith(("_bias", "bias", "norm.weight")):
        return False
    gates = tuple(f".{gate}.weight" for gate in ("shared.gate", "wa", "wb", "wg_a", "wg_b"))
    return not name.endswith(gates) and ".conv_" not in name


def muon(
    config: Config, weights: dict[str, Tensor], grads: dict[str, Tensor], moments: dict, step_number: int, norm: float
) -> tuple[dict[str, Tensor], dict]:
    """Return updated weights and moments by name, as new dicts; weights without a gradient are unchanged.

    AdamW updates weights that are not `is_matrix`.

    Args:
        config: the config.
        weights: all weights.
        grads: gradients of the trained weights, clipped.
        moments: moments of the last step; {} before the first.
        step_number: 1 for the first step.
        norm: norm of `grads`, by which ns_eps is multiplied.
    """
    from tests.reference import adamw, rate_and_decay

    options = config.optimizer
    matrices = [name for name in grads if is_matrix(name, weights[name], options.router_matrix)]
    others = {name: weight for name, weight in weights.items() if name not in matrices}
    rate = options.lr if options.adamw_lr < 0 else options.adamw_lr
    of_rest = replace(config, optimizer=replace(options, lr=rate))
    rest = {name: grad for name, grad in grads.items() if name in others}
    new, new_moments = adamw(of_rest, others, rest, moments, step_number)
    mu = options.momentum
    for name in matrices:
        w, g = weights[name], grads[name]
        m = mu * moments.get(name, torch.zeros_like(w)) + (1 - mu) * g
        direction = (1 - mu) * g + mu * m if options.nesterov else m
        update = torch.zeros_like(w)
        for expert in range(w.shape[0]) if w.dim() == 3 else [None]:
            x, out = (direction, update) if expert is None else (direction[expert], update[expert])
            for rows in rows_of(config.model, name, x.shape[0], options.by_head):
                big, ratio = max(len(rows), x.shape[1]), len(rows) / x.shape[1]
                factor = 0.2 * math.sqrt(big) if options.adjust_lr == "match_rms" else math.sqrt(max(1, ratio))
                out[rows] = factor * newton_schulz(
                    x[rows], options.ns_coefficients, options.ns_steps, options.ns_eps * norm
                )
        lr, decay = rate_and_decay(config, name, w, step_number)
        new[name] = w - lr * decay * w - lr * update
        new_moments[name] = m
    return {name: new[name] for name in weights}, new_moments
