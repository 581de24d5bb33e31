"""Rows that travel while something is computed: in two halves, and beside the other half of a pair."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titanmoe import rank
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.fold.legality import violations
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.devices import Device, choose_device, read_device
from titanmoe.plan.dispatch_costs import HALVES, HALVES_WEIGHTS, DispatchChoice, hidden_by_pairs, seconds_in_chunks
from titanmoe.plan.links import Factors
from titanmoe.plan.planned_overlap import ON_CPUS, planned_overlap, with_overlap
from titanmoe.plan.schedule_cost import schedule_rows
from titanmoe.plan.search import evaluate, search
from titanmoe.rehearse.code_site import GATHER, REDUCE
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse
from titanmoe.train.runtime import Runtime

H100 = read_device("h100")
PLANNED = "--moe.overlap=auto"
SLOW = replace(H100, link=20e9, network=5e9)
SMALL = (
    "--model.family mixtral --model.size debug --model.vocab_size 256 --model.dim 2048 --model.num_layers 2 "
    "--model.num_heads 8 --model.num_kv_heads 2 --model.head_dim 128 --model.num_experts 16 --model.expert_hidden 64 "
    "--training.seq_len 1024 --training.local_batch_size 1 --training.global_batch_size 8 --data.source synthetic "
    "--parallelism.experts.ep 8"
)


def recipe(name: str, *changes: str) -> Config:
    return load(["--config", f"train_configs/{name}.toml", *changes], COMPONENTS, lambda config: [])


def test_the_wire_and_the_experts_do_one_thing_at_a_time() -> None:
    assert seconds_in_chunks(3, 5, 2, 1) == 3 + 5 + 2
    assert seconds_in_chunks(1, 5, 1, 2) == 1 + 2 * 5 + 1  # products hide all but the first and the last message
    assert seconds_in_chunks(5, 1, 5, 2) == 4 * 5  # the wire is never idle
    assert seconds_in_chunks(3, 5, 2, 1, before=4) == 4 + 5 + 2


def test_halves_cost_what_a_rehearsal_counts() -> None:
    """Bytes of a layer beside its products: sums of gradients, and joined outputs and gradients of inputs. Left out are
    the partial sums of a norm's gradient, whose number does not depend on the tokens: here there are few."""
    moved, norms = Counter(), ("rms_norm_backward", "sum")
    for overlap in ("none", "halves"):
        words = f"{SMALL} --training.local_batch_size 2 --training.global_batch_size 16 --moe.overlap {overlap}"
        config = recipe_to_rehearse(words.split(), 8, "h100")
        for operation, count in rehearse(config, 8, 0, "h100").operations.items():
            site, name = operation.site, operation.name
            if site.layer == "layers.1" and site.region not in (GATHER, REDUCE) and name not in norms:
                moved[overlap, operation.site.phase] += (
                    (not operation.flops) * count * (operation.read + operation.written)
                )
    model = config.model
    tokens = 2 * config.training.seq_len * model.dim
    weights = 3 * model.num_experts // 8 * model.dim * model.expert_hidden
    weights += model.dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    for phase, added in (("forward", HALVES * tokens), ("backward", HALVES * tokens + HALVES_WEIGHTS * weights)):
        assert moved["halves", phase] - moved["none", phase] == pytest.approx(added, rel=0.1)


def test_halves_hide_what_travels_beside_attention_and_experts() -> None:
    assert seconds_in_chunks(1, 5, 1, 2, between=3) == 3 + 2 * 5 + 1  # all but the last message back
    assert seconds_in_chunks(5, 1, 5, 2, between=3) == 4 * 5  # the wire is never idle
    half_as_fast = replace(H100, link=H100.link / 2)
    config = recipe("mixtral_8x7b", PLANNED, "--training.local_batch_size=2")
    halves = evaluate(config, 8, half_as_fast, Factors())
    assert halves.config.moe.overlap == "halves"
    whole = evaluate(with_overlap(config, "none"), 8, half_as_fast, Factors())
    rows = "dispatch and combine"
    assert halves.price.step < whole.price.step
    assert 0.25 < halves.price.components[rows] / whole.price.components[rows] < 0.6
    assert halves.price.components["waiting for the host"] > 1.8 * whole.price.components["waiting for the host"]


def test_halves_gain_less_than_megatron_measured_of_two_microbatches() -> None:
    """Qwen3-30B-A3B on 16 H100s with ep 16: 41.25 s without overlap and 31.31 s with it (NVIDIA-NeMo/Megatron-Bridge,
    skills/nemo-mbridge-perf-expert-parallel-overlap/SKILL.md)."""
    changes = "--parallelism.experts.ep=16", "--training.global_batch_size=1024", "--training.local_batch_size=2"
    steps = [
        evaluate(recipe("qwen3_30b_a3b", *changes, way), 16, H100, Factors()).price.step
        for way in ("--moe.overlap=none", "--moe.overlap=halves")
    ]
    assert 1.08 < steps[0] / steps[1] < 41.25 / 31.31


def test_the_search_takes_halves_where_they_pay() -> None:
    best = search(recipe("gpt_oss_20b"), 8, H100, Factors(), count=3).best
    assert best[0].config.moe.overlap == "halves" and best[0].config.training.local_batch_size > 1


def planned(config: Config, world: int, device: Device) -> str:
    return planned_overlap(config, world, device)[0].moe.overlap


def test_overlap_is_planned_where_it_pays() -> None:
    config, whole = recipe("mixtral_8x7b", PLANNED, "--training.local_batch_size=2"), recipe("mixtral_8x7b")
    assert planned(config, 8, H100) == "none"
    assert planned(config, 8, SLOW) == "halves"
    assert planned(config, 8, replace(SLOW, name="cpu")) == "none"
    assert planned_overlap(whole, 8, SLOW) == (whole, "")
    assert evaluate(config, 8, SLOW, Factors()).config == planned_overlap(config, 8, SLOW)[0]
    best = search(config, 8, replace(SLOW, memory=150e9), Factors(), count=3).best
    assert any(mapping.config.moe.overlap == "halves" for mapping in best)
    assert planned(recipe("kimi_k2"), 1024, H100) == "pairs"
    assert planned(recipe("kimi_k2", "--pipeline.schedule=Interleaved1F1B"), 1024, H100) == "none"


@pytest.mark.parametrize(
    ("changes", "overlap"),
    {
        "--moe.dispatcher=allgather": "none",
        "--parallelism.experts.ep=1": "none",
        "--moe.overlap=none": "none",
        "--moe.overlap=halves": "halves",
        "--moe.capacity_factor=1.5": "none",  # what is dropped would depend on the half
    }.items(),
)
def test_only_what_is_open_and_legal_is_planned(changes: str, overlap: str) -> None:
    config = recipe("qwen3_235b_a22b", "--parallelism.experts.ep=16")
    assert planned(config, 256, SLOW) == "halves"
    config = recipe("qwen3_235b_a22b", "--parallelism.experts.ep=16", changes)
    assert planned(config, 256, SLOW) == overlap
    config, _ = planned_overlap(config, 256, SLOW)
    assert not violations(config, 256) and not contradictions(config)


def test_a_run_on_gpus_takes_what_is_planned_for_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("gpt_oss_20b")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    none, why = planned_overlap(config, 8, choose_device("NVIDIA B200"))
    assert none.moe.overlap == "none" and "the planner finds nothing that saves 2% of" in why

    def from_rank_0(names: list[str]) -> None:
        assert names == ["NVIDIA B200"]
        names[0] = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(dist, "broadcast_object_list", from_rank_0)
    on_gpus, why = rank.plan_overlap(config, Runtime(3, 3, 8, torch.device("cuda", 3)))
    assert on_gpus == with_overlap(config, "halves")
    assert why == (
        'halves, because moe.overlap = "auto" and the planner finds 7.24 s a step with that on h100 and 7.49 s without'
    )
    assert rank.plan_overlap(config, Runtime(3, 3, 8, torch.device("cpu"))) == (with_overlap(config, "none"), ON_CPUS)
    assert rank.plan_overlap(on_gpus, Runtime(3, 3, 8, torch.device("cuda", 3))) == (on_gpus, "")


@pytest.mark.parametrize(("name", "overlap"), {"h100": "halves", "b200": "none", "cpu": "none"}.items())
def test_a_rehearsal_is_of_what_is_planned_for_its_hardware(name: str, overlap: str) -> None:
    config = recipe_to_rehearse(["--config", "train_configs/gpt_oss_20b.toml"], 8, name)
    assert config.moe.overlap == overlap


def test_plans_and_rehearsals_say_how_dispatch_overlaps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt_oss_20b", "--explain"]) == 0
    assert "16 microbatches of 2; dispatch overlaps in two halves.\n" in capsys.readouterr().out
    assert main(["plan", "gpt_oss_20b", "--explain", "--moe.overlap", "none"]) == 0
    assert "16 microbatches of 2.\n" in capsys.readouterr().out
    small = [*SMALL.split(), "--ranks", "8", "--training.local_batch_size", "2", "--training.global_batch_size", "16"]
    assert main(["rehearse", *small, "--moe.overlap", "halves"]) == 0
    assert "\n    dispatch   in two halves\n" in capsys.readouterr().out
    assert main(["rehearse", *small]) == 0
    assert "    dispatch   " not in capsys.readouterr().out.partition("One step")[0]


def test_a_device_is_found_by_the_name_of_a_gpu() -> None:
    assert [
        choose_device(gpu).name for gpu in ("NVIDIA GB200", "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "Tesla T4")
    ] == [*("gb200", "b200", "a100", "h100")]


def test_a_group_that_does_not_fill_its_last_domain_lies_in_it_too() -> None:
    costs = BlockCosts(recipe("deepseek_671b"), read_device("gb200"), Factors())  # 72 GPUs a domain
    assert [costs.domains(ep, 1) for ep in (8, 72, 96, 128, 256)] == [1, 1, 2, 2, 4]


def test_the_hop_across_nodes_stays_in_one_piece() -> None:
    priced = BlockCosts(recipe("deepseek_671b"), SLOW, Factors())
    whole, halves = (
        priced.experts(4, 1, 4, 16, 1, DispatchChoice("hierarchical", in_halves))[0].dispatch
        for in_halves in (False, True)
    )
    across = priced.exchange("hierarchical", 1024, 16, 1) - priced.exchange("alltoall", 1024, 8, 1)
    assert whole > halves > (1 - H100.message_fraction) * across


def test_pairs_of_the_first_rank() -> None:
    for pp, microbatches in ((2, 16), (4, 32), (8, 64)):
        row = schedule_rows("DualPipeV", pp, 2, microbatches)[0]
        pairs, forwards = sum(len(cell) == 2 for cell in row), 2 * microbatches
        assert hidden_by_pairs(pp, microbatches, 1) == pytest.approx(min(0.37, pairs / forwards / 2))
    assert hidden_by_pairs(8, 8, 4) == 0
    config = recipe(
        "deepseek_671b", "--parallelism.pp=16", "--pipeline.schedule=DualPipeV", "--activation_checkpoint.mode=none"
    )
    alone, pairs = (evaluate(with_overlap(config, way), 512, H100, Factors()).price for way in ("none", "pairs"))
    rows = "dispatch and combine"
    assert 0.6 < pairs.components[rows] / alone.components[rows] < 0.8 and pairs.step < alone.step


def test_the_search_pairs_where_rows_take_long() -> None:
    best = search(recipe("qwen2_57b_a14b"), 64, H100, Factors(), count=4).best
    assert any(mapping.config.moe.overlap == "pairs" for mapping in best)
