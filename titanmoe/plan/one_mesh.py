"""The price of experts on attention's own mesh, as without folding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from titanmoe.plan.cost import Cost
from titanmoe.plan.links import Links
from titanmoe.plan.price import Pricer


class OneMesh(Pricer):
    """The mesh is dp x cp x tp: the ranks of a group of ep are cp x tp apart, so that a node has fewer of them."""

    def _experts(self, share: int, samples: int, tp: int, *mapping: Any) -> tuple[Cost, Cost]:
        whole = self.device, self.links
        self.device = replace(self.device, domain=max(tp, self.device.domain * tp // share))
        self.links = Links(self.device, self.factors)
        try:
            return super()._experts(share, samples, tp, *mapping)
        finally:
            self.device, self.links = whole
