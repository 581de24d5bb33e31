"""Routing replay: given experts under any mapping are one rank's, and recorded ones are those of every mapping."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests import parity, world
from tests.support.case_features import changes
from tests.support.covering_mappings import case_id, cover, has_several_ranks
from tests.test_policy_gradients import OPTIONS, candidates
from tests.test_session import MAPPINGS, SAMPLES, open_session, samples
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_layers
from titanmoe.config.schema import Config
from titanmoe.data.batch import ROUTES
from titanmoe.data.routes import Routes, digest_routes, route_mismatch, routes_from_sglang, routes_from_vllm
from titanmoe.fold.degrees import Fold
from titanmoe.tokens import NO_EXPERT, NOT_RECORDED
from titanmoe.train.world_batch import make_batch

OF_PP = MAPPINGS["pp 2, dp 2, ep 2"][1]
COVER: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2, ep 4": MAPPINGS["tp 2, ep 4"],
    "cp 2, etp 2": MAPPINGS["cp 2, etp 2"],
    "pipeline, recomputed": (4, OF_PP | {"activation_checkpoint.mode": "full"}),
    "halves": (2, {"parallelism.experts.ep": 2, "moe.overlap": "halves", "training.local_batch_size": 2}),
    "one graph, recomputed": (
        2,
        {
            "parallelism.experts.ep": 2,
            "compile.enable": True,
            "compile.backend": "aot_eager",
            "activation_checkpoint.mode": "full_except_dispatch",
        },
    ),
    "dense layer first": (
        2,
        {"parallelism.experts.ep": 2, "model.num_layers": 3, "model.num_dense_layers": 1, "model.dense_hidden": 16},
    ),
    "virtual stages, packed": (
        4,
        OF_PP | {"pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4, "data.packing": "documents"},
    ),
    "cp, packed": (2, {"parallelism.cp": 2, "data.packing": "documents"}),
}


def random_routes(session: Any, count: int) -> torch.Tensor:
    """Experts at random, and some tokens of sample 1 without, and of sample 2 not recorded."""
    model, length = session.config.model, session.config.training.seq_len
    layers = moe_layers(model)
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(count, length, layers, model.num_experts, generator=generator).argsort(-1)
    routes = order[..., : model.top_k].to(torch.int16)
    routes[1, ::3] = NO_EXPERT
    routes[2, 1::4] = NOT_RECORDED
    return routes


def replayed(changes: dict[str, Any], own: bool = False) -> dict[str, Any]:
    """A step with random routes, or with those that the routers have recorded of the same samples."""
    if changes.get("compile.enable"):
        torch._dynamo.reset()
    session = open_session(changes)
    documents = session.config.data.packing == "documents"
    batch = parity.batch(session.config, list(range(SAMPLES)), documents=documents)
    log_probs, recorded = session.log_probs_and_routes(batch)
    routes = recorded.experts_NSLK if own else random_routes(session, SAMPLES)
    given = batch._replace(extra_fields={ROUTES: routes})
    result = session.forward_backward(given, log_probs=True, routes=True)
    report = session.optim_step()
    weights = parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold)
    return {
        "recorded": recorded.experts_NSLK,
        "fresh": result.routes.experts_NSLK,
        "before": log_probs,
        "log_probs": result.log_probs,
        "norm": report["grad_norm"],
        "weights": weights,
        "mismatch": route_mismatch(Routes(routes), result.routes),
    }


@functools.cache
def on_one_rank(changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return world.run(1, replayed, dict(changes))[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "graph" in name else ()) for name in COVER]
)
def test_given_experts_give_one_ranks_numbers(name: str) -> None:
    size, mapping = COVER[name]
    (got, *_) = world.run(size, replayed, mapping)
    compare(got, on_one_rank(tuple(x for x in mapping.items() if x[0].startswith(("model.", "data.")))))


def covered() -> list[Any]:
    """Mappings of 4 ranks that cover each pair of two axes, or of an axis and a feature."""
    of_4 = candidates(4, 3000)
    rows = [has_several_ranks(fold) | choice for fold, choice in of_4]
    chosen = [of_4[i] for i in cover(rows, left_out=lambda a, b: a in OPTIONS and b in OPTIONS)]
    return [pytest.param(*case, id="-".join([case_id(case[0]), *case[1].values()])) for case in chosen]


@pytest.mark.slow
@pytest.mark.parametrize(("fold", "choice"), covered())
def test_given_experts_give_one_ranks_numbers_under_every_pair(fold: Fold, choice: dict[str, str]) -> None:
    packing = {"data.packing": "documents"} if choice["documents"] == "yes" else {}
    changed = changes(fold, choice) | packing
    neutral = {key: value for key, value in changed.items() if not key.startswith(parity.NEUTRAL)}
    compare(world.run(4, replayed, changed)[0], world.run(1, replayed, neutral)[0])


def compare(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(got["recorded"], expected["recorded"]) and torch.equal(got["fresh"], expected["fresh"])
    assert got["mismatch"] == expected["mismatch"] > 0.3
    assert not torch.allclose(got["before"], got["log_probs"])
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-10)
    torch.testing.assert_close(got["log_probs"], expected["log_probs"], rtol=0, atol=1e-11)
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(got["weights"][weight], value, rtol=1e-10, atol=1e-12, msg=weight)


def without_routes(changes: dict[str, Any]) -> dict[str, Any]:
    session = open_session(changes)
    session.forward_backward(samples(session, 0, SAMPLES))
    report = session.optim_step()
    weights = parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold)
    return {"norm": report["grad_norm"], "weights": weights}


@pytest.mark.parametrize("name", ["tp 2, ep 4", "pp 2, dp 2, ep 2"])
def test_own_experts_change_nothing_to_the_bit(name: str) -> None:
    size, mapping = MAPPINGS[name]
    (expected, *_) = world.run(size, without_routes, mapping)
    (got, *_) = world.run(size, replayed, mapping, True)
    assert got["norm"] == expected["norm"] and got["mismatch"] == 0
    assert torch.equal(got["before"], got["log_probs"])
    for weight, value in expected["weights"].items():
        assert torch.equal(got["weights"][weight], value), weight


def with_frozen_choice(changes: dict[str, Any]) -> tuple[float, float]:
    """Norms with given routes, and with routers that the tests replace by ones which choose the same."""
    session = open_session(changes)
    batch, count = samples(session, 0, 4), 4
    routes = random_routes(session, count)
    routes[2, 1::4] = torch.arange(session.config.model.top_k).to(torch.int16)
    routes[1, ::3] = torch.arange(session.config.model.top_k).to(torch.int16)
    session.forward_backward(batch._replace(extra_fields={ROUTES: routes}))
    norm = session.optim_step(rate=0.0)["grad_norm"]
    flat = routes.flatten(0, 1).to(torch.int64)
    with parity.frozen({layer: flat[:, layer] for layer in range(flat.shape[1])}):
        session.forward_backward(batch)
        return norm, session.optim_step(rate=0.0)["grad_norm"]


def test_a_given_choice_is_that_of_a_router_which_chooses_so() -> None:
    ((given, frozen),) = world.run(1, with_frozen_choice, {"optimizer.weight_decay": 0.0})
    assert given == frozen


def of_the_old_policy(changes: dict[str, Any]) -> None:
    """R2: the trainer's own choices before the first of several updates."""
    session = open_session(changes)
    batch = samples(session, 0, 4)
    old_log_probs, routes = session.log_probs_and_routes(batch)
    given = batch._replace(extra_fields={ROUTES: routes.experts_NSLK})
    flat = routes.experts_NSLK.flatten(0, 1).to(torch.int64).clamp(min=0)
    for _ in range(3):
        with parity.frozen({layer: flat[:, layer] for layer in range(flat.shape[1])}):
            expected = session.log_probs(batch)
        result = session.forward_backward(given, log_probs=True, routes=True)
        torch.testing.assert_close(result.log_probs, expected, rtol=0, atol=1e-12)
        session.optim_step(rate=0.1)
    assert not torch.allclose(result.log_probs, old_log_probs)
    assert route_mismatch(routes, result.routes) > 0, "the routers would choose others by now"


def of_the_generator(changes: dict[str, Any]) -> None:
    """R3: one batch with the generator's choices for old log-probabilities and training, whose ratio is then 1."""
    session = open_session(changes)
    batch = samples(session, 0, 4)
    given = batch._replace(extra_fields={ROUTES: random_routes(session, 4)})
    old_log_probs = session.log_probs(given)
    result = session.forward_backward(given, log_probs=True)
    session.optim_step(rate=0.1)
    assert torch.equal(result.log_probs, old_log_probs)
    assert not torch.allclose(session.log_probs(batch), old_log_probs)


@pytest.mark.parametrize("replay", [of_the_old_policy, of_the_generator])
def test_which_choices_are_replayed_is_the_callers(replay: Any) -> None:
    world.run(2, replay, {"parallelism.experts.ep": 2})


def first_layer(changes: dict[str, Any], gives: bool) -> list[torch.Tensor]:
    """The routes that the first layer records, and its selection biases after a step."""
    session = open_session(changes)
    batch = samples(session, 0, 4)
    fields = {ROUTES: random_routes(session, 4)} if gives else {}
    result = session.forward_backward(batch._replace(extra_fields=fields), routes=True)
    session.optim_step()
    bias = next(bias for name, bias in session.training.buffers.items() if "layers.0." in name)
    return [result.routes.experts_NSLK[:, :, 0], bias]


def test_biases_follow_the_routers_own_choice_and_routes_are_recorded_before_capacity() -> None:
    changes = {"parallelism.experts.ep": 2, "moe.bias_update_rate": 0.1}
    (routes, bias), *_ = world.run(2, first_layer, changes, False)
    assert bias.any()
    for more, gives in ((changes, True), (changes | {"moe.capacity_factor": 0.5}, False)):
        (own, moved), *_ = world.run(2, first_layer, more, gives)
        assert torch.equal(own, routes) and torch.equal(moved, bias)


def test_experts_that_change_places_are_noticed() -> None:
    ids, valid = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    orders = [torch.tensor(order, dtype=torch.int16) for order in itertools.permutations(range(5))]
    for layers in (1, 5):
        digests = {int(digest_routes(ids, order.view(1, 1, layers, -1), valid)) for order in orders}
        assert len(digests) == len(orders)


def test_a_column_shifted_by_one_token_is_noticed() -> None:
    model = dataclasses.replace(Config().model, vocab_size=50, num_layers=2, num_experts=8, top_k=2)
    ids = [list(range(1, 7)), [9, 8, 7]]
    experts = torch.stack([torch.rand(2, 6, 2, 8).argsort(-1)[..., :2]]).squeeze(0).to(torch.int16)
    experts[1, 3:] = NOT_RECORDED
    plain = make_batch(ids, seq_len=6, model=model)
    routes = Routes(experts, digest_routes(plain.tokens_BS, experts, plain.valid_BS))
    good = make_batch(
        ids,
        columns={ROUTES: Routes([row[: len(i)] for row, i in zip(experts, ids, strict=True)], routes.digest_N)},
        seq_len=6,
        model=model,
    )
    assert torch.equal(good.extra_fields[ROUTES], experts)
    shifted = experts.roll(1, 1)
    for wrong, message in (
        (Routes(shifted, routes.digest_N), "the routes of sample 0 were recorded for other ids or positions"),
        (Routes(experts + 7), "routes name expert"),
        (Routes(torch.zeros_like(experts)), "routes name expert 0 twice for one token"),
        (Routes(torch.cat((experts[..., :1], experts[..., :1] * 0 - 2), -1)), "in some of a token's 2 places"),
        (Routes(experts[:, :, :1]), "(MoE layers, top_k) = (2, 2)"),
    ):
        rows = Routes([row[: len(i)] for row, i in zip(wrong.experts_NSLK, ids, strict=True)], wrong.digest_N)
        with pytest.raises(ConfigError) as error:
            make_batch(ids, columns={ROUTES: rows}, seq_len=6, model=model)
        assert message in str(error.value)


def routes_of_another_model(changes: dict[str, Any]) -> list[str]:
    """The refusals of batches that no check has seen, of which only rank 1's may be wrong; then a step is made."""
    session, messages = open_session(changes), []
    batch, rank = samples(session, 0, 4), session.rank
    routes = random_routes(session, 4)
    for wrong in (routes[:, :, :1], routes[..., :1], routes[:3], routes[:, 1:]):
        given = batch._replace(extra_fields={ROUTES: wrong})
        for own in (given, given if rank == 1 else batch, given if rank == 1 else None):
            for per_data_rank in (False, True):
                with pytest.raises(ConfigError) as error:
                    session.forward_backward(own, per_data_rank=per_data_rank)
                messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        session.log_probs(batch if rank else None, per_data_rank=True)
    messages.append(str(error.value))
    session.forward_backward(batch._replace(extra_fields={ROUTES: routes}))
    assert session.optim_step()["grad_norm"] > 0
    return messages


@pytest.mark.parametrize("mapping", [{"parallelism.experts.ep": 2}, {"parallelism.pp": 2}], ids=str)
def test_routes_of_another_model_are_refused_on_all_ranks(mapping: dict[str, Any]) -> None:
    messages, others = world.run(2, routes_of_another_model, mapping)
    assert messages == others
    parts = ["routes have (1, 2) experts a token, and this model (MoE layers, top_k) = (2, 2)", "routes have (2, 1)"]
    parts += ["routes are of (3, 16) samples and positions, and ids of (4, 16)", "routes are of (4, 15)"]
    for i, message in enumerate(messages[:-1]):
        assert parts[i // 6] in message
    assert len(messages) == 25 and "every rank gives the samples of its data rank" in messages[-1]


def test_engines_forms_are_read() -> None:
    model = dataclasses.replace(Config().model, num_layers=3, num_dense_layers=1, num_experts=256, top_k=2)
    experts = np.random.default_rng(0).integers(0, 256, (4, 3, 2)).astype(np.int32)
    file = io.BytesIO()
    np.save(file, experts)
    of_vllm = routes_from_vllm(base64.b64encode(file.getvalue()).decode(), 5, model)
    of_sglang = routes_from_sglang(base64.b64encode(experts.tobytes()).decode(), 5, model)
    assert torch.equal(of_vllm, of_sglang) and of_vllm.shape == (5, 2, 2)
    assert torch.equal(of_vllm[:4], torch.from_numpy(experts[:, 1:]).to(torch.int16))
    assert (of_vllm[4] == NOT_RECORDED).all()
    with pytest.raises(ValueError, match=r"routes have \(3, 2\) experts a token, .* = \(5, 2\), of which 4 layers"):
        routes_from_vllm(base64.b64encode(file.getvalue()).decode(), 5, dataclasses.replace(model, num_layers=5))
