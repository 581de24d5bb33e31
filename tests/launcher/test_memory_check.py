"""The check of memory before a start: what is refused, what is offered, and that what is offered does fit."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGPU
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.load import read_draft
from titanmoe.fold.degrees import derive
from titanmoe.launcher import fit_ranks, memory_check
from titanmoe.launcher.fit_ranks import Machine
from titanmoe.launcher.train_command import parse_words, prepare
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.search import evaluate, search
from titanmoe.train import out_of_memory
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS, AdamWSpec, OptimizerSpec

CPUS, GPUS = Machine(0, 2, 24 << 30), Machine(8, 64, 80 << 30)
LONG = ("debug", "--training.seq_len", "16384", "--training.local_batch_size", "64", "--training.global_batch_size=-1")


@pytest.fixture
def on(monkeypatch):
    def use(machine: Machine) -> None:
        monkeypatch.setattr(fit_ranks, "this_machine", lambda device: machine)

    use(CPUS)
    return use


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as refusal:
        prepare(parse_words(words))
    return refusal.value


def test_a_recipe_that_does_not_fit_is_refused_with_what_would_do(on):
    (problem,) = refused("olmoe_7b_a1b").problems
    match = re.fullmatch(
        r"8 ranks need at least (\d+) GB of memory here, and this machine has 25.8 GB \(weights, gradients and "
        r"optimizer state alone are (\d+.\d) GB a rank\): (\d) H100 GPUs are enough, as titanmoe plan olmoe_7b_a1b "
        r"--ranks \3 --hardware h100 shows; --memory ignore starts it all the same",
        problem,
    )
    assert match, problem
    whole, state, count = map(float, match.groups())
    assert state == pytest.approx(16 * 6.92 / 8, rel=0.01) and whole > 8 * state, "6.92 billion weights in float32"
    config = read_draft(["--config", "olmoe_7b_a1b"], COMPONENTS).config
    h100 = read_device("h100")
    fits = [bool(search(config, n, h100, Factors(), count=1).best) for n in (int(count) // 2, int(count))]
    assert fits == [False, True], "and half of them are not"


TRIAL = ["--data.source=synthetic", "--checkpoint.enable=false"]
"""Without what a recipe needs on the disk."""


def test_it_can_be_started_all_the_same(on):
    prepared = prepare(parse_words(["olmoe_7b_a1b", "--memory", "ignore", *TRIAL]))
    assert prepared.nproc == 8 and "memory" not in " ".join(prepared.request.words)
    assert "--memory 'no' is not ignore" in refused("debug", "--memory", "no").problems[0]
    on(Machine(0, 2))  # a system that does not say how much it has
    assert prepare(parse_words(["olmoe_7b_a1b", *TRIAL])).nproc == 8


def test_small_recipes_start(on):
    for recipe in ("debug", "debug_pp", "debug_5d"):
        assert prepare(parse_words([recipe])).config.job.name == recipe


def test_the_smallest_change_that_fits_is_offered(on):
    (problem,) = refused(*LONG).problems
    (change,) = re.findall(r"a rank\): (.*) fits; --memory ignore", problem)
    assert change == "--training.local_batch_size 16 --training.global_batch_size 128", "the same batch, in more pieces"
    assert prepare(parse_words([*LONG, *change.split()])).config.training.global_batch_size == 128
    assert " 32 --training.global_batch_size" not in change and refused(
        *LONG, "--training.local_batch_size=32", "--training.global_batch_size=128"
    )


def test_neither_a_mapping_nor_ranks_are_offered_that_do_not_fit(on):
    (problem,) = refused("deepseek_671b").problems
    assert "is for 512 ranks (job.ranks)" in problem and "to run it here" not in problem
    assert "with --ranks auto --fit, 2 ranks need at least 12.2 TB of memory here, and this machine has" in problem
    assert problem.endswith(
        "256 H100 GPUs are enough, as titanmoe plan deepseek_671b --ranks 256 --hardware h100 shows"
    )
    fit = refused("deepseek_671b", "--ranks", "auto", "--fit").problems[0]
    assert fit.startswith("2 ranks need at least 12.2 TB") and "plan deepseek_671b --ranks 256" in fit
    offer = refused("deepseek_671b", "--ranks", "auto").offer
    assert offer.startswith("The nearest mapping that fits 2 ranks: ") and "--fit takes it" not in offer
    assert "2 ranks need at least 12.2 TB" in offer
    many = refused("debug", "--job.ranks", "64").problems[0]
    assert many.endswith("or --ranks auto --fit to run it here")


def test_a_gpu_is_of_one_rank(on):
    on(GPUS)
    words = ["mixtral_8x7b", "--training.local_batch_size", "4", "--training.global_batch_size", "1024"]
    (problem,) = refused(*words, "--activation_checkpoint.mode", "none").problems
    assert re.match(r"a rank needs at least \d+(\.\d)? GB of memory, and a GPU of this machine has 85.9 GB \(", problem)
    (change,) = re.findall(r"a rank\): (.*) fits; ", problem)
    assert prepare(parse_words([*words, "--activation_checkpoint.mode", "none", *change.split(), *TRIAL])).nproc == 8
    on(Machine(8, 64, 26 << 30))
    (problem,) = refused("mixtral_8x7b").problems
    assert re.search(r"\): (\d+) GPUs of 27.9 GB are enough, as titanmoe plan mixtral_8x7b --ranks \1 --hard", problem)
    on(Machine(64, 64, 28 << 30))
    (problem,) = refused("qwen2_57b_a14b").problems
    assert "): 64 GPUs of 30.1 GB are enough with another mapping, as titanmoe plan" in problem


def test_symmetric_memory_that_does_not_fit_is_refused_and_alltoall_offered(on):
    """On these GPUs mixtral_8x7b fits with alltoall, which auto is not here."""
    on(GPUS)
    for dispatcher in ("auto", "symm_mem"):
        (problem,) = refused("mixtral_8x7b", "--moe.dispatcher", dispatcher).problems
        assert problem.startswith("a rank needs at least 91 GB") and ": --moe.dispatcher alltoall fits" in problem
    assert prepare(parse_words(["gpt_oss_20b", "--moe.dispatcher", "auto", *TRIAL])).nproc == 8, "overlap may be halves"


def test_moments_in_the_hosts_memory_are_not_on_the_gpu_and_machines_hold_their_own_ranks():
    config = read_draft(["--config", "debug_pp"], COMPONENTS).config
    on_gpu = memory_check.memory_need(config, 4, 4, GPUS)
    config.optimizer.offload = True
    offloaded = memory_check.memory_need(config, 4, 4, GPUS)
    assert offloaded.rank < on_gpu.rank and offloaded.state * 2 == pytest.approx(on_gpu.state, rel=0.01)
    assert memory_check.memory_need(config, 4, 4, CPUS) == on_gpu, "without GPUs it is the same memory"
    one_rank, two_ranks = memory_check.memory_need(config, 4, 1, CPUS), memory_check.memory_need(config, 4, 2, CPUS)
    assert one_rank.machine == one_rank.rank and two_ranks.machine == 2 * one_rank.rank > on_gpu.machine / 2, (
        "the first stage holds most"
    )


COMPLETIONS = (
    *("--rl.reward", "exact", "--rl.prompts", "x.jsonl", "--validation.interval", "0", "--training.seq_len", "2048"),
    *("--generation.max_tokens", "1024", "--generation.parallelism.ep", "8", "--rl.prompts_per_step", "1024"),
)


def test_completions_are_counted_as_the_planner_counts_them(on):
    config = read_draft(["--config", "mixtral_8x7b", *COMPLETIONS, "--generation.batch_size", "64"], COMPONENTS).config
    trains = dataclasses.replace(config, rl=dataclasses.replace(config.rl, reward=""))
    needs = []
    for samples, batch, offloads in ((4, 64, False), (1, 1024, False), (1, 1024, True)):
        config.training.local_batch_size = samples
        config.generation.batch_size, config.generation.offload_training = batch, offloads
        needs.append(memory_check.memory_need(config, 8, 8, GPUS))
        planned = evaluate(config, 8, read_device("h100"), Factors())
        assert needs[-1].rank == planned.peak > memory_check.memory_need(trains, 8, 8, GPUS).rank
        on_cpu = memory_check.memory_need(config, 8, 8, CPUS)
        assert on_cpu.machine == 8 * on_cpu.rank and (offloads or on_cpu.rank < planned.peak)
    assert [need.generating for need in needs] == [False, True, True]
    assert needs[2].rank < needs[1].rank
    config.optimizer.offload = True
    assert memory_check.memory_need(config, 8, 8, GPUS).rank == needs[2].rank, "moments are left out once"
    for table, name, wrong in (
        (config.generation.parallelism, "ep", 3),
        (config.generation, "max_tokens", 2048),
        (config.generation, "batch_size", 1),
    ):  # which are refused elsewhere
        setattr(table, name, wrong)
        assert not memory_check.memory_need(config, 8, 8, GPUS).generating
        setattr(table, name, {"ep": 8, "max_tokens": 1024, "batch_size": 1024}[name])


def test_fewer_completions_at_a_time_are_offered(on):
    on(GPUS)
    (problem,) = refused("mixtral_8x7b", *COMPLETIONS, "--generation.batch_size", "1024").problems
    assert re.match(r"a rank needs at least \d+(\.\d)? GB of memory to generate completions, and a GPU of", problem)
    assert ": --generation.batch_size 64 fits; " in problem


class StatelessSpec(OptimizerSpec):
    reads = tuple(set(AdamWSpec.reads) - {"offload"})
    numbers_per_weight = 0


def test_the_state_is_that_of_the_optimizer(on, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS.table, "stateless", StatelessSpec())
    config = read_draft(["--config", "debug_pp"], COMPONENTS).config
    with_moments = memory_check.memory_need(config, 4, 4, CPUS)
    config.optimizer.name = "stateless"
    without = memory_check.memory_need(config, 4, 4, CPUS)
    assert without.state * 2 == pytest.approx(with_moments.state, rel=0.01) and without.rank < with_moments.rank
    assert all(rank.moments == 0 for rank in rank_memories(config, derive(4, config.parallelism)))
    assert sum(out_of_memory._state_bytes(5, 5, config, torch.device("cuda")).values()) == 10
    assert "optimizer.offload" not in "".join(out_of_memory.advise_settings(config, 9, 1, 8))
    (problem,) = refused("olmoe_7b_a1b", "--optimizer.name", "stateless").problems
    assert float(re.findall(r"alone are (\d+\.\d+) GB a rank", problem)[0]) == pytest.approx(8 * 6.92 / 8, rel=0.01)


def test_moments_are_offered_a_place_in_the_hosts_memory_if_the_optimizer_can_have_them_there(on, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS.table, "stateless", StatelessSpec())
    config = read_draft(["--config", "debug"], COMPONENTS).config
    assert {"optimizer.offload": True} in list(memory_check._alternatives(config, 2, GPUS))[-2]
    config.optimizer.name = "stateless"
    assert list(memory_check._alternatives(config, 2, GPUS))[-2] == [{}]


@pytest.mark.parametrize(
    ("gpu", "gib", "device", "figures"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100", "A100"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100", "H100"),
        ("NVIDIA H200", 139.8, "h200", "H200"),
        ("NVIDIA B200", 178.4, "b200", "B200"),
        ("NVIDIA GB200", 184.0, "gb200", "GB200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "", "A100 but for memory"),
        ("", 80, "h100", "H100 by memory, as the planner does not know the name of these GPUs"),
        ("GPU of tomorrow", 140, "h200", "H200 by memory, as the planner does not know GPU of tomorrow"),
        ("NVIDIA RTX A1000", 6, "", "H100 but for memory, as the planner does not know NVIDIA RTX A1000"),
    ],
)
def test_the_name_of_a_gpu_decides_for_what_it_is_planned(gpu: str, gib: float, device: str, figures: str):
    memory = int(gib * 2**30)
    similar, words = memory_check.similar_device(Machine(8, 64, memory, gpu))
    assert (similar.name, words) == (device, figures)
    bandwidth = read_device(figures.split()[0].lower()).bandwidth
    assert similar.bandwidth == bandwidth and similar.memory == pytest.approx(memory, rel=0.1)


def test_the_advice_says_whose_figures_it_has_if_not_by_name(on):
    for gpu, end in (
        ("NVIDIA A100-SXM4-80GB", "--hardware a100 shows; --memory ignore starts it all the same"),
        ("GPU of tomorrow", "shows (figures of H100 by memory, as the planner does not know GPU of tomorrow); --memory "
         "ignore starts it all the same"),
    ):  # fmt: skip
        on(Machine(8, 64, 80 << 30, gpu))
        (problem,) = refused("mixtral_8x22b", "--ranks", "8", "--fit").problems
        assert problem.endswith(end), problem


def test_ranks_fit_the_smallest_gpu():
    with FakeGPU(2):
        machine = fit_ranks.this_machine("auto")
        assert (machine.gpus, machine.memory, machine.gpu_name) == (2, fake_gpu.ROOM, "NVIDIA H100 80GB HBM3")
        assert fit_ranks.this_machine("cpu").gpus == 0
