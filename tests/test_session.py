"""titanmoe.session: calls that add up to a step, under any mapping, against one step of the training loop."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.support import processes
from titanmoe.comm.collectives import to_local
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.models import vocabulary
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.plan.memory import rank_memories
from titanmoe.session import Session
from titanmoe.tokens import IGNORE
from titanmoe.train.launch import scoring_config
from titanmoe.train.world_batch import NoLoader, make_batch

SAMPLES = 7
LOSSES = {"moe.aux_loss": 0.01, "moe.aux_loss_sequence": 0.01, "moe.aux_loss_global": 0.01, "moe.z_loss": 0.001}
MAPPINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp 2, ep 4": (4, {"parallelism.tp": 2, "parallelism.experts.ep": 4}),
    "cp 2, etp 2": (4, {"parallelism.cp": 2, "parallelism.experts.etp": 2}),
    "pp 2, dp 2, ep 2": (4, {"parallelism.pp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B"}),
    "shared vocabulary": (4, {"parallelism.pp": 2, "parallelism.vocab": "pipeline"}),
    "hsdp": (4, {"parallelism.dp_replicate": 2, "parallelism.experts.ep": 2}),
    "reduced once": (4, {"parallelism.experts.ep": 2, "parallelism.reduce_once": True}),
}


def open_session(changes: dict[str, Any]) -> Any:
    trainer = parity.make_trainer(changes, loader=NoLoader)
    return Session(parity.read(changes, trainer.training.runtime.world), trainer.training)


MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}


def samples(session: Any, first: int, end: int) -> Batch:
    return parity.batch(session.config, list(range(first, end)))


def steps(changes: dict[str, Any], calls: list[list[tuple[int, int]]]) -> dict[str, Any]:
    """Make a step of each list of calls; return losses, norms and the full weights."""
    session = open_session(changes)
    reports, log_probs = [], []
    for step in calls:
        batches = [samples(session, *span) for span in step]
        counts = sum((session.count(batch) for batch in batches[1:]), session.count(batches[0]))
        for i, batch in enumerate(batches):
            if i:
                session.log_probs(batch)  # leaves what the step has counted as it is
            result = session.forward_backward(batch, counts=counts, log_probs=True)
            log_probs.append(result.log_probs)
        reports.append(session.optim_step())
    weights = parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold)
    return {"reports": reports, "weights": weights, "log_probs": torch.cat(log_probs)}


def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["reports"], other["reports"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if name == "flops":  # those of padding count too
                continue
            assert value == pytest.approx(theirs[name], rel=1e-10, abs=1e-12), name
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, other["weights"][name], rtol=1e-10, atol=1e-12, msg=name)
    torch.testing.assert_close(one["log_probs"], other["log_probs"], rtol=1e-10, atol=1e-12)


def after_updates(changes: dict[str, Any], asks_before: bool) -> list[torch.Tensor]:
    """Log-probabilities after each of two updates, before which others may be asked for in the open step."""
    session, out = open_session(changes), []
    for _ in range(2):
        session.forward_backward(samples(session, 0, 4))
        if asks_before:
            session.log_probs(samples(session, 0, 4))
        session.optim_step(rate=0.1)
        out.append(session.log_probs(samples(session, 0, 4)))
    return out


@pytest.mark.parametrize(
    "changes",
    [{}, MIXED | {"parallelism.reshard_after_forward": "never"}, MAPPINGS["pp 2, dp 2, ep 2"][1]],
    ids=["freed", "kept gathered", "pipeline"],
)
def test_an_update_renews_what_log_probs_have_gathered(changes: dict[str, Any]) -> None:
    expected, *_ = world.run(4, after_updates, changes, False)
    got, *_ = world.run(4, after_updates, changes, True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert not torch.allclose(*got)


BY_SAMPLE = {"moe.aux_loss_sequence": 0.01, "moe.z_loss": 0.001, "moe.jitter": 0.1}
"""The balance losses that do not depend on which samples form a microbatch."""


@functools.cache
def one_call() -> dict[str, Any]:
    """Two steps of one call each, on one rank."""
    return world.run(1, steps, BY_SAMPLE, [[(0, SAMPLES)], [(SAMPLES, 2 * SAMPLES)]])[0]


@pytest.mark.parametrize("name", MAPPINGS)
def test_any_calls_are_one_call_under_any_mapping(name: str) -> None:
    size, mapping = MAPPINGS[name]
    calls = [[(0, 1), (1, 6), (6, SAMPLES)], [(SAMPLES, 12), (12, 2 * SAMPLES)]]
    (got, *_) = world.run(size, steps, BY_SAMPLE | mapping, calls)
    compare(got, one_call())


def trained(changes: dict[str, Any], count: int) -> dict[str, Any]:
    """The same samples by the training loop's own step."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    reports = [trainer.train_step() for _ in range(count)]
    return {
        "reports": reports,
        "weights": parity.whole(trainer.training.parameters, trainer.training.runtime.rank, trainer.training.fold),
    }


@pytest.mark.parametrize("name", ["tp 2, ep 4", "pp 2, dp 2, ep 2"])
def test_a_call_is_a_step_of_the_training_loop_to_the_bit(name: str) -> None:
    size, mapping = MAPPINGS[name]
    changes = LOSSES | mapping | {"moe.jitter": 0.1}
    (expected, *_) = world.run(size, trained, changes, 2)
    (got, *_) = world.run(size, steps, changes, [[(0, 4)], [(4, 8)]])
    assert got["reports"] == expected["reports"]
    for weight, value in expected["weights"].items():
        assert torch.equal(got["weights"][weight], value), weight


def test_calls_of_full_microbatches_count_for_balance_losses_by_microbatch() -> None:
    """aux_loss and aux_loss_global depend on which samples form a microbatch and on those before them."""
    (expected, *_) = world.run(2, steps, LOSSES, [[(0, 8)]])
    (got, *_) = world.run(2, steps, LOSSES, [[(0, 2), (2, 8)]])
    compare(got, expected)


def given_in_other_ways(changes: dict[str, Any]) -> list[torch.Tensor]:
    session = open_session(changes)
    everywhere = samples(session, 0, SAMPLES)
    data = session.meshes.data
    spans = [(0, 3), (3, SAMPLES)] if data.size > 1 else [(0, SAMPLES)]
    own = samples(session, *spans[data.rank])
    some = everywhere if session.training.runtime.rank == session.training.runtime.world - 1 else None
    first = session.log_probs(everywhere)
    on_one = session.log_probs(some)
    of_own = session.log_probs(own, per_data_rank=True)
    result = session.forward_backward(own, per_data_rank=True, log_probs=True)
    (start, end) = spans[data.rank]
    assert torch.equal(first, on_one)
    torch.testing.assert_close(of_own, first[start:end], rtol=0, atol=1e-12)
    torch.testing.assert_close(result.log_probs, first[start:end], rtol=0, atol=1e-12)
    return [first, result.loss, session.optim_step()["grad_norm"]]


def test_a_batch_may_be_on_one_rank_or_in_parts_on_data_ranks() -> None:
    mapping = {"parallelism.cp": 2, "parallelism.experts.ep": 4}
    (log_p, loss, norm), *others = world.run(4, given_in_other_ways, mapping)
    assert all(torch.equal(log_p, other[0]) and loss == other[1] for other in others)
    ((expected, first_loss, first_norm),) = world.run(1, given_in_other_ways, {})
    torch.testing.assert_close(log_p, expected, rtol=0, atol=1e-12)
    assert float(loss) == pytest.approx(float(first_loss), rel=1e-12) and norm == pytest.approx(first_norm, rel=1e-12)


def weighted(log_p_BL: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A function that is no sum over positions: it sees full samples, in order."""
    weight_BL = batch.extra_fields["weight"]
    return -(log_p_BL * weight_BL).sum() + (log_p_BL.cumsum(1) * weight_BL).tanh().sum()


def of_a_function(changes: dict[str, Any], calls: list[tuple[int, int]]) -> Any:
    session = open_session(changes)
    batches = []
    for span in calls:
        batch = samples(session, *span)
        weight = torch.stack([parity.weight(session.config, n) for n in range(*span)]).double()
        batches.append(batch._replace(extra_fields={"weight": weight}))
    counts = [session.count(batch, weighted, divisor=len(batch.tokens_BS)) for batch in batches]
    counts += [session.count(batch) for batch in batches]
    total = sum(counts[1:], counts[0])
    for batch in batches:
        session.forward_backward(batch, weighted, counts=total)
        session.forward_backward(batch, counts=total)
    report = session.optim_step(rate=0.02)
    assert report["lr"] == 0.02
    return {
        "reports": [report],
        "weights": parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold),
        "log_probs": torch.zeros(1),
    }


@pytest.mark.parametrize("name", ["cp 2, etp 2", "pp 2, dp 2, ep 2", "shared vocabulary"])
def test_a_function_and_an_objective_in_one_step(name: str) -> None:
    size, mapping = MAPPINGS[name]
    (expected, *_) = world.run(1, of_a_function, {}, [(0, SAMPLES)])
    (got, *_) = world.run(size, of_a_function, mapping, [(0, 3), (3, SAMPLES)])
    compare(got, expected)


def sgd_of(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after a step of plain descent, of which AdamW would hide a factor of the ranks in the loss."""
    session = open_session(changes)
    training = session.training

    @torch.no_grad()
    def descend(rate: float, norm: torch.Tensor) -> None:
        for name, shard in training.optimizer.local_shards.items():
            shard.add_(local_grad(training.gradients.trained[name]), alpha=-rate)

    with mock.patch.object(training.optimizer, "step", descend):
        session.forward_backward(samples(session, 0, 4), lambda log_p, batch: -log_p.sum())
        session.optim_step(rate=0.1)
    return parity.whole(training.parameters, training.runtime.rank, training.fold)


def test_gradients_of_a_function_have_no_factor_of_the_ranks() -> None:
    without_clipping = {"optimizer.max_grad_norm": 0.0}
    (expected, *_) = world.run(1, sgd_of, without_clipping)
    (got, *_) = world.run(2, sgd_of, without_clipping)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def spikes(changes: dict[str, Any]) -> list[int]:
    """Number of skipped steps after each of a row, whose functions have a spike of the loss, then of the gradients."""
    session, skipped = open_session(changes), []
    for factor, shift in [(1, 0)] * 4 + [(1, 1e6), (1e4, 0), (1, 0)]:
        session.forward_backward(samples(session, 0, 4), lambda log_p, batch: shift - factor * log_p.sum())  # noqa: B023
        skipped.append(session.optim_step()["skipped_steps"])
    return skipped


def test_a_spike_of_a_function_is_one_of_the_gradient_norm() -> None:
    """Rewards move its loss. The skipped samples have no numbers to report."""
    (skipped, *_) = world.run(2, spikes, {"optimizer.skip_spikes": 6.0, "optimizer.skip_window": 8})
    assert skipped == [0, 0, 0, 0, 0, 1, 1]


def with_the_recipes_data(changes: dict[str, Any]) -> list[Any]:
    """The losses of two steps by the page's function, and by the training loop on the same data."""
    names: dict[str, Any] = {}
    exec(next(block for block in blocks() if "def step_of_the_recipe" in block), names)
    session, trainer = open_session(changes), parity.make_trainer(changes)
    loader = Loader(session.config, session.meshes.data.rank, session.meshes.data.size)
    rows = [[names["step_of_the_recipe"](session, loader), trainer.train_step()] for _ in range(2)]
    return [[report["loss"] for report in row] for row in rows]


def test_a_recipes_data_is_read_where_the_caller_opens_it() -> None:
    changes = MAPPINGS["pp 2, dp 2, ep 2"][1] | {"data.source": "synthetic"}
    for mine, theirs in world.run(4, with_the_recipes_data, changes)[0]:
        assert mine == pytest.approx(theirs, rel=1e-12)


def misuse(changes: dict[str, Any]) -> list[str]:
    session, messages = open_session(changes), []
    batch = samples(session, 0, 2)

    def refused(call: Any) -> None:
        with pytest.raises(ConfigError) as error:
            call()
        messages.append(str(error.value))

    refused(session.optim_step)
    refused(lambda: Session(session.config, session.training, ids=49))
    refused(lambda: session.forward_backward(None))
    refused(lambda: session.forward_backward(batch, "dpo2"))
    refused(lambda: session.forward_backward(batch, "distillation"))
    refused(lambda: session.forward_backward(batch, weighted, counts=session.count(batch)))
    refused(lambda: session.log_probs(batch, temperature=0.0))
    refused(lambda: session.forward_backward(batch, temperature=0.0))
    refused(lambda: session.count(batch, divisor=0))
    assert session.step == 0
    session.forward_backward(batch)
    refused(lambda: session.forward_backward(batch))
    refused(lambda: session.save("nowhere"))
    session.optim_step()
    assert session.step == 1
    distilled = dataclasses.replace(session.config.training, objective="distillation")
    session.config = dataclasses.replace(session.config, training=distilled)
    for unlike in ({"temperature": 0.5}, {}):
        refused(lambda: session.log_probs(batch, **unlike))  # noqa: B023
        session.ids = IDS
    refused(lambda: session.forward_backward(batch, squares, temperature=2.0, entropy=True))
    return messages


def test_misuse_is_refused_with_what_to_do() -> None:
    (messages,) = world.run(1, misuse, {})
    wanted = [
        "there are no gradients: call forward_backward before optim_step",
        "ids = 49 do not fit model.vocab_size = 48",
        "no rank has a batch",
        "dpo2",
        'set training.objective = "distillation"',
        "counts has no objective",
        *["temperature = 0.0"] * 2,
        "divisor = 0 divides the loss",
        "total = run.count(a) + run.count(b)",
        "a step is open: call optim_step before save",
        *['the head of objective "distillation" returns neither entropies'] * 3,
    ]
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


def test_a_batch_is_padded_and_its_mistakes_are_named() -> None:
    shape = {"seq_len": 6, "model": dataclasses.replace(Config().model, vocab_size=10)}
    batch = make_batch(
        [[1, 2, 3], [4, 5, 6, 7]], documents=[[0, 0, 1], [0, 0, 2, 2]], columns={"reward": [0.5, 2.0]}, **shape
    )
    assert batch.tokens_BS.tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0]]
    assert batch.labels_BS.tolist() == [[2, -100, -100, -100, -100, -100], [5, -100, 7, -100, -100, -100]]
    assert batch.position_BS[:, :4].tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]
    assert batch.valid_BS.sum(1).tolist() == [3, 4] and batch.extra_fields["reward"].tolist() == [0.5, 2.0]
    column = make_batch(torch.ones(2, 3, dtype=torch.int64), columns={"weight": torch.ones(2, 3)}, **shape)
    assert column.extra_fields["weight"].tolist() == [[1, 1, 1, 0, 0, 0]] * 2
    assert make_batch([], **shape).tokens_BS.shape == (0, 6)
    for ids, more, message in (
        ([[1] * 7], {}, "sample 0 has 7 ids, and training.seq_len is 6"),
        ([[1, 10]], {}, "id 10 is none of the vocabulary's 10 ids"),
        ([[1, 2]], {"labels": [[-100, 10]]}, "label 10 is none of the vocabulary's 10 ids"),
        ([[1, 2]], {"labels": [[1]]}, "labels has 1 values for 2 ids of sample 0"),
        ([[1, 2]], {"columns": {"weight": [[1.0, 1.0], [1.0, 1.0]]}}, "weight has 2 samples and ids 1"),
        ([[1, 2]], {"columns": {"weight": [[1.0, 1.0, 1.0]]}}, "weight has 3 values for 2 ids of sample 0"),
        ([[1, 2]], {"columns": {"routes": [torch.zeros(3, 2, 2)]}}, "routes has 3 values for 2 ids of sample 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_batch(ids, **more, **shape)


def saved_and_resumed(changes: dict[str, Any], folder: str, resume: bool) -> Any:
    session = open_session(changes)
    if resume:
        from titanmoe.checkpoint.checkpoint_folder import Checkpoint

        session.training.checkpoints.load(Checkpoint(Path(folder)))
        assert session.step == 1
    for step in range(2):
        if not resume or step:
            session.forward_backward(samples(session, 4 * step, 4 * step + 4))
            session.optim_step()
        if not resume and not step:
            session.save(folder)
    return parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold)


def test_a_saved_step_goes_on_under_another_mapping(tmp_path: Path) -> None:
    folder = str(tmp_path / "of/a run")
    (expected, *_) = world.run(4, saved_and_resumed, MAPPINGS["tp 2, ep 4"][1], folder, False)
    (got, *_) = world.run(2, saved_and_resumed, {"parallelism.pp": 2, "pipeline.schedule": "1F1B"}, folder, True)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def blocks() -> list[str]:
    page = (processes.ROOT / "docs/training_api.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run_functions_of_the_page(changes: dict[str, Any]) -> list[float]:
    names: dict[str, Any] = {}
    for block in blocks()[1:]:
        exec(block, names)
    session = open_session(changes)
    ids = [[1, 2, 3, 4], [5, 6, 7]]
    report = names["two_calls"](session, session.batch(ids[:1]), session.batch(ids[1:]))
    expected = -float(session.log_probs(session.batch(ids))[0].sum()) / 2
    policy = names["policy_step"](session, ids, None, [[1.0] * 4, [0.0] * 3])
    old, new, mismatch = names["replay_step"](session, ids)
    assert torch.equal(old, new) and mismatch == 0
    generator = session.log_probs(session.batch(ids)).cpu() + 0.1
    watched = names["grpo_step"](session, ids, None, [1.0, 0.0], ["a prompt"] * 2, generator)
    assert watched["policy.ratio_p50"] == 1 and watched["policy.mismatch"] == pytest.approx(0.1)
    assert watched["policy.entropy"] > 1
    sent: dict[str, torch.Tensor] = {}
    other = open_session(changes)
    names["train_and_hand_over"](session, other, [ids, ids], sent.__setitem__)
    assert len(sent) > 50 and torch.equal(session.log_probs(session.batch(ids)), other.log_probs(other.batch(ids)))
    return [report["tokens"], policy["tokens"], policy["loss"], expected]


def test_the_pages_functions_make_steps() -> None:
    ((tokens, policy_tokens, loss, expected),) = world.run(1, run_functions_of_the_page, {})
    assert tokens == policy_tokens == 7
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_the_pages_program_learns(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(blocks()[0], encoding="utf-8")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sums.py"]
    done = processes.Started(words, cwd=tmp_path, forks=True).wait(120)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0]
    assert (tmp_path / "sums/checkpoint/manifest.json").is_file()


def a_reference_beside(changes: dict[str, Any]) -> None:
    """A second run in the same processes is a frozen copy; without adapters the first gives the same numbers."""
    lora = {"lora.rank": 2, "lora.experts_rank": 2}
    session, seams = open_session(changes | lora), {"loader": NoLoader, "garbage": parity.no_collection}
    config = scoring_config(parity.read(changes, 2))
    reference = Session(config, parity.build_trainer(config, session.training.runtime, **seams).training)
    batch = samples(session, 0, 4)
    before = reference.log_probs(batch)
    for _ in range(3):
        session.forward_backward(batch)
        session.optim_step(rate=0.05)
    assert torch.equal(reference.log_probs(batch), before)
    torch.testing.assert_close(session.log_probs(batch, adapters=False), before, rtol=0, atol=1e-12)
    assert not torch.allclose(session.log_probs(batch), before, atol=1e-3)
    with pytest.raises(ConfigError, match="trains=False"):
        reference.forward_backward(batch)


def test_a_reference_model_runs_beside_or_under_the_adapters() -> None:
    world.run(2, a_reference_beside, {"parallelism.experts.ep": 2})


def bytes_of_a_reference(changes: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a reference model on this rank, and those planned for it."""
    config = parity.read(changes, dist.get_world_size())
    seams = {"loader": NoLoader, "garbage": parity.no_collection}
    training = parity.build_trainer(scoring_config(config), parity.runtime_here(), **seams).training
    assert not training.optimizer.moments()
    planned = rank_memories(config, training.fold, reference=True)[training.meshes.pp.rank]
    return sum(nbytes(to_local(p)) for p in training.parameters.values()), planned.components["reference"]


def nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@pytest.mark.parametrize("name", ["tp 2, ep 4", "pp 2, dp 2, ep 2"])
def test_the_memory_of_a_reference_model_is_planned(name: str) -> None:
    size, mapping = MAPPINGS[name]
    for held, planned in world.run(size, bytes_of_a_reference, MIXED | mapping):
        assert held == planned > 0


# ---- temperature and entropy


def squares(log_p_BL: torch.Tensor, batch: Batch) -> torch.Tensor:
    return log_p_BL.square().sum()


def at_a_temperature(changes: dict[str, Any]) -> dict[str, Any]:
    """A step of a function at temperature 0.6, its log-probabilities and entropies, and the weights after it."""
    session = open_session(changes)
    batch = samples(session, 0, SAMPLES)
    counts = session.count(batch, squares)
    with mock.patch.object(vocabulary, "cross_entropy", wraps=vocabulary.cross_entropy) as computed:
        before = session.log_probs(batch, temperature=0.6)
    logits = [call.args[0] for call in computed.call_args_list]
    result = session.forward_backward(batch, squares, counts=counts, temperature=0.6, log_probs=True, entropy=True)
    assert torch.equal(before, result.log_probs)
    assert torch.equal(session.log_probs(batch), session.log_probs(batch, temperature=1.0))
    session.optim_step(rate=0.1)
    weights = parity.whole(session.training.parameters, session.training.runtime.rank, session.training.fold)
    return {"log_probs": result.log_probs, "entropy": result.entropy, "weights": weights, "logits": logits}


@functools.cache
def at_a_temperature_alone() -> dict[str, Any]:
    return world.run(1, at_a_temperature, {})[0]


def test_a_temperature_divides_the_logits() -> None:
    got = at_a_temperature_alone()
    log_p = (torch.cat(got["logits"])[: got["log_probs"].numel()] / 0.6).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1).view_as(got["entropy"])
    has_label = got["entropy"] != 0
    assert has_label.sum() > 50 and (has_label == (got["log_probs"] != 0)).all()
    torch.testing.assert_close(got["entropy"], entropy.where(has_label, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks"), [("tp 2, ep 4", 3), ("cp 2, etp 2", 0), ("pp 2, dp 2, ep 2", 3), ("shared vocabulary", 3)]
)
def test_temperature_and_entropy_are_the_same_under_any_mapping(name: str, chunks: int) -> None:
    size, changes = MAPPINGS[name]
    got, *_ = world.run(size, at_a_temperature, changes | {"training.loss_chunks": chunks})
    for key in ("log_probs", "entropy"):
        torch.testing.assert_close(got[key], at_a_temperature_alone()[key], rtol=1e-10, atol=1e-12)
    for key, value in at_a_temperature_alone()["weights"].items():
        torch.testing.assert_close(got["weights"][key], value, rtol=1e-10, atol=1e-12, msg=key)


# ---- a padded vocabulary

IDS = 45
"""Ids that exist, of a vocabulary of 48: on tp 2 the second rank has all of the padding."""


def with_padding(changes: dict[str, Any]) -> dict[str, Any]:
    """A step of samples whose ids all exist, with the others left out; log-probabilities, entropies and weights."""
    trainer = parity.make_trainer(changes, loader=NoLoader)
    session = Session(parity.read(changes, trainer.training.runtime.world), trainer.training, ids=IDS)
    batch = samples(session, 0, SAMPLES)
    labels_NS = batch.labels_BS.where(batch.labels_BS < IDS, IGNORE)
    batch = session.batch(batch.tokens_BS.clamp(max=IDS - 1), labels_NS)
    with mock.patch.object(vocabulary, "cross_entropy", wraps=vocabulary.cross_entropy) as computed:
        session.log_probs(batch)
    logits = [call.args[0] for call in computed.call_args_list]
    before = parity.whole(session.training.parameters, session.rank, session.training.fold)
    result = session.forward_backward(batch, squares, log_probs=True, entropy=True)
    session.optim_step(rate=0.1)
    weights = parity.whole(session.training.parameters, session.rank, session.training.fold)
    head = "head.weight"
    return {
        "log_probs": result.log_probs,
        "entropy": result.entropy,
        "weights": weights,
        "logits": logits,
        "padding moves": head in weights and not torch.equal(weights[head][IDS:], before[head][IDS:]),
    }


@functools.cache
def with_padding_alone() -> dict[str, Any]:
    return world.run(1, with_padding, {"optimizer.weight_decay": 0.0})[0]


def test_ids_that_do_not_exist_have_no_probability() -> None:
    got = with_padding_alone()
    logits_TV = torch.cat(got["logits"])[: got["log_probs"].numel()]
    assert logits_TV.shape[1] == IDS and not got["padding moves"]
    log_p = logits_TV.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1).view_as(got["entropy"])
    assert (got["entropy"] != 0).sum() > 50
    torch.testing.assert_close(got["entropy"], entropy.where(got["entropy"] != 0, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "chunks"), [("tp 2, ep 4", 3), ("tp 2, ep 4", 0), ("pp 2, dp 2, ep 2", 3)])
def test_padding_is_the_same_under_any_mapping(name: str, chunks: int) -> None:
    size, changes = MAPPINGS[name]
    more = {"training.loss_chunks": chunks, "optimizer.weight_decay": 0.0}
    got, *_ = world.run(size, with_padding, changes | more)
    expected = with_padding_alone()
    for key in ("log_probs", "entropy"):
        torch.testing.assert_close(got[key], expected[key], rtol=1e-10, atol=1e-12)
    for key, value in expected["weights"].items():
        torch.testing.assert_close(got["weights"][key], value, rtol=1e-10, atol=1e-12, msg=key)
