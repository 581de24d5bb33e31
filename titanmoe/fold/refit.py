"""The mapping of a run that was restarted on another number of ranks.

Only data parallelism adapts, because only that leaves what a rank computes unchanged: dp_shard first, then
dp_replicate; for the experts edp, then edp_replicate. pp, cp, tp, ep and etp stay as in the recipe, and so does the
global batch. The result depends on the recipe and the world alone, so a world that shrinks and grows again is back
where it began.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm

from titanmoe.config.schema import Parallelism
from titanmoe.fold.degrees import DERIVED, KEYS, FoldError, requested_degrees, resolve

FIXED = ("pp", "cp", "tp", "ep", "etp")


def refit(world: int, parallelism: Parallelism) -> tuple[Parallelism, str]:
    """The mapping for this world and one line that says what changed, "" if nothing had to; FoldError if none is legal.

    Degrees that are not numbers of ranks are left for the laws to refuse.
    """
    degrees = requested_degrees(parallelism)
    sound = all(n > 0 or (n == -1 and name in DERIVED) for name, n in degrees.items())
    if not sound or not resolve(world, parallelism)[1]:
        return parallelism, ""
    pp, cp, tp, ep, etp = (degrees[name] for name in FIXED)
    unit = pp * lcm(cp * tp, ep * etp)
    if world % unit:
        fixed = ", ".join(f"{KEYS[name]} = {degrees[name]}" for name in FIXED if degrees[name] > 1)
        raise FoldError(
            [
                f"started again on {world} ranks, where only data parallel may change; {fixed} needs a multiple of "
                f"{unit} ranks ({world} % {unit} = {world % unit}): start it on such a number, or give other degrees"
            ]
        )
    rows, expert_rows = world // (pp * cp * tp), world // (pp * ep * etp)
    fit = {"dp_replicate": gcd(parallelism.dp_replicate, rows)}
    fit["dp_shard"] = rows // fit["dp_replicate"]
    requested_replicas = degrees["edp_replicate"] if degrees["edp_replicate"] > 0 else fit["dp_replicate"]
    fit["edp_replicate"] = gcd(requested_replicas, expert_rows)
    fit["edp"] = expert_rows // fit["edp_replicate"]
    changed = {name: n for name, n in fit.items() if degrees[name] not in (-1, n)}
    experts = replace(parallelism.experts, **{name: n for name, n in changed.items() if name.startswith("edp")})
    attention = {name: n for name, n in changed.items() if name.startswith("dp")}
    changes_text = ", ".join(f"{KEYS[name]} {degrees[name]} -> {n}" for name, n in changed.items())
    fitted = replace(parallelism, **attention, experts=experts)
    return fitted, f"started again on {world} rank{'s' * (world > 1)}: {changes_text}; the global batch stays"
