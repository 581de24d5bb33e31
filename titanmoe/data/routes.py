"""Routes: the experts that each token of recorded samples was sent to, for routers that have to choose them again.

A policy is sampled by a generator and trained by titanmoe. If the two choose other experts for a token, the ratio of
their probabilities is wrong; replaying the generator's choice (arXiv 2510.11370) keeps it right. Routes belong to input
tokens: those of position i are the experts that token i visits, in each MoE layer of the model in order, without dense
layers and without multi-token prediction.

Shapes: N samples, S positions, L MoE layers, A all layers, K top-k.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titanmoe.config.blocks import moe_blocks, moe_layers
from titanmoe.config.schema import Model
from titanmoe.tokens import NO_EXPERT, NOT_RECORDED

RECORD = "give routes that this model chose"
"""Advice of messages about routes that do not fit the model."""


@dataclass(frozen=True)
class Routes:
    """Recorded experts of samples, with a digest that ties them to the samples' ids."""

    experts_NSLK: Tensor
    """Experts, or NO_EXPERT or NOT_RECORDED in all K places; int16, on the CPU."""
    digest_N: Tensor | None = None
    """Digest of each sample's ids and experts (`digest_routes`); None if unknown."""

    def __len__(self) -> int:
        return len(self.experts_NSLK)


def digest_routes(ids_NS: Tensor, experts_NSLK: Tensor, valid_NS: Tensor) -> Tensor:
    """Return a digest of each sample's token ids and experts: (N,), int64.

    It changes if an id changes, or if experts move to other tokens, layers or places of the top-k. Padding, where
    `valid_NS` is False, does not count.
    """
    places = experts_NSLK.shape[2] * experts_NSLK.shape[3]
    factor = torch.full((places,), 6_364_136_223_846_793_005).cumprod(0)  # 1, 2, ... would let two experts swap unseen
    experts_NS = (experts_NSLK.flatten(2).to(torch.int64) * factor).sum(2)
    token_NS = (ids_NS + 1) * 1_000_003 + torch.arange(ids_NS.shape[1]) * 7_919
    mixed_NS = (token_NS * 6_364_136_223_846_793_005 + experts_NS) * (experts_NS + 1_442_695_040_888_963_407)
    return (mixed_NS * valid_NS).sum(1)


def find_shape_problem(experts_NSLK: Tensor, ids_NS: Tensor, model: Model) -> str:
    """Return why routes do not have the shape that these samples' ids and this model need; "" if they have it."""
    tokens, experts = tuple(experts_NSLK.shape[:2]), tuple(experts_NSLK.shape[2:])
    if experts != (wanted := (moe_layers(model), model.top_k)):
        return f"routes have {experts} experts a token, and this model (MoE layers, top_k) = {wanted}: {RECORD}"
    if tokens != ids_NS.shape:
        return f"routes are of {tokens} samples and positions, and ids of {tuple(ids_NS.shape)}: give one for each id"
    return ""


def find_route_problems(
    experts_NSLK: Tensor, ids_NS: Tensor, valid_NS: Tensor, digest_N: Tensor | None, model: Model
) -> list[str]:
    """Return what is wrong with routes, a line each; [] if routers can replay them.

    After a wrong shape nothing else is checked; digests are compared if there is no other problem.

    Args:
        experts_NSLK: the routes.
        ids_NS: the ids of the samples that they are given for.
        valid_NS: False for padding, which is not checked.
        digest_N: digests made when the routes were recorded; None if there are none.
        model: the recipe's [model].
    """
    if problem := find_shape_problem(experts_NSLK, ids_NS, model):
        return [problem]
    if not valid_NS.any():
        return []
    problems = []
    routes = experts_NSLK[valid_NS]
    if int(routes.max()) >= model.num_experts:
        problems.append(
            f"routes name expert {int(routes.max())}, and model.num_experts = {model.num_experts}: {RECORD}"
        )
    if int(routes.min()) < NOT_RECORDED:
        problems.append(
            f"routes name expert {int(routes.min())}: use {NO_EXPERT} for no expert, {NOT_RECORDED} for not recorded"
        )
    in_order = routes.sort(-1).values
    equal = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    if equal.any():
        problems.append(f"routes name expert {int(in_order[..., 1:][equal][0])} twice for one token: {RECORD}")
    marked = (routes < 0).sum(-1)
    if ((marked > 0) & (marked < model.top_k)).any():
        problems.append(f"routes have marks in some of a token's {model.top_k} places: mark all of them or none")
    if digest_N is not None and not problems:
        wrong_N = (digest_N != digest_routes(ids_NS, experts_NSLK, valid_NS)).nonzero().flatten()
        if len(wrong_N):
            problems.append(
                f"the routes of sample {int(wrong_N[0])} were recorded for other ids or positions: give them with the "
                "ids that they were recorded with, position by position"
            )
    return problems


def _moe_layers_of(experts_SAK: np.ndarray, positions: int, model: Model) -> Tensor:
    """Return an engine's routes for all positions of a sample: (positions, L, K), of MoE layers alone.

    Args:
        experts_SAK: routes of the first S positions, of all layers or (S, L, K); those after them are NOT_RECORDED.
        positions: number of the sample's ids; routes beyond them are dropped.
        model: the recipe's [model].

    Raises:
        ValueError: layers or top_k are not the model's.
    """
    layers = [block for block in moe_blocks(model) if block < model.num_layers]
    experts = torch.from_numpy(experts_SAK.astype(np.int16))
    if experts.shape[1:] == (model.num_layers, model.top_k):  # the engine counts dense layers too
        experts = experts[:, layers]
    elif experts.shape[1:] != (len(layers), model.top_k):
        raise ValueError(
            f"routes have {tuple(experts.shape[1:])} experts a token, and this model (layers, top_k) = "
            f"({model.num_layers}, {model.top_k}), of which {len(layers)} layers have experts: {RECORD}"
        )
    out = torch.full((positions, *experts.shape[1:]), NOT_RECORDED, dtype=torch.int16)
    out[: len(experts)] = experts[:positions]
    return out


def routes_from_vllm(text: str, positions: int, model: Model) -> Tensor:
    """Return the routes (positions, L, K) of a sample in vLLM's response (`routed_experts`), the last NOT_RECORDED.

    `text` is base64 of a .npy file of shape (positions - 1, A or L, K): the last of the sample's ids has no route.

    Raises:
        ValueError, EOFError: the text is not base64 of such a file, or its routes are of another model.
    """
    experts = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    return _moe_layers_of(experts, positions, model)


def routes_from_sglang(text: str, positions: int, model: Model) -> Tensor:
    """Return the routes (positions, L, K) of a sample in SGLang's response (`routed_experts`), the last NOT_RECORDED.

    `text` is base64 of int32 numbers of shape (positions - 1, A, K): the last of the sample's ids has no route.
    Of another number of positions the rest is left out, or NOT_RECORDED.

    Raises:
        ValueError: the text is not base64 of numbers that fill such positions.
    """
    experts = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32)
    return _moe_layers_of(experts.reshape(-1, model.num_layers, model.top_k), positions, model)


def route_mismatch(one: Routes, other: Routes) -> float:
    """Return the fraction of the choices in `one` that `other` did not make for the same token and layer.

    Places in the top-k do not matter. Counted are tokens and layers for which both have choices; 0 if there are none.
    """
    mine, theirs = one.experts_NSLK, other.experts_NSLK
    recorded = (mine >= 0).all(-1, keepdim=True) & (theirs >= 0).all(-1, keepdim=True)
    missing = ~(mine.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1)
    return float((missing & recorded).sum() / recorded.expand_as(missing).sum().clamp(min=1))
