"""Facts about each dispatcher that need no torch. A new one is a class in its own file and an entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    where: str
    """The module under titanmoe, and the class in it: torch is imported where a layer is made, not here."""
    what: str
    """What it does and when to choose it, as --help says it."""
    host_syncs: int
    """How often the forward of a layer waits to learn how many rows go where. With padded bins none does."""
    whole: str = ""
    """Why its rows do not travel in pieces, after "overlap_chunks splits an all-to-all by its row counts, but this
    one"; "" if they do. Without pieces nothing is computed meanwhile: no other chunk, and no other microbatch.
    """
    nodes: bool = False
    """Whether it needs to know which ranks of its group share a node."""
    unused_rows: bool = False
    """Whether experts get rows beyond the last one that is theirs, and may make NaN of them."""
    asks_machine: bool = False
    """Whether it needs more than torch.distributed; the class's `missing` says what this machine does not have."""
    most_ranks: int = 0
    """Of ep x etp; 0: any number, as for the next two."""
    most_experts: int = 0
    """On a rank."""
    most_pieces: int = 0
    """Pieces that a rank sends: one for each expert on each rank of ep x etp."""
    most_choices: int = 0
    """Of a token: top_k on each rank of etp."""
    sizes: tuple[int, ...] = ()
    """Of ep x etp; (): any, as for the next."""
    node: int = 0
    """Ranks of each node, where its group is larger than one; a smaller group has to lie within one."""
    param: str = ""
    """The mixed_precision_param that it can send; "": any."""
    dim_of: int = 1
    """What model.dim has to be a multiple of."""
    most_dim: int = 0
    """Of model.dim."""
    no_bins: str = ""
    """Why pad_to_capacity is refused, after "moe.pad_to_capacity = true makes every size static, "; "" if it is not."""


DISPATCHERS = {
    "alltoall": Facts(
        "moe.dispatchers.alltoall.AllToAll",
        "alltoall moves each token only to its experts' ranks.",
        host_syncs=1,
    ),
    "allgather": Facts(
        "moe.dispatchers.allgather.AllGather",
        "allgather moves every token to every rank of ep x etp: for tiny ep, or top_k near ep.",
        host_syncs=1,
        whole="has none",
    ),
    "hierarchical": Facts(
        "moe.dispatchers.hierarchical.Hierarchical",
        "hierarchical is an all-to-all in which a token is sent to each node once, and copied inside it: for "
        "ep x etp that spans nodes, if a token has several experts on one.",
        host_syncs=2,
        nodes=True,
    ),
    "symm_mem": Facts(
        "moe.dispatchers.symm_mem.Symmetric",
        "symm_mem (experimental) is alltoall through symmetric memory (NVSHMEM), in which the host never waits for "
        "sizes: for GPUs of one NVLink domain that often idle waiting for the host.",
        host_syncs=0,
        whole="leaves those counts on the device",
        unused_rows=True,
        asks_machine=True,
        no_bins='so that moe.dispatcher = "symm_mem" saves the host nothing: use dispatcher = "alltoall", which then '
        "does not wait either, or pad_to_capacity = false",
        # A kernel's first block overwrites the offsets that others still read, always if a block has more than
        # one piece. The grid has 64 blocks, 8 with more than 8 ranks (torch 2.11 and newer). A warp for each expert.
        most_ranks=8,
        most_experts=16,
        most_pieces=64,
    ),
    "deepep": Facts(
        "moe.dispatchers.deepep.DeepEP",
        "deepep (experimental, not run on GPUs) sends a token once to each rank that has experts of it, by the kernels "
        "of DeepEP: for bfloat16 on GPUs with NVLink in a node and RDMA between nodes, with its package deep_ep.",
        host_syncs=1,
        whole="sends a token once for all its experts on a rank",
        asks_machine=True,
        no_bins='and moe.dispatcher = "deepep" has none: use dispatcher = "alltoall", or pad_to_capacity = false',
        # deep_ep/buffer.py and csrc/kernels of DeepEP 1.2: sizes that it has options for, lanes of a warp, a token's
        # half in a warp's buffer, 32 bytes at a time.
        sizes=(2, 4, 8, 16, 24, 32, 64, 128, 144, 160),
        node=8,
        most_choices=32,
        param="bfloat16",
        dim_of=16,
        most_dim=8176,
    ),
}


def in_pieces() -> list[str]:
    """Those whose rows can travel while something else is computed."""
    return [name for name, facts in DISPATCHERS.items() if not facts.whole]


def in_pieces_quoted() -> str:
    """The same as a message suggests them."""
    return " or ".join(f'"{name}"' for name in in_pieces())
