"""Stacks: what other software's code, a slow host and memory that is nearly full change of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.plan.communicators import usable_bytes
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.plan_table import degrees_text, explanation, table
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.search import Search, evaluate
from titanmoe.plan.training_stacks import AUTOMODEL, MEGATRON, STACKS, TITANMOE, TORCHTITAN, Stack, stack_of

H100 = read_device("h100")
QWEN = "train_configs/qwen3_30b_a3b.toml"


def recipe(*words: str) -> Config:
    return load([QWEN, *words], COMPONENTS, lambda config: [])


def price(config: Config, stack: Stack, ranks: int = 16) -> Price:
    return Pricer(config, H100, Factors(), 1.0, stack).price(config, derive(ranks, config.parallelism))


def test_an_unknown_stack_is_refused_with_those_that_there_are() -> None:
    assert stack_of("megatron") is MEGATRON
    with pytest.raises(ConfigError, match="--stack = nemo is not known: use titanmoe, megatron, automodel, torchtitan"):
        stack_of("nemo")


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_prices_a_recipe(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", QWEN, "--ranks", "16", "--explain", "--stack", name]) == 0
    assert "A step takes" in capsys.readouterr().out


def test_memory_bound_work_is_what_torchtitans_operations_move() -> None:
    ours, theirs = (price(recipe(), stack).components["memory-bound work"] for stack in (TITANMOE, TORCHTITAN))
    more = price(recipe(), replace(TITANMOE, memory=2.0)).components["memory-bound work"]
    assert 3 < theirs / ours < 4 and more == pytest.approx(2 * ours, rel=0.1)


def test_copies_of_weights_are_those_of_fsdp2() -> None:
    assert price(recipe(), MEGATRON).components["copies of weights"] == 0
    assert price(recipe(), AUTOMODEL).components["copies of weights"] > 0


def test_ranks_of_etp_gather_tokens_or_receive_a_copy_each() -> None:
    config = recipe("--parallelism.experts.ep=2", "--parallelism.experts.etp=4", "--moe.dispatcher=alltoall")
    copies, gathered = (
        price(config, replace(TITANMOE, gathers_etp=gathers)).components["dispatch and combine"]
        for gathers in (False, True)
    )
    assert gathered < 0.85 * copies


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    config = recipe("--training.seq_len=128", "--training.local_batch_size=1")
    slow, fast = (price(config, replace(TITANMOE, host=host, host_tp=host)) for host in (0.02, 1e-9))
    launches = slow.microbatches * config.model.num_layers * 0.02
    assert slow.step > launches and slow.step - fast.step > 0.6 * launches
    again = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="full"))
    assert price(again, replace(TITANMOE, host=0.02)).step > slow.step + 0.3 * launches


def test_gradients_that_are_reduced_once_a_step_have_fewer_messages() -> None:
    often, once = (
        price(recipe(f"--parallelism.reduce_once={choice}", "--training.local_batch_size=1"), TITANMOE).components
        for choice in ("false", "true")
    )
    assert once["weights and gradients"] < 0.8 * often["weights and gradients"]


@pytest.mark.parametrize(("fraction", "warns"), [(0.9, False), (0.97, True), (1.01, False)])
def test_memory_within_5_percent_is_warned_of(fraction: float, warns: bool) -> None:
    mapping = evaluate(recipe(), 16, H100, Factors())
    usable = usable_bytes(mapping.config, mapping.fold, H100)
    full = replace(mapping, memory=[replace(mapping.memory[0], components={"weights": int(fraction * usable)})])
    result = Search([full], None, None, 1)
    for lines in (explanation(full, H100), table(result, H100, 16)):
        assert any("the allocator may free and allocate again" in line for line in lines) == warns
    assert any("GB!" in line for line in table(result, H100, 16)) == warns


@pytest.mark.parametrize(
    ("slower", "says"),
    [(1, "is number 1."), (1.1, "is number 2, 10.0% slower than the fastest: a tie."), (2, "number 2, 100.0% slower")],
)
def test_the_best_unfolded_mapping_is_listed_once(slower: float, says: str) -> None:
    best = evaluate(recipe(), 16, H100, Factors())
    unfolded = replace(best, price=replace(best.price, step=best.price.step * slower))
    lines = table(Search([best], unfolded, None, 1), H100, 16)
    assert says in lines[-1] and sum(degrees_text(best.fold) in line for line in lines) == 1 + (slower > 1)
    assert any("=: 2 ties" in line for line in lines) == (slower == 1.1)
