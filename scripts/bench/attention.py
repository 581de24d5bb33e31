"""Count what attention computes and reads under each mask, kind of context parallelism and backend. Nothing is run.

    python scripts/bench/attention.py [--lengths 8192 131072] [--cp 8] [--window 1024] [--write]

One sequence of L positions in a layer of Qwen3-30B-A3B's shape. N documents have log-normal lengths, 256 to 131072;
pairs are two completions of a prompt, 3/4 of each text, stored twice or once. --write changes docs/. B is 1 sample.

    seen, computed  FLOPs of the pairs of a query and a key that see each other; of the blocks that are computed
    makespan        FLOPs of the busiest rank, over the mean
    read            bytes that the busiest rank's kernels move, forward and backward, as a rehearsal counts them
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from titanmoe.config.fields import replace_marked  # noqa: E402
from titanmoe.config.schema import Model  # noqa: E402
from titanmoe.mask import CAUSAL, BlockPair, Mask, branches, ends, spans  # noqa: E402
from titanmoe.models.families import preset  # noqa: E402
from titanmoe.parallel.context import Placement, _backward_pairs, _forward_pairs, _start, _wide_zeros  # noqa: E402
from titanmoe.parallel.flex import MASK_BLOCK, block_mask  # noqa: E402
from titanmoe.rehearse.code_site import CodeSite  # noqa: E402
from titanmoe.rehearse.operation_costs import Operations  # noqa: E402
from titanmoe.report.draw import LIGHT, Area, Sheet, Words, svg  # noqa: E402

MASKS = ("causal", "documents", "window", "documents, window", "pairs, two copies", "pairs, shared")
KINDS = ("ring, allgather", "ulysses")
PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "attention.svg"
BEGIN, END = "<!-- attention begins -->", "<!-- attention ends -->"
MEDIAN, SIGMA = 2048, 1.4
TEXT = 4096  # tokens of a prompt and one completion


def documents(length: int, text: int = 0) -> Mask:
    """Return the mask of one sequence of `length` positions that is filled with documents, the last one truncated.

    `text` is the length of each document; 0 for log-normal lengths.
    """
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, length // 256).clip(256, 131072).astype(int)
    end_N = np.minimum((np.full_like(drawn, text) if text else drawn).cumsum(), length)
    return spans(ends(torch.from_numpy(np.searchsorted(end_N, np.arange(length), side="right")).unsqueeze(0)))


def make_mask(name: str, length: int, window: int) -> Mask:
    """Return the mask with a name of MASKS for one sequence of `length` positions.

    `window` is the number of positions that a query sees, for masks with a window.
    """
    text = min(TEXT, length // 2)
    if name == "pairs, two copies":
        return documents(length, text)
    if name == "pairs, shared":
        stem, completion = 3 * text // 4 - 1, text // 4 + 1  # each completion repeats the prompt's last token
        size = stem + 2 * completion
        trees, rest = np.tile([stem, completion, completion], (length // size, 1)), length % size
        until, depth = branches(np.concatenate([trees, [[rest, 0, 0]]]))
        return spans(torch.from_numpy(until).unsqueeze(0), torch.from_numpy(depth).unsqueeze(0))
    mask = documents(length) if "documents" in name else CAUSAL
    return mask._replace(window=window if "window" in name else 0)


def count_pairs(mask: Mask, length: int, rows: int = 256) -> int:
    """Count the pairs of a query and a key that a mask lets see each other, one by one, by the mask's definition.

    The mask is of one sequence; `rows` queries are compared at a time.
    """
    place, host = np.arange(length, dtype=np.int32), mask.on_host
    until = np.full_like(place, length) if host is None else host.until_BL[0].astype(np.int32)
    depth = place if host is None or host.depth_BL is None else host.depth_BL[0].astype(np.int32)
    total = 0
    for first in range(0, length, rows):
        q, k = slice(first, first + rows), slice(0, first + rows)
        seen = (place[k] <= place[q, None]) & (place[q, None] < until[k])
        if mask.window:
            seen &= depth[q, None] - depth[k] < mask.window
        total += int(np.count_nonzero(seen))
    return total


def computed_pairs(pairs: list[BlockPair]) -> int:
    """Return the number of pairs of a query and a key that computing these blocks takes: of a causal one, half."""
    sizes = [(p.queries.stop - p.queries.start, p.keys.stop - p.keys.start, p.causal) for p in pairs]
    return sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in sizes)


class Count(TorchDispatchMode, Operations):
    """Dispatch mode that counts FLOPs and bytes of torch's operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.add(func, args, kwargs or {}, out, CodeSite())
        return out


def bytes_moved(pairs: list[BlockPair], mask: Mask, queries: int, keys: int, heads: int, model: Model) -> int:
    """Return the bytes that forward and backward of attention read and write in bfloat16; runs them on the meta device.

    Args:
        pairs: blocks of queries and keys to compute.
        mask: the mask.
        queries: number of queries.
        keys: number of keys.
        heads: number of query heads on the rank.
        model: has the sizes of heads.
    """

    def empty(heads: int, length: int) -> Tensor:
        return torch.empty(1, heads, length, model.head_dim, device="meta", dtype=torch.bfloat16)

    group = model.num_heads // model.num_kv_heads
    q, (k, v) = empty(heads, queries), (empty(max(1, heads // group), keys) for _ in range(2))
    on_meta = mask.to(lambda x: x.to("meta"))
    with Count() as count:
        out, lse = _start(q, v, None)
        _forward_pairs(q, k, v, pairs, on_meta, out=out, lse=lse)
        grads = [_wide_zeros(x) for x in (q, k, v)]
        _backward_pairs(q, q, k, v, pairs, mask=on_meta, out=out.to(q.dtype), lse=lse, sums=grads)
    return count.total().moved


class Row(NamedTuple):
    """Cost of one mask, length, kind of context parallelism and backend ("ours" or "flex").

    The module's docstring has the terms; `causal` are FLOPs of the blocks that our attention computes under a causal
    mask, and `read` is 0 for flex.
    """

    mask: str
    length: int
    kind: str
    backend: str
    seen: int
    computed: int
    causal: int
    makespan: float
    read: int = 0


def make_rows(name: str, length: int, cp: int, window: int, model: Model) -> Iterator[Row]:
    """Yield two rows for each kind of context parallelism: of the blocks that our attention and flex_attention compute.

    Beside the mask's FLOPs they have those of a causal mask. Bytes read are counted for our attention only.

    Raises SystemExit if the mask's own count of pairs is not that of `count_pairs`.

    Args:
        name: name of the mask, in MASKS.
        length: number of positions of the sequence.
        cp: number of ranks that share the sequence.
        window: number of positions that a query sees, for masks with a window.
        model: the model.
    """
    mask, per_pair = make_mask(name, length, window), 4 * model.num_heads * model.head_dim
    seen, place = mask.count(length), torch.arange(length).unsqueeze(0)
    if (one_by_one := count_pairs(mask, length)) != seen:
        raise SystemExit(f"{name}, {length}: {seen} pairs by the formula, {one_by_one} one by one")
    for kind in KINDS:
        # Ulysses gives each rank the full sequence and 1 / cp of the heads.
        placement, divisor = (Placement(1, zigzag=False), cp) if kind == "ulysses" else (Placement(cp, zigzag=True), 1)
        chunk, sizes = length // placement.chunks, (length // placement.size, length, model.num_heads // divisor)
        ranks, chunks = range(placement.size), range(placement.chunks)
        computed, causal = (
            [which.pairs(chunk, len(chunks), placement.chunks_of(rank), chunks) for rank in ranks]
            for which in (mask, CAUSAL)
        )
        work, causal_flops = [computed_pairs(pairs) for pairs in computed], per_pair * sum(map(computed_pairs, causal))
        busiest = max(ranks, key=work.__getitem__)
        read = bytes_moved(computed[busiest], mask, *sizes, model)
        about = name, length, kind, "ours", per_pair * seen, per_pair * sum(work), causal_flops
        yield Row(*about, max(work) * len(work) / sum(work), read)
        blocks = [block_mask(placement.rank_slice(place, rank)[0], length, mask) for rank in ranks]
        work = [int(b.kv_num_blocks.sum() + b.full_kv_num_blocks.sum()) * MASK_BLOCK**2 for b in blocks]
        about = name, length, kind.removeprefix("ring, "), "flex", per_pair * seen, per_pair * sum(work), causal_flops
        yield Row(*about, max(work) * len(work) / sum(work))


def table(rows: list[Row]) -> str:
    """Return a Markdown table with one line per length and mask of `make_rows`, whose order the rows have.

    Columns of two numbers are of our blocks and of flex_attention's. FLOPs are those of ring and all-gather; those of
    ulysses differ by rounding, and its makespan is 1.
    """
    head = "mask | length | seen, GFLOP | computed | makespan | ring, MiB | ulysses, MiB"
    out = [f"| {head} |", "|---" * 7 + "|"]
    for n in range(0, len(rows), 4):
        ring, flex, ulysses, _ = rows[n : n + 4]
        computed = " / ".join(f"{row.computed / row.seen:.2f}" for row in (ring, flex))
        makespan = " / ".join(f"{row.makespan:.2f}" for row in (ring, flex))
        read = " | ".join(f"{row.read / 2**20:,.0f}" for row in (ring, ulysses))
        out.append(f"| {ring.mask} | {ring.length:,} | {ring.seen / 1e9:,.1f} | {computed} | {makespan} | {read} |")
    return "\n".join(out)


def picture(rows: list[Row]) -> str:
    """Return an SVG of the FLOPs of the blocks that ring attention computes under each mask, over a causal mask's.

    Only the rows of our attention at the greatest length are drawn, not those of flex_attention and ulysses.
    """
    longest = max(row.length for row in rows)
    bars = [row for row in rows if (row.length, row.kind, row.backend) == (longest, KINDS[0], "ours")]
    sheet = Sheet(720, 40 + 34 * len(bars), f"FLOPs of the blocks computed at {longest:,} positions")
    sheet.marks.append(Words(10, 20, f"{sheet.title}, of those under causality; dark: of pairs that see each other"))
    for n, row in enumerate(bars):
        y, full = 34 + 34 * n, 480 / row.causal
        sheet.marks.append(Words(10, y + 16, row.mask, "ink"))
        for role, value in (("grid", row.causal), ("c2", row.computed), ("c0", row.seen)):
            x = 150 + value * full
            sheet.marks.append(Area([(150, y), (x, y), (x, y + 22), (150, y + 22)], role))
        sheet.marks.append(Words(640, y + 16, f"{row.computed / row.causal:.1%}", "ink"))
    colours = ";".join(f"--{role}:{value}" for role, value in LIGHT.items())
    style = f"{colours};background:{LIGHT['card']};font-family:sans-serif"
    return svg(sheet, f' xmlns="http://www.w3.org/2000/svg" style="{style}"') + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 131072])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args(argv)
    if args.tiny:
        args.lengths, args.cp, args.window = [1024], 2, 64
    model = Model(**preset("qwen3_moe", "30b_a3b"))
    rows = [row for n in args.lengths for name in args.masks for row in make_rows(name, n, args.cp, args.window, model)]
    print(table(rows))
    if args.write:
        PICTURE.write_text(picture(rows))
        PAGE.write_text(replace_marked(PAGE.read_text(), BEGIN, END, f"\n\n{table(rows)}\n\n"))


if __name__ == "__main__":
    main()
