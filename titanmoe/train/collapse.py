"""Experts that die, and routing that collapses onto a few: reported once, when it has lasted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.balance_losses.rules import switched_on

STEPS = 50
"""How many steps in a row it takes: one bad batch does not count."""
AT_ONCE = 10
"""How many in a row if the imbalance is the greatest possible, to within 1 %."""
DYING = 0.01
"""An expert is dying below this fraction of the mean load."""
HELP = "moe.bias_update_rate = 0.001 or moe.aux_loss = 0.01 balances them, moe.z_loss keeps router logits small"


def unbalanced(model: Model, moe: MoE) -> str:
    """The header's line for a run that nothing keeps in balance."""
    balanced = moe.bias_update_rate or any(term.rules.evens_loads for term in switched_on(moe))
    a_choice = moe_blocks(model) and model.num_experts > model.top_k
    if not a_choice or moe.force_balance or balanced:
        return ""
    return "none: nothing keeps the experts evenly busy, and some may die; " + HELP.partition(",")[0]


class Collapse:
    def __init__(self, num_experts: int, top_k: int):
        self.greatest = num_experts / top_k
        """The greatest imbalance possible, when all tokens choose the same experts."""
        self.limit = max(2.0, self.greatest / 2)
        self._dying: dict[int, Counter[int]] = {}
        self._uneven: Counter[int] = Counter()
        self._collapsed: Counter[int] = Counter()

    def check(self, loads: dict[int, list[float]]) -> Iterator[str]:
        """Texts of events. loads: tokens of every expert in this step, by layer."""
        for layer, load in loads.items():
            mean = sum(load) / len(load)
            before, now = self._dying.get(layer, Counter()), Counter()
            for expert, tokens in enumerate(load):
                if tokens < DYING * mean:
                    now[expert] = before[expert] + 1
            self._dying[layer] = now
            if dead := [expert for expert, steps in now.items() if steps == STEPS]:
                many = "experts" if len(dead) > 1 else "expert"
                names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
                yield f"layer {layer}: {many} {names} got under {DYING:.0%} of the mean load for {STEPS} steps; {HELP}"
            collapsed = 0 < 0.99 * self.greatest * mean <= max(load) and self.greatest > 1
            self._collapsed[layer] = self._collapsed[layer] + 1 if collapsed else 0
            if self._collapsed[layer] == AT_ONCE:
                yield (
                    f"layer {layer}: all tokens have chosen the same expert for {AT_ONCE} steps, {self.greatest:.1f} "
                    "times the mean load, which is the greatest possible: the routing has collapsed. Lower "
                    f"optimizer.lr and begin again, or from a checkpoint of before; {HELP}"
                )
            uneven = mean > 0 and max(load) > self.limit * mean
            self._uneven[layer] = self._uneven[layer] + 1 if uneven else 0
            if self._uneven[layer] == STEPS and not collapsed:
                ratio = max(load) / mean
                yield (
                    f"layer {layer}: the busiest expert had over {self.limit:g} times the mean load for {STEPS} steps, "
                    f"now {ratio:.1f} times; {HELP}"
                )
