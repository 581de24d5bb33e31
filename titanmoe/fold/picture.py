"""The picture of `titanmoe fold`: a stage's ranks side by side and, under each, its place on the axes of both views.

A column shows what one rank does, a row which ranks do the same. `list_mappings` prints all legal mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, zip_longest
from typing import NamedTuple

from rich.text import Text

from titanmoe.config.ranges import divisors
from titanmoe.config.schema import Model
from titanmoe.fold.degrees import Fold
from titanmoe.fold.legal_mappings import StageViews
from titanmoe.fold.rank_groups import View, coordinates, crossing, group_of, iter_groups

WIDTH = 100
CELL = 8  # columns of a rank, at least
GAP = 2  # columns between nodes
STRIPS = 4  # up to this many lines of ranks are all drawn; of more, a few
FEW = 2
FILLS = [
    f"black on {color}"
    for color in ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#e9d8a6", "#7fa99b", "#d4a373")
]
CROSSING = {"none": "inside a node", "some": "some cross", "all": "all cross"}
CRITICAL = ("tp", "etp")  # every layer waits for their traffic several times: between nodes it is the bottleneck


class Row(NamedTuple):
    """A row of the picture: one axis of the attention view or of the expert view."""

    view: View
    axis: str
    label: str
    """Prefix of a rank's coordinate in the picture, such as "dp" in "dp3"."""
    meaning: str
    """Description of what ranks with the same coordinate on the axis have in common."""
    traffic: str
    """Messages within a group of the axis, in words."""


ROWS = (
    Row("attention", "dp_replicate", "copy", "replica of state", "gradients, once a step"),
    Row("attention", "dp_shard", "dp", "samples", "weights and gradients"),
    Row("attention", "cp", "cp", "chunk of sequence", "keys and values, every layer"),
    Row("attention", "tp", "tp", "slice of matrices", "activations, every layer"),
    Row("experts", "edp_replicate", "copy", "replica of state", "expert gradients, once a step"),
    Row("experts", "edp", "edp", "set of experts", "expert weights and gradients"),
    Row("experts", "ep", "ep", "experts held", "routed tokens, every MoE layer"),
    Row("experts", "etp", "etp", "slice of experts", "routed tokens, partial sums"),
)
PIPELINE = Row("attention", "pp", "pp", "layers", "activations, every microbatch")


def draw(fold: Fold, node: int = 8, model: Model | None = None) -> Text:
    """Return the picture of a mapping's attention view and expert view, at most 100 columns wide.

    Of many ranks or stages only the first are drawn, with a line that counts the others.

    Args:
        node: number of ranks of a node.
        model: with it, the title names the model, and the numbers of each rank's experts are shown.
    """
    rows = [row for row in ROWS if getattr(fold, row.axis) > 1]
    lines = [*_title(fold, node, model), *_stages(fold, node, model, rows)]
    lines += _table(fold, node, [PIPELINE, *rows] if fold.pp > 1 else rows)
    lines += _folding(fold)
    return Text("\n").join(lines)


def span(numbers: Sequence[int]) -> str:
    """Shorten ascending ranks to a text: consecutive ones to 0-7, up to four to 0,8,16,24, more to 0,8,..,120."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) <= 4:
        return ",".join(map(str, numbers))
    return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"


def count(n: int, thing: str) -> str:
    """Return `n` with the noun `thing`, which is given in singular and gets an s unless n is 1: "1 rank", "8 ranks"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _title(fold: Fold, node: int, model: Model | None) -> Iterator[Text]:
    title = f"{count(fold.world, 'rank')} on {count(-(-fold.world // node), 'node')} of {node:,}"
    if model is not None:
        title += f": {model.family} {model.size}, "
        title += f"{count(model.num_layers, 'layer')}, {count(model.num_experts, 'expert')}"
    yield Text(title, "bold")
    for name, axes in ("attention", fold.attention_axes), ("experts", fold.expert_axes):
        line = Text(f"  {name:<9} = ")
        for place, (axis, size) in enumerate(axes.items()):
            line.append(" x " if place else "", "dim")
            line.append(f"{axis} {size}", "bold" if size > 1 else "dim")
        yield line
    yield Text("  Down: what one rank does. Across: ranks under one bar or with equal labels have the same.\n", "dim")


def _stages(fold: Fold, node: int, model: Model | None, rows: list[Row]) -> Iterator[Text]:
    strip = _Strip(fold, node, model, rows)
    stages = [range(first, first + fold.stage) for first in range(0, fold.world, fold.stage)]
    lines = len(strip.split(stages[0]))
    most = STRIPS if fold.pp * lines <= STRIPS else FEW
    shown = stages[: max(1, most // lines)]
    for number, stage in enumerate(shown):
        if fold.pp > 1:
            yield Text(f"STAGE {number}: {count(fold.stage, 'rank')}, {span(stage)}", "bold")
        parts = strip.split(stage)
        for ranks in parts[:most]:
            yield from strip.draw(ranks, stage)
            yield Text()
        if parts[most:]:
            left = stage.stop - parts[most].start
            yield Text(f"  ... {count(left, 'more rank')}, to rank {stage.stop - 1}, in the same pattern\n")
    if len(shown) < fold.pp:
        first, last = len(shown), fold.pp - 1
        alike = f"stage {last} is alike" if first == last else f"stages {first} to {last} are alike"
        yield Text(f"  ... {alike}, each {count(fold.stage, 'rank')} further on\n")


class _Strip:
    """A drawing of ranks as columns, with a row for each axis, whose bars join neighbours of equal coordinate."""

    def __init__(self, fold: Fold, node: int, model: Model | None, rows: list[Row]):
        self.fold, self.node, self.model, self.rows = fold, node, model, rows
        self.names = max([len(row.axis) for row in rows], default=4) + 1
        self.head = 4 + self.names + max([len(row.meaning) for row in rows], default=0) + 1
        last = fold.world - 1
        self.cell = max([CELL, len(str(last)) + 1, *(len(self.label(row, last)) + 1 for row in rows)])
        # As many ranks as fit on a line: several nodes, or an equal part of one.
        nodes = (WIDTH - self.head + GAP) // (node * self.cell + GAP)
        self.length = nodes * node or max(d for d in divisors(node) if d == 1 or d * self.cell <= WIDTH - self.head)

    def split(self, stage: range) -> list[range]:
        """Return the ranks of a stage that are in each line of the picture. Lines end where nodes do, if they fit."""
        lines = range(stage.start // self.length, -(-stage.stop // self.length))
        return [
            range(max(stage.start, line * self.length), min(stage.stop, (line + 1) * self.length)) for line in lines
        ]

    def draw(self, ranks: range, stage: range) -> Iterator[Text]:
        world = range(self.fold.world)
        yield self.bars(Text("  node"), ranks, world, lambda rank: f"node {rank // self.node}", lambda rank: "dim")
        yield self.bars(Text("  rank", "bold"), ranks, ranks, str, lambda rank: "bold")
        for view in ("attention", "experts"):
            yield Text(f"  {view}", "bold")
            for row in self.rows:
                if row.view == view:
                    head = Text.assemble("    ", (row.axis.ljust(self.names), "bold"), row.meaning)
                    label = partial(self.label, row)
                    yield self.bars(head, ranks, stage, label, partial(self.fill, row))
            if not any(row.view == view for row in self.rows):
                yield Text("    one rank does it all")

    def place(self, row: Row, rank: int) -> int:
        places = coordinates(self.fold, row.view, rank)
        # Replicas have their own samples and sets of experts: these are numbered across all replicas.
        outer = {"dp_shard": "dp_replicate", "edp": "edp_replicate"}.get(row.axis)
        return places[row.axis] + (places[outer] * getattr(self.fold, row.axis) if outer else 0)

    def label(self, row: Row, rank: int) -> str:
        place = self.place(row, rank)
        if row.axis == "ep" and self.model is not None:
            local_experts = self.model.num_experts // self.fold.ep
            return span(range(place * local_experts, (place + 1) * local_experts))
        return f"{row.label}{place}"

    def fill(self, row: Row, rank: int) -> str:
        return FILLS[self.place(row, rank) % len(FILLS)]

    def bars(
        self, line: Text, ranks: range, within: range, label: Callable[[int], str], style: Callable[[int], str]
    ) -> Text:
        """Append a labelled bar for each run of neighbouring ranks with equal labels to `line`, and return it.

        A bar that goes on in another line is open at that end.

        Args:
            line: the text to append to.
            within: the ranks over which bars can extend.
            label: returns the label of a rank.
            style: returns the style of a rank's bar.
        """
        for text, run in groupby(ranks, label):
            members = list(run)
            first, last = members[0], members[-1]
            left, right = (self.head + self.column(rank, ranks) for rank in (first, last))
            before, after = (rank in within and label(rank) == text for rank in (first - 1, last + 1))
            if first == last and not before and not after:
                bar = text.center(self.cell)
            else:
                middle = f" {text} ".center(right + self.cell - left - 2, "─")
                bar = ("─" if before else "├") + middle + ("─" if after else "┤")
            line.append(" " * (left - len(line)))
            line.append(bar, style(first))
        return line

    def column(self, rank: int, ranks: range) -> int:
        return (rank - ranks.start) * self.cell + (rank // self.node - ranks.start // self.node) * GAP


def _table(fold: Fold, node: int, rows: list[Row]) -> Iterator[Text]:
    """Yield a head line and a line for each axis: its groups of ranks, what they send, and whether they cross nodes.

    Args:
        node: number of ranks of a node.
        rows: the axes; without any, nothing is yielded.
    """
    if not rows:
        return
    widths = 16, 35, 32
    heads = "  axis", "groups of ranks", "what is sent"
    yield Text("".join(map(str.ljust, heads, widths)) + f"nodes of {node:,}", "bold")
    for row in rows:
        crosses = crossing(fold, row.view, row.axis, node)
        slow = crosses != "none" and row.axis in CRITICAL
        line = Text.assemble((f"  {row.axis}".ljust(widths[0]), "bold"))
        line.append(_beginning(fold, row, widths[1] - 2).ljust(widths[1]))
        line.append(row.traffic.ljust(widths[2]))
        line.append(CROSSING[crosses] + " (slow)" * slow, "red" if slow else "green" if crosses == "none" else "yellow")
        yield line


def _beginning(fold: Fold, row: Row, columns: int) -> str:
    """Return the groups of ranks along the axis of `row` as text, such as "0-7  8-15 ...".

    It has at most `columns` characters, with the "..." that stands for groups that are left out.
    """
    text, total = "", fold.world // getattr(fold, row.axis)
    for number, group in enumerate(iter_groups(fold, row.view, row.axis), 1):
        longer = f"{text}  {span(group)}".lstrip()
        if len(longer) + 4 * (number < total) > columns:
            return f"{text} ..."
        text = longer
    return text


def _folding(fold: Fold) -> Iterator[Text]:
    """Yield a sentence on the attention axes that rank 0's dispatch group (ep x etp) spans; nothing for one rank."""
    if fold.ep * fold.etp == 1:
        return
    ranks = group_of(fold, "experts", ("ep", "etp"), 0)
    places = [coordinates(fold, "attention", rank) for rank in ranks]
    sizes = {axis: len({place[axis] for place in places}) for axis in fold.attention_axes}
    spread = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    yield Text(
        f"\n  Folded: ranks {span(ranks)} together hold every expert once (ep {fold.ep} x etp {fold.etp});"
        f"\n          to attention the same ranks are {spread}."
    )


def list_mappings(stages: list[StageViews], node: int) -> Iterator[Text]:
    """Yield the lines of a list of all legal mappings: for each pp, all attention views beside all expert views.

    Args:
        stages: the legal views for each pp; at least one, each with views of both kinds.
        node: number of ranks of a node; an axis with groups that cross nodes is marked.
    """
    total = sum(len(stage.attention) * len(stage.experts) for stage in stages)
    yield Text(f"{count(total, 'legal mapping')} of {count(stages[0].world, 'rank')}, on nodes of {node:,}", "bold")
    yield Text("Any attention row goes with any expert row of the same pp.  * some groups of the axis cross nodes")
    for stage in stages:
        attention = sorted(stage.attention, key=lambda view: (view["dp_replicate"], view["cp"], view["tp"]))
        experts = sorted(stage.experts, key=lambda view: (view["edp_replicate"], view["etp"], view["ep"]))
        mappings = f"{len(attention)} x {len(experts)} = {count(len(attention) * len(experts), 'mapping')}"
        yield Text(f"\npp {stage.pp}, {count(stage.world // stage.pp, 'rank')} a stage: {mappings}", "bold")
        names = " |".join("".join(f"{name:>{_width(name)}} " for name in views[0]) for views in (attention, experts))
        yield Text(names, "dim")
        for left, right in zip_longest(attention, experts):
            fold = stage.fold(left or attention[0], right or experts[0])
            line = _half(fold, "attention", attention[0], left is not None, node)
            line.append(" |", "dim")
            yield line.append(_half(fold, "experts", experts[0], right is not None, node))


def _half(fold: Fold, view: View, axes: Iterable[str], shown: bool, node: int) -> Text:
    line = Text()
    for axis in axes:
        line.append(f"{getattr(fold, axis) if shown else '':>{_width(axis)}}")
        line.append("*" if shown and crossing(fold, view, axis, node) != "none" else " ", "yellow")
    return line


def _width(axis: str) -> int:
    return max(len(axis), 6) + 1
