"""Enumeration of legal mappings, the ones nearest to an illegal one, and mappings after a change of the world size.

The two views of a stage have only its ranks in common. So the legal mappings of a world are, for each pp, every legal
attention view with every legal expert view.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, lcm, log2
from operator import itemgetter

from titanmoe.config.ranges import divisors
from titanmoe.config.schema import Config, Parallelism
from titanmoe.fold.degrees import (
    DEGREE_PATHS,
    DERIVED,
    Fold,
    FoldError,
    default_edp_replicate,
    requested_degrees,
    resolve_degrees,
    with_degrees,
)
from titanmoe.fold.legality import broken_laws


@dataclass(frozen=True)
class StageViews:
    """The legal views for one degree of pp. Any attention view can be combined with any expert view.

    A view is a dict of degrees by name.
    """

    world: int
    pp: int
    attention: list[dict[str, int]]
    """Degrees dp_replicate, dp_shard, cp and tp."""
    experts: list[dict[str, int]]
    """Degrees edp_replicate, edp, ep and etp."""

    def fold(self, attention: dict[str, int], experts: dict[str, int]) -> Fold:
        """Return the mapping that combines an attention view and an expert view."""
        return Fold(world=self.world, pp=self.pp, **attention, **experts)

    def pairs(self) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
        """Return an iterator over all pairs of an attention view and an expert view."""
        return product(self.attention, self.experts)


def legal_stages(world: int, config: Config | None = None) -> Iterator[StageViews]:
    """Yield the legal views for each legal degree of pp, ascending. A list of views may be empty.

    Args:
        config: with it, views have to obey all its laws, whatever its own degrees; without, they only have to divide
            the ranks.
    """

    def legal(pp: int, view: dict[str, int]) -> bool:
        degrees = {"pp": pp, "stage": world // pp, **view}
        return config is None or next(broken_laws(degrees, config), None) is None

    for pp in divisors(world):
        if not legal(pp, {}):
            continue
        splits = list(_four_factors(world // pp))
        attention = [dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), split, strict=True)) for split in splits]
        experts = [dict(zip(("edp_replicate", "edp", "ep", "etp"), split, strict=True)) for split in splits]
        yield StageViews(
            world,
            pp,
            [view for view in attention if legal(pp, view | {"dp": view["dp_replicate"] * view["dp_shard"]})],
            [view for view in experts if legal(pp, view)],
        )


def nearest(world: int, parallelism: Parallelism, config: Config | None = None, count: int = 3) -> list[Fold]:
    """Return the legal mappings that change the fewest requested degrees, and change them the least; best first.

    [] if no mapping is legal; the requested one alone if that is.

    A changed degree costs 1 plus the powers of two between old and new. Derived degrees are free, except an
    edp_replicate that is not its default: it has to be written down. A mapping whose changes include all changes of a
    better one is left out.

    Args:
        config: with it, mappings have to obey all its laws; without, they only have to divide the ranks.
        count: the largest number of mappings to return.
    """
    requested, pool = requested_degrees(parallelism), 10 * count

    def cost(name: str, value: int) -> float:
        if value == requested[name] or (requested[name] == -1 and name in DERIVED):
            return 0.0
        return 1 + abs(log2(value / max(1, requested[name])))

    def priced(views: list[dict[str, int]]) -> list[tuple[float, dict[str, int]]]:
        sums = ((sum(cost(name, value) for name, value in view.items()), view) for view in views)
        return sorted(sums, key=itemgetter(0))

    best: list[tuple[float, Fold]] = []
    for stage in legal_stages(world, config):
        experts = priced(stage.experts)
        for attention_cost, attention in priced(stage.attention):
            for experts_cost, expert in experts:
                price = cost("pp", stage.pp) + attention_cost + experts_cost
                if len(best) == pool and price >= best[-1][0]:
                    break  # experts come cheapest first
                default = default_edp_replicate(attention["dp_replicate"], expert["edp_replicate"] * expert["edp"])
                if requested["edp_replicate"] == -1 and expert["edp_replicate"] != default:
                    price += 1 + abs(log2(expert["edp_replicate"] / default))
                insort(best, (price, stage.fold(attention, expert)), key=itemgetter(0))
                del best[pool:]
    minimal: list[Fold] = []
    for _, fold in best:
        change = changes(parallelism, fold).items()
        if not any(changes(parallelism, other).items() <= change for other in minimal):
            minimal.append(fold)
    return minimal[:count]


def changes(parallelism: Parallelism, fold: Fold) -> dict[str, tuple[int, int]]:
    """Return the degrees in which a mapping differs from the requested ones: {name: (requested, in the mapping)}.

    Requested degrees of -1 are left out, except edp_replicate if it is not its default.
    """
    names = {
        name: (old, getattr(fold, name))
        for name, old in requested_degrees(parallelism).items()
        if old != getattr(fold, name) and not (old == -1 and name in DERIVED)
    }
    default = default_edp_replicate(fold.dp_replicate, fold.edp_replicate * fold.edp)
    if parallelism.experts.edp_replicate == -1 and fold.edp_replicate != default:
        names["edp_replicate"] = (-1, fold.edp_replicate)
    return names


def _four_factors(n: int) -> Iterator[tuple[int, int, int, int]]:
    for a in divisors(n):
        for b in divisors(n // a):
            for c in divisors(n // a // b):
                yield a, b, c, n // a // b // c


# ---- the mapping of a run that was restarted on another number of ranks


FIXED = ("pp", "cp", "tp", "ep", "etp")
"""Degrees that a restart on another number of ranks does not change."""


def refit(world: int, parallelism: Parallelism) -> tuple[Parallelism, str]:
    """Adapt the degrees of a recipe to another number of ranks, for a run that is restarted on it.

    Only data parallelism adapts, because only that leaves what a rank computes unchanged: dp_shard first, then
    dp_replicate; for the experts edp, then edp_replicate. The table is returned unchanged if its degrees fit, or if one
    is illegal in any world, such as 0. The result depends on the recipe and the world alone, so a world that shrinks
    and grows again returns to its first mapping.

    Returns:
        The adapted [parallelism], and a line for the log that says what changed; "" if nothing did.

    Raises:
        FoldError: if the degrees that stay do not divide the world. Other laws are not checked.
    """
    degrees = requested_degrees(parallelism)
    sound = all(n > 0 or (n == -1 and name in DERIVED) for name, n in degrees.items())
    if not sound or not resolve_degrees(world, parallelism)[1]:
        return parallelism, ""
    pp, cp, tp, ep, etp = (degrees[name] for name in FIXED)
    unit = pp * lcm(cp * tp, ep * etp)
    if world % unit:
        fixed = ", ".join(f"{DEGREE_PATHS[name]} = {degrees[name]}" for name in FIXED if degrees[name] > 1)
        raise FoldError(
            [
                f"restarted on {world} ranks, where only data parallel may change; {fixed} needs a multiple of "
                f"{unit} ranks ({world} % {unit} = {world % unit}): start it on such a number, or give other degrees"
            ]
        )
    data_ranks, expert_data_ranks = world // (pp * cp * tp), world // (pp * ep * etp)
    fit = {"dp_replicate": gcd(parallelism.dp_replicate, data_ranks)}
    fit["dp_shard"] = data_ranks // fit["dp_replicate"]
    requested_replicas = degrees["edp_replicate"] if degrees["edp_replicate"] > 0 else fit["dp_replicate"]
    fit["edp_replicate"] = gcd(requested_replicas, expert_data_ranks)
    fit["edp"] = expert_data_ranks // fit["edp_replicate"]
    changed = {name: n for name, n in fit.items() if degrees[name] not in (-1, n)}
    changes_text = ", ".join(f"{DEGREE_PATHS[name]} {degrees[name]} -> {n}" for name, n in changed.items())
    text = f"restarted on {world} rank{'s' * (world > 1)}: {changes_text}; the global batch stays"
    return with_degrees(parallelism, changed), text
