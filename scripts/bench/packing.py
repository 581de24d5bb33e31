"""Measure how well long-tailed documents fill sequences, and how evenly data.balance_work distributes their work.

    python scripts/bench/packing.py [--seq-len 8192] [--median 600] [--sigma 1.3] [--family mixtral] [--size 8x7b]

Lengths are log-normal; only lengths are used, as in the loader's own plan of a step. It prints the cost of the work
over that of perfectly even work, for samples distributed round-robin and by work: of the busiest data rank of each
microbatch over the mean, over a step ("rank"), and of the heaviest microbatch over the mean ("microbatch").

M microbatches, R data ranks, B samples of each, N samples of a step, G segments of a sample.
"""

from __future__ import annotations

import argparse

import numpy as np

from titanmoe.config.schema import Model
from titanmoe.data.balanced_work import DocumentWork, assign_samples
from titanmoe.data.documents import MemoryDocuments
from titanmoe.data.pack import BestFitPacker, StreamPacker
from titanmoe.models.families import preset

STEPS = 20
LAYOUTS = ((4, 8, 4), (4, 8, 1), (1, 32, 1), (8, 64, 1), (16, 1, 2))  # microbatches, data ranks, samples of each


def imbalances(work_MRB: np.ndarray) -> np.ndarray:
    """Return two ratios of how uneven the work of a step is, over data ranks and over microbatches; 1 is even.

    The first is the work of the busiest data rank of each microbatch, summed over the step, over the same sum of means.
    The second is the work of the heaviest microbatch over the mean.
    """
    work_MR = work_MRB.sum(2)
    return np.array([work_MR.max(1).sum() / work_MR.mean(1).sum(), work_MR.sum(1).max() / work_MR.sum(1).mean()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--median", type=float, default=600)
    parser.add_argument("--sigma", type=float, default=1.3)
    parser.add_argument("--family", default="mixtral")
    parser.add_argument("--size", default="8x7b")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    asked = parser.parse_args()
    steps = 1 if asked.tiny else STEPS
    draw, model = np.random.default_rng(0), Model(**preset(asked.family, asked.size))
    lengths = np.maximum(2, draw.lognormal(np.log(asked.median), asked.sigma, 100_000).astype(np.int64))
    documents = MemoryDocuments("long-tailed", np.zeros(0, np.int64), np.append(0, np.cumsum(lengths)))
    work = DocumentWork(model)
    most, mean = (work(np.array([asked.seq_len])), work(np.array([asked.seq_len // 16] * 16)))
    print(
        f"{asked.family} {asked.size}, {asked.seq_len} positions: one document of them costs {most / mean:.2f} times 16"
    )
    print(f"documents: median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, longest {lengths.max()} tokens")
    for packer in (
        StreamPacker(documents, asked.seq_len, 0, separate_documents=True),
        BestFitPacker(documents, asked.seq_len, 0),
    ):
        name = {StreamPacker: "documents", BestFitPacker: "best_fit"}[type(packer)]
        used = np.array([segments.pairs_G.sum() for segments in packer.take(2000)])
        print(f"\n{name}: {1 - used.mean() / asked.seq_len:.2%} of the positions are padding")
        print("microbatches  data ranks  samples   rank: in turn  by work   microbatch: in turn  by work")
        for microbatches, ranks, size in LAYOUTS:
            count, imbalance = microbatches * ranks * size, np.zeros((2, 2))
            for _ in range(steps):
                work_N = np.array([work(length_G) for length_G in packer.lengths(packer.take(count))])
                imbalance[0] += imbalances(work_N.reshape(microbatches, ranks, size)) / steps
                imbalance[1] += imbalances(work_N[assign_samples(work_N, microbatches, ranks, size)]) / steps
            (rank, microbatch), (rank_even, microbatch_even) = imbalance
            print(
                f"{microbatches:>12}  {ranks:>10}  {size:>7}   {rank:>13.3f}  {rank_even:>7.3f}"
                f"   {microbatch:>19.3f}  {microbatch_even:>7.3f}"
            )


if __name__ == "__main__":
    main()
