"""The loop of reinforcement learning: equal completions, rewards and steps under any pair of mappings and on resume."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import signal
import string
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests import parity, world
from tests.support.live_bytes import bytes_alive
from titanmoe.data.batch import ROUTES, Batch
from titanmoe.generate.loop import Generator
from titanmoe.rl import policy_trainer
from titanmoe.rl.policy_trainer import PolicyTrainer, PromptLoader
from titanmoe.session import Session
from titanmoe.tokens import NOT_RECORDED
from titanmoe.train.run_folder import ROLLOUTS, ROUNDS

RUN: dict[str, Any] = {
    "model.vocab_size": 320,
    "training.seq_len": 32,
    "training.seed": 1,
    "training.steps": 4,
    "lr_schedule.min_ratio": 1.0,
    "rl.reward": "regex",
    "rl.prompts_per_step": 3,
    "rl.completions": 3,
    "rl.held_out": 4,
    "rl.eval_interval": 2,
    "generation.max_tokens": 5,
    "generation.batch_size": 6,
    "generation.temperature": 0.8,
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "checkpoint.keep_last": 0,
    "checkpoint.save": "sync",
    "job.name": "run",
}
MAPPINGS: dict[str, dict[str, Any]] = {
    "tp 2 ep 4, generates tp 2 ep 2": {
        "parallelism.tp": 2,
        "parallelism.experts.ep": 4,
        "generation.parallelism.tp": 2,
        "generation.parallelism.ep": 2,
    },
    "pp 2 ep 2, generates etp 2": {
        "parallelism.pp": 2,
        "pipeline.schedule": "1F1B",
        "parallelism.experts.ep": 2,
        "generation.parallelism.etp": 2,
    },
    "cp 2 etp 2, generates ep 4": {"parallelism.cp": 2, "parallelism.experts.etp": 2, "generation.parallelism.ep": 4},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": "ab" * (i % 3) + chr(97 + i), "solution": "[a-z]"} for i in range(11)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_trainer(folder: str, changes: dict[str, Any]) -> PolicyTrainer:
    config = parity.read(RUN | {"job.dump_folder": folder} | changes, parity.runtime_here().world)
    training = parity.build_trainer(
        config, parity.runtime_here(), garbage=parity.no_collection, loader=PromptLoader
    ).training
    return PolicyTrainer(config, training)


def train(folder: str, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On a rank: train, and return the full weights; the run's folder has the rest."""
    trainer = make_trainer(folder, changes)
    trainer.train()
    training = trainer.training
    return parity.whole(training.parameters, training.runtime.rank, training.fold)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def compare(one: Path, other: Path, weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert lines(one, ROLLOUTS) == lines(other, ROLLOUTS)
    for wanted, found in zip(lines(one, "metrics.jsonl"), lines(other, "metrics.jsonl"), strict=True):
        names = {
            name
            for name in wanted
            if name in ("loss", "grad_norm", "val_reward") or name.startswith(("rl.", "policy."))
        }
        names -= {"policy.routes_not_recorded"} - found.keys()  # without replay
        assert found.keys() >= names and names >= {"rl.reward", "policy.entropy", "policy.mismatch"}
        for name in names - {"rl.generate_s"}:
            assert found[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-11), name
        assert wanted["policy.mismatch_max"] < 1e-12 and found["policy.mismatch_max"] < 1e-12
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.fixture(scope="module")
def alone(prompts: Path, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    weights = world.run(1, train, str(folder), {"rl.prompts": [str(prompts)]})[0]
    of_steps = lines(folder, "metrics.jsonl")
    assert all(0 < line["rl.reward"] < 1 and line["grad_norm"] > 0 for line in of_steps)
    return folder, weights


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_pair_of_mappings_makes_the_same_run(mapping: str, alone, prompts: Path, tmp_path: Path) -> None:
    folder, weights = alone
    others = world.run(4, train, str(tmp_path), MAPPINGS[mapping] | {"rl.prompts": [str(prompts)]})[0]
    compare(folder, tmp_path, weights, others)


def test_a_resumed_run_completes_the_same_prompts_alike(alone, prompts: Path, tmp_path: Path) -> None:
    """Resume under other mappings, for training and for generating."""
    folder, weights = alone
    first, second, _ = MAPPINGS.values()
    world.run(4, train, str(tmp_path), first | {"rl.prompts": [str(prompts)], "training.steps": 2})
    others = world.run(4, train, str(tmp_path), second | {"rl.prompts": [str(prompts)]})[0]
    compare(folder, tmp_path, weights, others)


class Replayed(NamedTuple):
    """Result of a run in which each round's second step meets routers that have changed."""

    weights: dict[str, torch.Tensor]
    ratios: list[float]
    """Width of the ratio to the old policy, by step."""
    given: list[torch.Tensor | None]
    """Experts that the routers were given for all valid tokens, by step."""
    fresh: list[torch.Tensor]
    """Experts that they would choose themselves."""


def replayed(folder: str, changes: dict[str, Any]) -> Replayed:
    """On a rank: train two rounds of two steps, and record the experts."""
    given, fresh, make = [], [], Session.forward_backward

    def forward_backward(session: Session, batch: Batch, *args: Any, **options: Any) -> Any:
        result = make(session, batch, *args, routes=True, **options)
        routes = batch.extra_fields.get(ROUTES)
        given.append(None if routes is None else routes[batch.valid_BS])
        fresh.append(result.routes.experts_NSLK[batch.valid_BS])
        return result

    two = {"rl.updates": 2, "optimizer.lr": 0.05, "rl.truncation": 0.0, "rl.eval_interval": 0, "rl.held_out": 0}
    with mock.patch.object(Session, "forward_backward", forward_backward):
        weights = train(folder, two | {"checkpoint.enable": False} | changes)
    of_steps = lines(Path(folder), "metrics.jsonl")
    return Replayed(weights, [one["policy.ratio_p99"] - one["policy.ratio_p1"] for one in of_steps], given, fresh)


@pytest.fixture(scope="module")
def replayed_alone(prompts: Path, tmp_path_factory) -> dict[str, Replayed]:
    """Runs on one rank, by rl.replay."""
    return {
        replay: world.run(
            1, replayed, str(tmp_path_factory.mktemp(replay)), {"rl.prompts": [str(prompts)], "rl.replay": replay}
        )[0]
        for replay in ("off", "old", "rollout")
    }


def test_the_experts_are_the_routers_own_those_of_the_old_policy_or_those_of_the_generator(
    replayed_alone: dict[str, Replayed],
) -> None:
    """In float64 generator and old policy choose the same experts, so the two kinds of replay make the same run."""
    off, old, rollout = replayed_alone.values()
    assert off.given == [None] * 4
    for step in range(4):
        is_recorded = rollout.given[step] != NOT_RECORDED
        assert (~is_recorded).any(), "the generator has no route of the last token of a completion"
        assert torch.equal(old.given[step][is_recorded], rollout.given[step][is_recorded])
        assert (old.given[step] >= 0).all(), "the old policy has one"
        assert torch.equal(old.given[step], old.fresh[step]) == (step in (0, 2)), "a second step's routers have changed"
    for run in replayed_alone.values():
        assert run.ratios[0] < 1e-9 < run.ratios[1] and run.ratios[2] < 1e-9 < run.ratios[3]
    for name, value in old.weights.items():
        torch.testing.assert_close(rollout.weights[name], value, rtol=1e-9, atol=1e-11, msg=name)
    assert not all(torch.allclose(off.weights[name], value, atol=1e-6) for name, value in old.weights.items())


@pytest.mark.parametrize("replay", ["old", "rollout"])
@pytest.mark.parametrize("mapping", [*MAPPINGS][:2])
def test_replayed_experts_are_those_of_one_rank_under_any_mapping(
    mapping: str, replay: str, replayed_alone: dict[str, Replayed], prompts: Path, tmp_path: Path
) -> None:
    changes = MAPPINGS[mapping] | {"rl.prompts": [str(prompts)], "rl.replay": replay}
    got, expected = world.run(4, replayed, str(tmp_path), changes)[0], replayed_alone[replay]
    for mine, theirs in zip(got.given + got.fresh, expected.given + expected.fresh, strict=True):
        assert torch.equal(mine, theirs)
    for name, value in expected.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_the_divergence_is_from_the_weights_under_the_adapters(prompts: Path, tmp_path: Path) -> None:
    changes = {"rl.kl": 0.1, "lora.rank": 2, "optimizer.lr": 0.05, "rl.prompts": [str(prompts)]}
    world.run(2, train, str(tmp_path), changes | {"parallelism.experts.ep": 2, "generation.parallelism.ep": 2})
    first, *others = [line["policy.kl"] for line in lines(tmp_path, "metrics.jsonl")]
    assert first == 0 and all(value > 0 for value in others), "adapters begin as zeros"


TURNS: dict[str, Any] = {
    "rl.reward": "tests.support.odd_rewards:asks",
    "rl.max_turns": 3,
    "generation.max_tokens": 20,
    "generation.stop": list(string.ascii_letters),
    "training.steps": 2,
}


@pytest.fixture(scope="module")
def alone_with_turns(prompts: Path, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run on one rank, with an environment."""
    folder = tmp_path_factory.mktemp("turns")
    changes = TURNS | {"rl.prompts": [str(prompts)], "rl.reward_workers": 1}
    weights = world.run(1, train, str(folder), changes)[0]
    completions = lines(folder, ROLLOUTS)
    assert {len(line["turns"]) for line in completions} == {1, 3, 5}
    assert all(re.fullmatch(r"\d\?", message) for line in completions for message in line["turns"][1::2])
    assert any(line["is_cut"] and line["reward"] == -1 for line in completions if len(line["turns"]) == 5)
    assert all(1 < line["rl.turns"] < 3 and line["grad_norm"] > 0 for line in lines(folder, "metrics.jsonl"))
    return folder, weights


@pytest.mark.parametrize(("mapping", "replay"), [*zip(MAPPINGS, ("rollout", "off"), strict=False)])
def test_completions_of_several_turns_are_the_same_under_every_pair_of_mappings(
    mapping: str, replay: str, alone_with_turns, prompts: Path, tmp_path: Path
) -> None:
    folder, weights = alone_with_turns
    changes = TURNS | MAPPINGS[mapping] | {"rl.prompts": [str(prompts)], "rl.reward_workers": 8, "rl.replay": replay}
    compare(folder, tmp_path, weights, world.run(4, train, str(tmp_path), changes)[0])


def test_experts_of_several_turns_are_the_generators_and_the_old_policys(prompts: Path, tmp_path: Path) -> None:
    """A turn is read again with the next, and keeps its first experts; the trainer reads all turns at once."""
    changes = TURNS | {"rl.prompts": [str(prompts)]}
    rollout = world.run(1, replayed, str(tmp_path / "rollout"), changes)[0]
    mapping = {"parallelism.experts.ep": 2, "generation.parallelism.tp": 2, "rl.replay": "old"}
    old = world.run(2, replayed, str(tmp_path / "old"), changes | mapping)[0]
    assert lines(tmp_path / "old", ROLLOUTS) == lines(tmp_path / "rollout", ROLLOUTS)
    assert max(len(line["turns"]) for line in lines(tmp_path / "old", ROLLOUTS)) > 1
    for step in range(2):
        is_recorded = rollout.given[step] != NOT_RECORDED
        assert torch.equal(old.given[step][is_recorded], rollout.given[step][is_recorded])
        assert (old.given[step] >= 0).all(), "of messages, too"
        assert torch.equal(old.given[step], old.fresh[step]) == (step == 0)
    for run in (rollout, old):
        assert run.ratios[0] < 1e-9 < run.ratios[1]
    for name, value in rollout.weights.items():
        torch.testing.assert_close(old.weights[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_other_prompts_do_not_resume(prompts: Path, tmp_path: Path) -> None:
    world.run(1, train, str(tmp_path), {"rl.prompts": [str(prompts)], "training.steps": 2})
    changed = tmp_path / "changed.jsonl"
    changed.write_text(prompts.read_text().replace("ab", "ba"))
    with pytest.raises(Exception, match="the prompts of the run have changed since"):
        world.run(1, train, str(tmp_path), {"rl.prompts": [str(changed)]})


def train_and_listen(folder: str, changes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    """On a rank: train, and return the full weights and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        weights = train(folder, changes)
    return weights, out.getvalue()


def killed(folder: str, changes: dict[str, Any], where: str) -> None:
    """On a rank: train until the process of rank 0 is killed in step 3 or 4."""
    trainer = make_trainer(folder, changes)

    def kill_after(step: int, owner: Any, name: str, calls: int) -> None:
        whole, seen = getattr(owner, name), []

        def struck(*args: Any, **kwargs: Any) -> Any:
            seen.extend([name] * (trainer.step == step))
            if len(seen) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **kwargs)

        setattr(owner, name, struck)

    if trainer.session.rank:
        pass
    elif where == "generation":
        kill_after(2, trainer.live.generator, "_advance", 9)  # after those of the evaluation
    elif where == "reward":
        kill_after(2, trainer.rewards, "submit", 5)  # likewise
    else:  # gradients count the step
        kill_after(4, trainer.session, "optim_step", 1)
    trainer.train()


class Calm(NamedTuple):
    """Result of a run of two rounds of two steps that nothing interrupts."""

    changes: dict[str, Any]
    folder: Path
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def calm(prompts: Path, tmp_path_factory) -> Calm:
    changes = {"rl.prompts": [str(prompts)], "rl.updates": 2, "optimizer.lr": 0.05}
    changes |= {"parallelism.experts.ep": 2, "generation.parallelism.tp": 2}
    folder = tmp_path_factory.mktemp("calm")
    return Calm(changes, folder, world.run(2, train, str(folder), changes)[0])


def resume(folder: Path, calm: Calm) -> str:
    """Resume the run of calm's recipe in a folder, check that it is calm's to the bit, and return what it prints."""
    resumed, printed = world.run(2, train_and_listen, str(folder), calm.changes)[0]
    assert all(torch.equal(value, resumed[name]) for name, value in calm.weights.items())
    assert lines(folder, ROLLOUTS) == lines(calm.folder, ROLLOUTS)
    return printed


AGAIN = "regenerated 18 completions of later steps, which no checkpoint has"


@pytest.mark.parametrize("where", ["generation", "reward", "second update"])
def test_a_killed_run_resumes_to_the_bit(where: str, calm: Calm, tmp_path: Path) -> None:
    """Kill it while it generates, is rewarded, or makes the second step from the same completions."""
    with pytest.raises(world.RankError):
        world.run(2, killed, str(tmp_path), calm.changes, where)
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")][-1] == (3 if where == "second update" else 2)
    if where == "generation":
        (rounds,) = tmp_path.rglob(ROUNDS)
        rounds.write_text(rounds.read_text().replace('"completions"', '"answers"'))  # as earlier versions
    printed = resume(tmp_path, calm)
    assert re.search(
        r"reward 0\.\d+ .* length \d+\.\d .* generate \d+\.\d s  rewards \d+\.\d s  learn \d+\.\d s", printed
    )
    assert AGAIN in " ".join(printed.split())


def stopped(folder: str, changes: dict[str, Any], where: str) -> tuple[int, int, str]:
    """On a rank: train until one rank gets a SIGTERM; return the signal, the forwards of completions that have no
    step, and what was printed.

    Rank 1 gets it with its third such forward, or rank 0 with the last completion, and then no reward comes.
    """
    trainer, taken, forwards = make_trainer(folder, changes), 6 if where == "first round" else 12, []
    advance, futures = trainer.live.generator._advance, []

    def advance_and_count(work: Any) -> Any:
        if trainer.loader.consumed == taken:
            forwards.append(work)
            if trainer.session.rank == 1 and len(forwards) == 3 and where != "reward":
                os.kill(os.getpid(), signal.SIGTERM)
        return advance(work)

    trainer.live.generator._advance = advance_and_count
    if where == "reward" and trainer.rewards:
        submit = trainer.rewards.submit

        def submit_or_wait(*args: Any) -> Future[Any]:
            if trainer.loader.consumed < taken:
                return submit(*args)
            futures.append(Future())
            if len(futures) == 18:
                os.kill(os.getpid(), signal.SIGTERM)
            return futures[-1]

        trainer.rewards.submit = submit_or_wait
    with mock.patch.object(policy_trainer, "MESSAGE_S", 0.1), contextlib.redirect_stdout(io.StringIO()) as printed:
        return trainer.train(), len(forwards), printed.getvalue()


@pytest.mark.parametrize("where", ["first round", "generation", "reward"])
def test_a_signal_stops_completions_and_the_run_resumes_to_the_bit(where: str, calm: Calm, tmp_path: Path) -> None:
    results = world.run(2, stopped, str(tmp_path), calm.changes, where)
    for number, forwards, _ in results:
        assert number == signal.SIGTERM and (where == "reward" or forwards == 4)
    assert where != "reward" or "SIGTERM: saving the steps before this one, then ending" in results[0][2]
    made = [] if where == "first round" else [1, 2]
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == made
    assert len([*(tmp_path / "run/checkpoints").glob("step-*")]) == len(made) / 2
    assert AGAIN in " ".join(resume(tmp_path, calm).split())


class Measured(PolicyTrainer):
    """Notes the bytes of this process's tensors while it generates, without host memory that stands for a GPU's."""

    def _complete(self, generator: Generator, *args: Any, **kwargs: Any) -> Any:
        host = sum(len(copy.host) for copy in self.live.host_copies or ())
        self.alive.append(bytes_alive() - host)
        return super()._complete(generator, *args, **kwargs)


def measured(folder: str, changes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """On a rank: train; return the weights, bytes alive when completions began, and those that can be freed."""
    gc.collect()  # what other tests have left on this rank
    before = bytes_alive()
    trainer = make_trainer(folder, changes)
    trainer.__class__, trainer.alive = Measured, []
    trainer.train()
    training, live = trainer.training, trainer.live
    weights = sum(shard.tensor.nbytes for _, shard in training.shards.values())
    assert not any(storage.nbytes() for storage, _ in live.memory), "the generator's weights are freed"
    assert all(each.x is None for cache in live.generator.caches for each in cache.stored), "so are its caches"
    whole = parity.whole(training.parameters, training.runtime.rank, training.fold)
    least = min(trainer.alive[2:])  # of later steps, because gloo's threads may hold a message for a while
    return whole, least - before, weights + sum(x.nbytes for x in training.optimizer.device_tensors if x.dim())


@pytest.mark.parametrize("mapping", list(MAPPINGS)[:2])
def test_training_gives_up_its_memory_while_generating(mapping: str, prompts: Path, tmp_path: Path) -> None:
    """Compare runs with and without it to the bit."""
    changes = MAPPINGS[mapping] | {"rl.prompts": [str(prompts)], "optimizer.lr": 0.05}
    stays = world.run(4, measured, str(tmp_path / "stays"), changes)
    leaves = world.run(4, measured, str(tmp_path / "leaves"), changes | {"generation.offload_training": True})
    assert all(torch.equal(value, leaves[0][0][name]) for name, value in stays[0][0].items())
    assert lines(tmp_path / "stays", ROLLOUTS) == lines(tmp_path / "leaves", ROLLOUTS)
    for (_, before, held), (_, after, _) in zip(stays, leaves, strict=True):
        assert before - after == pytest.approx(held, rel=0.05)
