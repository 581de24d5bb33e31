"""Dropping against a plain loop; scopes; C and the size of a padded bin."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.capacity import Capacity, over_capacity
from titanmoe.tokens import Tokens


class Entries(NamedTuple):
    chosen_NK: Tensor
    weights_NK: Tensor
    order_N: Tensor
    scope_N: Tensor
    num_experts: int
    capacity: int


@st.composite
def entries(draw: st.DrawFn) -> Entries:
    """Few weights, so that many are equal; a token's experts are distinct or E; positions are shuffled."""
    n, experts = draw(st.integers(0, 10)), draw(st.integers(1, 4))
    k = draw(st.integers(1, experts))
    chosen = [draw(st.permutations(range(experts)))[:k] for _ in range(n)]
    gone = draw(st.lists(st.booleans(), min_size=n * k, max_size=n * k))
    chosen_NK = torch.tensor(chosen, dtype=torch.int64).view(n, k)
    chosen_NK = chosen_NK.masked_fill(torch.tensor(gone, dtype=torch.bool).view(n, k), experts)
    weights = draw(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=n * k, max_size=n * k))
    return Entries(
        chosen_NK,
        torch.tensor(weights, dtype=torch.float64).view(n, k),
        torch.tensor(draw(st.permutations(range(100, 100 + n))), dtype=torch.int64),
        torch.tensor(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), dtype=torch.int64),
        experts,
        draw(st.integers(0, 4)),
    )


@given(entries(), st.booleans())
def test_over_capacity_is_a_plain_loop(given: Entries, by_weight: bool) -> None:
    want = torch.zeros_like(given.chosen_NK, dtype=torch.bool)
    for scope in set(given.scope_N.tolist()):
        for expert in range(given.num_experts):
            mine = []
            for n, k in (given.chosen_NK == expert).nonzero().tolist():
                if given.scope_N[n] == scope:
                    weight = float(given.weights_NK[n, k]) if by_weight else 0.0
                    mine.append((-weight, int(given.order_N[n]), n, k))
            for _, _, n, k in sorted(mine)[given.capacity :]:
                want[n, k] = True
    weights_NK = given.weights_NK if by_weight else None
    assert torch.equal(over_capacity(given.chosen_NK, weights_NK, *given[2:]), want)


def test_equal_weights_keep_the_earlier_token_wherever_it_lies() -> None:
    chosen, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    order, scope = torch.tensor([7, 3, 9, 5]), torch.zeros(4, dtype=torch.int64)
    assert over_capacity(chosen, weights, order, scope, 2, 2).flatten().tolist() == [True, False, True, False]


def test_tokens_that_differ_by_rounding_are_equal_under_any_order_of_rows() -> None:
    """12 tokens of two kinds: each of 20 mappings has them in a different order and rounds their weights
    differently.
    """
    kind_T = torch.tensor([0.3, 0.7]).double().repeat(6)
    one = capacity(capacity_factor=7 / 6, top_k=1)  # C is ceil(7 / 6 * 12 / 4) = 4 of the 6 of the better kind
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        order_T = torch.randperm(12, generator=generator)
        noise_T = 1e-7 * torch.randn(12, generator=generator, dtype=torch.float64)
        weights_TK = (kind_T * (1 + noise_T))[order_T].unsqueeze(1)
        owned = tokens(1, 12)._replace(index_T=order_T)
        kept_T = one(torch.zeros(12, 1, dtype=torch.int64), weights_TK, owned, 1).flatten()
        assert sorted(order_T[kept_T == 0].tolist()) == [1, 3, 5, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_compete_by_8_significant_bits(dtype: torch.dtype) -> None:
    """1 / 128 is the last of the 8 bits at 1; above half of it a weight is larger, below it equal, and then the later
    one loses.
    """
    for more, first in ((0.6 / 128, 1), (0.4 / 128, 0), (0.0, 0), (-0.3 / 256, 0)):
        one = capacity(capacity_factor=2.0, top_k=1, drop_policy="probability")  # C = 1
        weights_TK = torch.tensor([[1.0], [1.0 + more]], dtype=torch.float64).to(dtype)
        kept = one(torch.zeros(2, 1, dtype=torch.int64), weights_TK, tokens(1, 2), 1).flatten().tolist()
        assert kept == [0 if i == first else 4 for i in range(2)]


def capacity(size: int = 1, top_k: int = 2, **options: Any) -> Capacity:
    out = Capacity(Model(num_experts=4, top_k=top_k), MoE(**options))
    out.sequence = Group("unused", size, 0)
    return out


@pytest.mark.parametrize(
    "factor, positions, rows", [(1.0, 16, 8), (1.0, 15, 8), (1.25, 16, 10), (0.1, 16, 1), (4.0, 16, 32)]
)
def test_capacity_is_the_formula(factor: float, positions: int, rows: int) -> None:
    assert capacity(capacity_factor=factor).limit(positions) == rows == math.ceil(factor * 2 * positions / 4)


def test_a_padded_bin_holds_what_one_rank_can_have() -> None:
    one = capacity(capacity_factor=1.0)
    assert one.slots_per_expert(samples=3, own_tokens=24) == one.limit(24) == 12
    assert capacity(capacity_factor=5.0).slots_per_expert(samples=3, own_tokens=24) == 24, "never more than all tokens"
    # 8 positions of each of 3 samples here, 8 * size in the whole sample: C is 4 * size, but never more than the 8
    for size, rows in ((1, 3 * 4), (2, 3 * 8), (4, 3 * 8)):
        assert capacity(size, capacity_factor=1.0, capacity_scope="full_sequence").slots_per_expert(3, 24) == rows


def tokens(samples: int, length: int) -> Tokens:
    index_T = torch.arange(samples * length)
    return Tokens(
        index_T.view(samples, length) % length,
        index_T,
        index_T // length,
        torch.ones_like(index_T) > 0,
        torch.tensor(0),
    )


@pytest.mark.parametrize("scope", ["sub_sequence", "full_sequence"])
def test_the_scope_is_all_owned_tokens_or_one_sample(scope: str) -> None:
    """Two samples of 4; only the second chooses expert 0, and both choose expert 1."""
    one = capacity(capacity_factor=1.0, capacity_scope=scope, drop_policy="position", top_k=1)
    chosen_TK = torch.tensor([[1], [2], [3], [1], [0], [0], [0], [1]])
    kept = one(chosen_TK, torch.ones(8, 1), tokens(2, 4), 2).flatten().tolist()
    # C is ceil(8 / 4) = 2 of all owned tokens, and ceil(4 / 4) = 1 of each sample.
    assert kept == ([1, 2, 3, 1, 0, 0, 4, 4] if scope == "sub_sequence" else [1, 2, 3, 4, 0, 4, 4, 1])


def test_the_policies_differ_and_leave_weights_alone() -> None:
    chosen_TK = torch.zeros(4, 1, dtype=torch.int64)
    weights_TK = torch.tensor([[0.1], [0.4], [0.2], [0.3]], requires_grad=True)
    for policy, kept in (("position", [0, 0, 4, 4]), ("probability", [4, 0, 4, 0])):
        one = capacity(capacity_factor=2.0, drop_policy=policy, top_k=1)
        assert one(chosen_TK, weights_TK, tokens(1, 4), 1).flatten().tolist() == kept
    assert chosen_TK.sum() == 0


@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([0.3, 1.0, 1.5, 5.0]),
    st.sampled_from(["sub_sequence", "full_sequence"]),
    st.integers(0, 5),
)
def test_what_is_kept_fits_the_bin(samples: int, length: int, factor: float, scope: str, seed: int) -> None:
    one = capacity(capacity_factor=factor, capacity_scope=scope)
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(samples * length, 4, generator=generator) + torch.tensor([1.0, 0, 0, 0])
    weights_TK, chosen_TK = scores_TE.topk(2)
    kept_TK = one(chosen_TK, weights_TK, tokens(samples, length), samples)
    assert ((kept_TK == chosen_TK) | (kept_TK == 4)).all()
    assert kept_TK.flatten().bincount(minlength=5)[:4].max() <= one.slots_per_expert(samples, samples * length)
