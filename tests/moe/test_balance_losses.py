"""Which balance losses a recipe switches on, what is refused, and that one of one's own is like the package's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.moe import test_balance as four
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config, Model, MoE
from titanmoe.moe.balance import Balance
from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, RouterOutput
from titanmoe.moe.balance_losses.balance_spec import BALANCE_LOSSES, RESERVED_METRICS, BalanceSpec, active_losses
from titanmoe.moe.layer_statistics import RowLayout
from titanmoe.train.alarms import warn_of_no_balancing


class EvenSpec(BalanceSpec):
    metric = "unevenness"


class Even(BalanceLoss):
    """aux_loss_sequence again, from the same counts and shares."""

    spec = EvenSpec()

    def forward(self, routed: RouterOutput) -> Tensor:
        choices_BE = routed.choice_counts()
        f_BE = choices_BE * self.model.num_experts / choices_BE.sum(1, keepdim=True).clamp(min=1)
        tokens_B1 = choices_BE.sum(1, keepdim=True).clamp(min=1) / self.model.top_k
        return (f_BE * routed.score_sums() / tokens_B1).sum() / routed.step_samples


class LogitSpec(BalanceSpec):
    evens_loads = False
    metric = "unevenness"


class Logits(BalanceLoss):
    spec = LogitSpec()

    def forward(self, routed: RouterOutput) -> Tensor:
        return routed.logits_TE.square().sum() / routed.step_tokens


ROOT = Path(__file__).parents[2]
EVEN, LOGITS = f"{__name__}:Even", f"{__name__}:Logits"


def test_one_from_outside_equals_that_of_the_package_and_is_reported_by_its_metric() -> None:
    logits_TE, found = four.random(2 * four.L, four.E), []
    for options in (MoE(aux_loss_sequence=0.25), MoE(balance_losses=[f"{EVEN} 0.25"])):
        one = Balance(Model(num_experts=four.E, top_k=four.K), options, 1)
        one.begin_step(torch.tensor(2.0 * four.L), 2)
        logits_TE.requires_grad_()
        weights_TK = four.forward(one, logits_TE, logits_TE.detach().topk(four.K).indices, four.tokens(2, 0))
        (grad,) = torch.autograd.grad(weights_TK.sum(), logits_TE)
        found.append((grad, one.counts.counts_MX))
        (name,) = one.counts.layout.losses
    assert name == "unevenness"
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_terms_that_are_on() -> None:
    terms = active_losses(MoE(z_loss=0.5, aux_loss=0.1, balance_losses=[f"{EVEN} 1e-3", f"{LOGITS} 0"]))
    assert [(term.metric, term.coefficient) for term in terms] == [
        ("aux_loss", 0.1),
        ("z_loss", 0.5),
        ("unevenness", 1e-3),
    ]


def test_what_names_them_asks_their_specs() -> None:
    config = Config(model=Model(num_experts=8, top_k=2), moe=MoE(balance_losses=[f"{LOGITS} 0.1"]))
    assert warn_of_no_balancing(config.model, config.moe)
    assert not warn_of_no_balancing(config.model, MoE(balance_losses=[f"{EVEN} 0.1"]))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["router_variance"], 'write "router_variance" as a name and a coefficient, such as "router_variance 0.01"'),
        (["a 0.1 0.2"], 'write "a 0.1 0.2" as a name and a coefficient, such as "a 0.01"'),
        (["nothing_known 0.1"], 'moe.balance_losses = "nothing_known" is not one of aux_loss_sequence, aux_loss, '),
        ([f"{EVEN} -0.1"], f"the coefficient of {EVEN} is -0.1: it must be at least 0"),
        ([f"{EVEN} nan"], f"the coefficient of {EVEN} is nan: it must be at least 0"),
        (["z_loss 0.1"], "z_loss has a key of its own: write moe.z_loss = 0.1"),
        ([f"{EVEN} 0.1", f"{EVEN} 0.2"], f"{EVEN} is listed twice: remove one"),
        ([f"{EVEN} 0.1", f"{LOGITS} 0.2"], f"{EVEN} and {LOGITS} are both reported as unevenness: use one"),
        ([f"{__name__}:NoForward 0.1"], f'"{__name__}:NoForward" cannot be used: {__name__}:NoForward lacks forward'),
        ([f"{__name__}:Model 0.1"], f"{__name__}:Model has no `spec`, an instance of BalanceSpec"),
    ],
)
def test_what_is_refused(lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(["--moe.balance_losses", *lines, "--training.steps", "0"], COMPONENTS, lambda config: [])
    problems = "\n".join(refused.value.problems)
    assert says in problems and "training.steps = 0" in problems, "all that is wrong is said at once"
    if len(lines) == 1:
        assert len(refused.value.problems) == 2


class LossSpec(BalanceSpec):
    metric = "loss"


class Loss(Even):
    spec = LossSpec()


class Layer(Even):
    spec = type("LayerSpec", (BalanceSpec,), {"metric": "layers.1.z_loss"})()


class NoForward(BalanceLoss):
    spec = EvenSpec()


@pytest.mark.parametrize(("name", "metric"), [("Loss", "loss"), ("Layer", "layers.1.z_loss")])
def test_one_cannot_overwrite_another_number_of_the_report(name: str, metric: str) -> None:
    with pytest.raises(ConfigError, match=f"{__name__}:{name} would be reported as {metric}, a name that other"):
        load(["--moe.balance_losses", f"{__name__}:{name} 0.1"], COMPONENTS, lambda config: [])


def test_every_metric_of_the_page_is_a_name_that_is_taken() -> None:
    table = (ROOT / "docs/watching.md").read_text().partition("| key |")[2].partition("\n\n")[0]
    names = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert len(names) > 20 and names - set(BALANCE_LOSSES.table) <= RESERVED_METRICS
    layout = RowLayout.of(2, MoE())
    assert {*layout.counts, *layout.read([1.0] * layout.width).metrics()} <= RESERVED_METRICS


def test_all_that_is_wrong_in_the_list_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load(["--moe.balance_losses", "one", "z_loss 0.1"], COMPONENTS, lambda config: [])
    (problem,) = refused.value.problems
    assert '"one 0.01"' in problem and "moe.z_loss = 0.1" in problem
