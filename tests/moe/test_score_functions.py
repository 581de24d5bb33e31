"""Score functions come from one table: an unknown one is refused, and a new one is one entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.moe import test_balance as balance
from tests.moe.test_router import route, tokens
from titanmoe.checkpoint.hf.config_json import violations_of
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.component_kinds import ComponentError
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.balance import Balance
from titanmoe.moe.router import Router
from titanmoe.moe.score_functions import SCORE_FUNCTIONS, ScoreFunction, Sigmoid
from titanmoe.ops.kernels.route import SCORE_KERNELS


class SquareRoot(ScoreFunction):
    """sqrt(softplus(logit)), which no kernel computes and which does not sum to 1 over the experts."""

    help = "square_root grows with the root of a logit."
    scores_sum_to_one = False

    def scores(self, logits_TE: Tensor) -> Tensor:
        return torch.nn.functional.softplus(logits_TE).sqrt()


SQUARE_ROOT = SquareRoot()
OUTSIDE = f"{__name__}:SQUARE_ROOT"


@pytest.fixture(params=["square_root", OUTSIDE])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != OUTSIDE:
        monkeypatch.setitem(SCORE_FUNCTIONS.table, request.param, SQUARE_ROOT)
    return request.param


def test_a_new_one_is_an_entry(name: str) -> None:
    logits_TE = torch.tensor([[4.0, -1, 2, 1], [0, 3, 0, 1]], dtype=torch.float64)
    _, scores_TE, weights_TK, chosen_TK, _ = route(logits_TE, score_function=name, norm_topk=False)
    assert torch.equal(scores_TE, SQUARE_ROOT.scores(logits_TE))
    assert chosen_TK.tolist() == [[0, 2], [1, 3]]
    assert torch.equal(weights_TK, scores_TE.gather(1, chosen_TK))


def test_its_scores_are_normalised_for_the_balance_losses(name: str) -> None:
    one = Balance(Model(num_experts=4, top_k=2, score_function=name), MoE(aux_loss=1.0), 1)
    one.begin_step(torch.tensor(4.0), 1)
    scores_TE = SQUARE_ROOT.scores(balance.random(4, 4))
    chosen_TK = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    count_BE = torch.full((1, 4), 2)
    one(scores_TE.gather(1, chosen_TK), scores_TE, scores_TE, count_BE, tokens(4))
    # With even choices the term is the mean over tokens of the sum of their normalised scores.
    assert balance.counted(one).losses == {"aux_loss": pytest.approx(1.0, rel=1e-12)}


def test_an_unknown_one_is_an_error() -> None:
    for make in (Router, Balance):
        with pytest.raises(ComponentError, match=r'"softmx" is not one of softmax, .* did you mean softmax'):
            model = Model(score_function="softmx")
            make(model, MoE(), 0, 0, torch.float32) if make is Router else make(model, MoE(), 1)
    with pytest.raises(ConfigError, match='score_function = "softmx" is not one of'):
        load(["--model.score_function", "softmx"], COMPONENTS, lambda config: [])


def test_a_recipe_with_one_weight_of_1_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="norm_topk = true makes every routing weight 1"):
        load(["--model.score_function", name, "--model.top_k", "1"], COMPONENTS, lambda config: [])
    words = ["--model.score_function", name, "--model.top_k", "1", "--model.norm_topk", "false"]
    assert load(words, COMPONENTS, lambda config: []).model.score_function == name


def test_a_published_model_with_one_weight_of_1_is_refused() -> None:
    (violation,) = violations_of(Model(top_k=1))
    assert "norm_topk = true makes every routing weight 1" in violation.text
    assert violations_of(Model(top_k=1, norm_topk=False)) == []


def test_the_kernel_has_the_formulas_of_the_package() -> None:
    modes = {name: spec.kernel_mode for name, spec in SCORE_FUNCTIONS.table.items() if spec.kernel_mode}
    assert modes == {name: name for name in SCORE_KERNELS}


def test_a_subclass_with_formulas_of_its_own_does_not_inherit_the_kernel() -> None:
    class Steeper(Sigmoid):
        def scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
            return (2 * logits_TE).sigmoid()

    class Renamed(Sigmoid):
        help = "another text"

    assert Steeper.kernel_mode == "" and Renamed.kernel_mode == "sigmoid"
