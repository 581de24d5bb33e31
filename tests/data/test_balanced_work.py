"""Work of documents by the model's shapes, and distributing it evenly."""

import numpy as np
import pytest

from tests.support.case_features import MODELS
from titanmoe.config.schema import Model, Own
from titanmoe.data.balanced_work import DocumentWork, assign_samples
from titanmoe.models.count import flops_per_token
from titanmoe.models.families import family_of


@pytest.mark.parametrize("name", MODELS)
def test_one_document_of_a_whole_sequence_costs_what_the_model_costs(name):
    fields = {k.removeprefix("model."): v for k, v in MODELS[name].items() if k.startswith("model.")}
    fields = {"vocab_size": 48, "dim": 16, "num_layers": 2, "expert_hidden": 16} | fields
    if "own" in fields:
        fields["own"] = Own(family_of(fields["family"]).own | fields["own"])
    model = Model(**fields)
    work, length = DocumentWork(model), 4096
    norms = 0.02  # counted there as matrix rows
    assert work(np.array([length])) == pytest.approx(length * flops_per_token(model, length) / 3, rel=norms)
    halves = work(np.array([length // 2] * 2))
    assert halves < work(np.array([length]))


def test_windows_bound_what_a_token_sees():
    model = Model(num_layers=1, sliding_window=4, full_attention_every=0)
    work = DocumentWork(model)
    pairs = {n: sum(min(i + 1, 4) for i in range(n)) for n in (1, 3, 4, 5, 50)}
    (cost,) = work.per_pair.values()
    for n, visible in pairs.items():
        assert work(np.array([n])) == work.per_token * n + cost * visible
    both = DocumentWork(Model(num_layers=2, sliding_window=4, full_attention_every=2))
    assert both(np.array([50])) == both.per_token * 50 + cost * (pairs[50] + 50 * 51 / 2)


def spread(work_MR: np.ndarray) -> tuple[float, float]:
    """How long a step takes over how long it would if all work were even: every microbatch waits for its busiest rank,
    and the busiest microbatch against the mean one."""
    return work_MR.max(1).sum() / work_MR.mean(1).sum(), work_MR.sum(1).max() / work_MR.sum(1).mean()


@pytest.mark.parametrize(("microbatches", "ranks", "size"), [(4, 8, 4), (8, 4, 1), (1, 16, 8), (16, 1, 2), (3, 5, 2)])
def test_every_sample_has_one_place_and_work_is_more_even(microbatches, ranks, size):
    draw = np.random.default_rng(0)
    for _ in range(5):
        # A sequence of seq_len tokens costs at most that many times the cheapest.
        work_N = np.minimum(draw.pareto(1.0, microbatches * ranks * size) + 1, 6)
        out_MRB = assign_samples(work_N, microbatches, ranks, size)
        assert out_MRB.shape == (microbatches, ranks, size)
        assert sorted(out_MRB.ravel().tolist()) == list(range(len(work_N)))
        before = spread(work_N.reshape(microbatches, ranks, size).sum(2))
        after = spread(work_N[out_MRB].sum(2))
        assert after[0] <= before[0] and after[0] < 1.25
        if size > 2:
            assert after[1] <= before[1] and after[1] < 1.1


def test_equal_work_is_left_in_turn():
    assert assign_samples(np.ones(12), 2, 3, 2).shape == (2, 3, 2)
    assert assign_samples(np.arange(4.0), 1, 4, 1).ravel().tolist() == [3, 2, 1, 0]
