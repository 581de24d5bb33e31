"""The router's score functions: how logits become scores, and the chosen experts' scores become routing weights.

A new one is a subclass of `ScoreFunction` and an entry in SCORE_FUNCTIONS. Outside the package it is an instance, which
a recipe names "module:NAME". The formulas only call methods of tensors, so that a recipe is checked without torch.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titanmoe.config.blocks import moe_layers
from titanmoe.config.component_kinds import ComponentKind, Spec
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, Model

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "model.score_function"


class ScoreFunction(Spec):
    """The formulas of a router's score function, and its spec. One needs `help` and `scores`; the rest are defaults."""

    kernel_mode = ""
    """The key of titanmoe.ops.kernels.route.SCORE_KERNELS whose kernel computes it; "" if only the plain formulas do.

    A subclass with formulas of its own does not inherit it."""
    scores_sum_to_one = False
    """Whether a token's scores add up to 1 by themselves. Balance losses and the entropy normalise them if not."""
    weights_sum_to_one = False
    """Whether a token's routing weights add up to 1 without norm_topk."""
    scores_per_group = 1
    """The number of a group's best scores whose sum rates it, where experts are chosen by groups."""
    equivalent: dict[str, Any] = {}
    """Fields of [model] with which another score function gives the same routing weights, by name."""

    def __init_subclass__(cls) -> None:
        """Clear `kernel_mode` of a subclass with formulas of its own that does not set it."""
        if {"scores", "weights"} & vars(cls).keys() and "kernel_mode" not in vars(cls):
            cls.kernel_mode = ""

    @abstractmethod
    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores (T, E) by which each token ranks the experts."""
        raise NotImplementedError

    def weights(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return the routing weights (T, K) of the chosen experts, before norm_topk and route_scale are applied.

        By default they are the chosen scores. `scores_TE` is what `scores` returned for the logits.
        """
        return scores_TE.gather(1, chosen_TK)

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a violation if every routing weight is 1 under this recipe: the router would have no gradient."""
        model = config.model
        if not moe_layers(model) or model.top_k > 1 or not (model.norm_topk or self.weights_sum_to_one):
            return
        culprit, fix = "norm_topk = true", "norm_topk = false"
        if self.weights_sum_to_one:
            culprit = f'score_function = "{model.score_function}"'
            fix = 'score_function = "softmax" with norm_topk = false'
        yield Violation(
            ("model.top_k", "model.norm_topk", FIELD),
            f"model.top_k = 1 with {culprit} makes every routing weight 1, so that the router has no gradient: "
            f"set {fix}, or top_k to 2 or more",
        )


class Softmax(ScoreFunction):
    """The softmax over all experts."""

    help = "softmax takes the softmax over all experts, before the choice."
    kernel_mode = "softmax"
    scores_sum_to_one = True

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)


class SoftmaxAfterTopK(Softmax):
    """The softmax over the chosen experts (gpt-oss)."""

    help = "softmax_after_topk takes it over the chosen experts only."
    kernel_mode = "softmax_after_topk"
    weights_sum_to_one = True
    # The softmax over the chosen is the softmax over all, scaled to sum to one.
    equivalent = {"score_function": "softmax", "norm_topk": True}

    def weights(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        return logits_TE.gather(1, chosen_TK).softmax(-1)


class Sigmoid(ScoreFunction):
    """The sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437)."""

    help = "sigmoid scores each expert by itself (DeepSeek-V3)."
    kernel_mode = "sigmoid"
    scores_per_group = 2

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()


SCORE_FUNCTIONS = ComponentKind(
    FIELD,
    {
        "softmax": Softmax(),
        "softmax_after_topk": SoftmaxAfterTopK(),
        "sigmoid": Sigmoid(),
    },
    ScoreFunction,
)


def score_function_of(model: Model) -> ScoreFunction:
    """Return the score function that `model.score_function` names: a key of SCORE_FUNCTIONS, or "module:NAME".

    Raises:
        ComponentError: if it is unknown, or the module cannot be imported.
    """
    return SCORE_FUNCTIONS.look_up(model.score_function)
