"""Degrees: the number of ranks on each axis of both views. `derive` makes a Fold from a recipe and a world size.

    world = pp * S        S = dp_replicate * dp_shard * cp * tp        the attention view of a stage's S ranks
                          S = edp_replicate * edp * ep * etp           the expert view of the same ranks

pp is outermost and tp, etp innermost, so both views have the same stages. Nothing else ties the views to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from operator import attrgetter

from titanmoe.config.fields import with_values
from titanmoe.config.ranges import choices_text, divisors
from titanmoe.config.schema import Parallelism

DEGREE_PATHS = {
    "pp": "parallelism.pp",
    "dp_replicate": "parallelism.dp_replicate",
    "dp_shard": "parallelism.dp_shard",
    "cp": "parallelism.cp",
    "tp": "parallelism.tp",
    "edp_replicate": "parallelism.experts.edp_replicate",
    "edp": "parallelism.experts.edp",
    "ep": "parallelism.experts.ep",
    "etp": "parallelism.experts.etp",
}
"""Path of each degree's field, by its short name."""
DERIVED = ("dp_shard", "edp_replicate", "edp")
"""Degrees that may be -1, which stands for the value that fits."""


class FoldError(ValueError):
    """The error for degrees that do not fit the world size, with every reason in `problems`."""

    def __init__(self, problems: list[str]):
        super().__init__(problems)  # pickle makes the exception from these arguments
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The degrees of a legal mapping: every axis of the attention view and of the expert view."""

    world: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    edp_replicate: int = 1
    edp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def stage(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def dp(self) -> int:
        """The number of data ranks: groups of ranks (tp, cp, pp) that work on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def attention_axes(self) -> dict[str, int]:
        """The number of ranks on every axis of the attention view by name, from pp, the outermost, to tp."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The number of ranks on every axis of the expert view by name, from pp, the outermost, to etp."""
        return {name: getattr(self, name) for name in ("pp", "edp_replicate", "edp", "ep", "etp")}


def nodes_of_a_group(world: int, ep: int, etp: int, node: int) -> int | None:
    """Return the number of nodes that each dispatch group (ep x etp) spans.

    None if groups do not span nodes evenly, or would split the etp ranks of an expert over two nodes. The ranks of a
    group are consecutive, and the first is a multiple of the group's size.

    Args:
        node: the number of ranks of a node.
    """
    size = ep * etp
    if node >= world or node % size == 0:
        return 1
    return size // node if size % node == 0 and node % etp == 0 else None


def requested_degrees(parallelism: Parallelism) -> dict[str, int]:
    """Return the degrees that the recipe's [parallelism] sets, by short name such as "ep"; -1 for one to be derived."""
    return {name: attrgetter(_below_parallelism(name))(parallelism) for name in DEGREE_PATHS}


def with_degrees(parallelism: Parallelism, degrees: Mapping[str, int]) -> Parallelism:
    """Return a [parallelism] table with some degrees, by short name such as "ep", replaced. They may be illegal."""
    return with_values(parallelism, {_below_parallelism(name): n for name, n in degrees.items()})


def _below_parallelism(name: str) -> str:
    return DEGREE_PATHS[name].removeprefix("parallelism.")


def default_edp_replicate(dp_replicate: int, expert_data_ranks: int) -> int:
    """Return the edp_replicate that -1 stands for: gcd(dp_replicate, number of data ranks of the experts)."""
    return gcd(dp_replicate, expert_data_ranks)


def derive(world: int, parallelism: Parallelism) -> Fold:
    """Compute the degrees of all axes from a [parallelism] table and the number of ranks, `world`.

    dp_shard, edp_replicate and edp may be -1, which stands for what fits. With stage = world / pp,
    dp_shard = stage / (dp_replicate * cp * tp), and edp = stage / (edp_replicate * ep * etp).
    The laws of model and batch are not checked.

    Raises:
        FoldError: with every reason, if the degrees do not fit.
    """
    degrees, problems = resolve_degrees(world, parallelism)
    if problems:
        raise FoldError(problems)
    return Fold(world=world, **{name: degrees[name] for name in DEGREE_PATHS})


def resolve_degrees(world: int, parallelism: Parallelism) -> tuple[dict[str, int], list[str]]:
    """Fill in the degrees that are -1, and check that all divide the world.

    A dp_shard or edp that is given has to be what the other degrees of its view leave of the stage.

    Returns:
        The degrees that fit by short name, with "stage", the ranks of a pipeline stage, and "dp", the data ranks; and a
        message for each degree that does not fit.
    """
    requested = requested_degrees(parallelism)
    degrees = {name: n for name, n in requested.items() if n > 0}
    problems = [_not_a_count(name, n) for name, n in requested.items() if n < 1 and not (n == -1 and name in DERIVED)]
    requested_rest = {name: degrees.pop(name, None) for name in ("dp_shard", "edp")}
    if world < 1:
        problems.append(f"the world has {world} ranks: use 1 or more")
    if world < 1 or "pp" not in degrees:
        return degrees, problems
    pp = degrees["pp"]
    if world % pp:
        fix = choices_text("pp", divisors(world), pp)
        division = f"{world} % {pp} = {world % pp}"
        problems.append(f"parallelism.pp = {pp} does not divide the world of {world} ranks ({division}): use {fix}")
        return degrees, problems

    stage = degrees["stage"] = world // pp
    stage_text = f"the stage of {stage} ranks (world {world} / pp {pp})"
    if requested["edp_replicate"] == -1 and {"dp_replicate", "ep", "etp"} <= degrees.keys():
        left, remainder = divmod(stage, degrees["ep"] * degrees["etp"])
        if not remainder:
            degrees["edp_replicate"] = default_edp_replicate(degrees["dp_replicate"], left)
    for name, others in ("dp_shard", ("dp_replicate", "cp", "tp")), ("edp", ("edp_replicate", "ep", "etp")):
        divisor_degrees = {other: degrees[other] for other in others if other in degrees}
        rest, remainder = divmod(stage, prod(divisor_degrees.values()))
        if remainder:
            problems.append(_does_not_divide(divisor_degrees, stage, stage_text))
        elif len(divisor_degrees) == len(others):
            requested_value = requested_rest[name]
            if requested_value is None or requested_value == rest:
                degrees[name] = rest
            else:
                leave = " * ".join(f"{other} {n}" for other, n in divisor_degrees.items())
                problems.append(
                    f"{DEGREE_PATHS[name]} = {requested_value} is not what {leave} leaves of {stage_text}: use {rest}, "
                    "or -1 to derive it"
                )
    if "dp_shard" in degrees:
        degrees["dp"] = degrees["dp_replicate"] * degrees["dp_shard"]
    return degrees, problems


def _does_not_divide(degrees: dict[str, int], stage: int, stage_text: str) -> str:
    large = {name: n for name, n in degrees.items() if n > 1}
    product = prod(large.values())
    written = " * ".join(DEGREE_PATHS[name] for name in large)
    if len(large) > 1:
        written += " = " + " * ".join(str(n) for n in large.values())
    fixes = [
        choices_text(name, divisors(stage * n // product), n) for name, n in large.items() if stage * n % product == 0
    ]
    fix = " or ".join(fixes or [choices_text("a product", divisors(stage), product)])
    return f"{written} = {product} does not divide {stage_text}, {stage} % {product} = {stage % product}: use {fix}"


def _not_a_count(name: str, value: int) -> str:
    return f"{DEGREE_PATHS[name]} = {value} is not a number of ranks: use 1 or more" + (
        ", or -1 to derive it" if name in DERIVED else ""
    )


def sequence_chunks(cp: int, placement: str) -> int:
    """Return the number of chunks into which context parallelism splits a sequence; 0 if cp = 1.

    Args:
        placement: parallelism.cp_placement: "zigzag" (2 chunks a rank) or "contiguous" (1).
    """
    return 0 if cp == 1 else 2 * cp if placement == "zigzag" else cp
