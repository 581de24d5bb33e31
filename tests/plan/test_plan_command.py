"""`titanmoe plan` as a user runs it: tables, a recipe to go on with, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.support.covering_mappings import legal_folds
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.plan import plan_command
from titanmoe.plan.candidates import Candidates
from titanmoe.plan.communicators import communicators, nccl_bytes
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.plan_table import TIE
from titanmoe.plan.price import Pricer
from titanmoe.plan.search import evaluate, is_unfolded, search
from titanmoe.plan.totals_by_mode import RECOMPUTE_MODES
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

RECIPE = "train_configs/debug.toml"
SMALL = ["--training.global_batch_size", "8"]


def plan(*words: str) -> int:
    return main(["plan", "--config", RECIPE, *words])


def test_a_written_recipe_passes_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, data = tmp_path / "best.toml", tmp_path / "plan.json"
    assert plan("--ranks", "4", "--write", str(file), "--json", str(data), "--tokens", "1e9", *SMALL) == 0
    output = capsys.readouterr().out
    assert "mappings on 4 h100" in output and "best unfolded" in output and "US dollars" in output
    best = json.loads(data.read_text())["best"]
    assert [mapping["step_s"] for mapping in best] == sorted(mapping["step_s"] for mapping in best)
    config = recipe_to_rehearse(["--config", str(file)], 4, "h100")
    assert rehearse(config, 4, 0, "h100").optimizer_bytes == best[0]["memory"][0]["moments"]


def test_frozen_weights_count_with_their_own_width(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "lora_qwen3_30b_a3b", "--ranks", "1", "--top", "1"]) == 0
    assert "mappings on 1 h100 that may fit" in capsys.readouterr().out


def test_a_reference_model_counts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Check that --reference adds the weights in the compute dtype, in the explanation and in the search."""
    peaks, small = [], [*SMALL, "--training.mixed_precision_param", "bfloat16"]
    for words in ([], ["--reference"]):
        data = tmp_path / "plan.json"
        assert plan("--ranks", "4", "--explain", "--json", str(data), *words, *small) == 0
        peaks.append(json.loads(data.read_text())["plan"]["memory"][0])
        assert ("reference " in capsys.readouterr().out) == bool(words)
    before, after = (peak["components"] for peak in peaks)
    weights = after.pop("reference")
    assert after == before and before["weights"] / 2 <= weights < 0.6 * before["weights"]
    assert plan("--ranks", "4", "--top", "1", "--json", str(data), "--reference", *small) == 0
    assert "reference" in json.loads(data.read_text())["best"][0]["memory"][0]["components"]


def test_explanation_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "plan.json"
    assert plan("--ranks", "4", "--explain", "--json", str(data), "--compile.enable", *SMALL) == 0
    output = capsys.readouterr().out
    assert "left out: compilation" in output and "matrix work" in output
    assert "which fits into 77.7 GB (85 GB less 2.3 GB for CUDA and fragmentation and 5.01 GB for NCCL" in output
    assert "mapping on 4 h100: dp_shard 2, tp 2, ep 4;" in output and "What helps: a larger microbatch" in output
    plan_json = json.loads(data.read_text())["plan"]
    assert sum(plan_json["time"].values()) == pytest.approx(plan_json["step_s"])
    assert all(sum(rank["components"].values()) == rank["peak"] for rank in plan_json["memory"])


@pytest.mark.parametrize("words", [["--lora.rank", "4"], ["--training.freeze", "*.experts.*"]])
def test_mappings_are_searched_where_a_part_of_the_weights_is_trained(
    words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert plan("--ranks", "4", *words, *SMALL) == 0
    assert "mappings on 4 h100" in capsys.readouterr().out


def test_explaining_what_does_not_fit_exits_1(capsys: pytest.CaptureFixture) -> None:
    words = ["--ranks", "8", "--explain", "--hardware", "a100", "--training.dtype", "float32"]
    assert main(["plan", "--config", "train_configs/mixtral_8x7b.toml", *words]) == 1
    assert "does not fit, by " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "0"], "--ranks = 0 is not a number of ranks"),
        (["--ranks", "4", "--hardware", "h900"], "h900 is not known"),
        (["--ranks", "4", "--what-if", "ranks=2,4"], "titanmoe plan once for each value"),
        (["--ranks", "4", "--imbalance", "0.5"], "is below 1"),
        (["--ranks", "4", "--imbalance", "1e30", *SMALL], "the busiest expert has 4 times the mean: use at most that"),
        (["--ranks", "4", "--imbalance", "5", "--explain", *SMALL], "takes the same 2 of 8 experts"),
        (["--ranks", "4", "--explain", "--write", "x"], "leave out --write"),
        (
            ["--ranks", "4", "--reference", "--lora.rank", "4", *SMALL],
            "the weights under the adapters are the reference",
        ),
        (["--ranks", "11", "--training.global_batch_size", "8"], "no mapping of 11 ranks is legal"),
        (["--ranks", "4", "--explain", "--parallelism.tp", "3"], "parallelism.tp = 3"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    assert plan(*words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("most", "says"), [(8, "8 GPUs are enough"), (4, "nor are 4 GPUs enough")])
def test_a_model_that_fits_nowhere(
    most: int, says: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "MOST_GPUS", most)
    words = ["--ranks", "2", "--training.global_batch_size", "8", "--hardware", "a100"]
    assert main(["plan", "--config", "train_configs/mixtral_8x7b.toml", *words]) == 2
    message = capsys.readouterr().err
    assert "no mapping of 2 a100 fits" in message and "on pipeline rank" in message and "too much" in message
    assert "of single changes --ranks 4 helps most" in message and f"which is still too much: {says}" in message


def test_the_table_lists_different_mappings() -> None:
    config = load(["--config", RECIPE, *SMALL], COMPONENTS, lambda config: [])
    best = search(config, 4, read_device("h100"), Factors(), count=5).best
    assert len({(fold.pp, fold.tp, fold.ep, fold.etp) for fold in (mapping.fold for mapping in best)}) == len(best) == 5
    assert [mapping.price.step for mapping in best] == sorted(mapping.price.step for mapping in best)


def test_other_mappings_are_not_bound_by_the_recipes_own_layers_per_stage() -> None:
    stages = "--model.num_layers 4 --parallelism.pp 2 --pipeline.layers_per_stage 3 1"
    restricted = load(["--config", RECIPE, *SMALL, *stages.split()], COMPONENTS, lambda config: [])
    free = replace(restricted, pipeline=replace(restricted.pipeline, layers_per_stage=[]))
    searches = [search(config, 4, read_device("h100"), Factors(), count=5).best for config in (restricted, free)]
    steps = [[mapping.price.step for mapping in best] for best in searches]
    assert steps[0] == steps[1] and len(steps[0]) == 5


def test_settings_of_the_recipes_own_mapping_are_named_where_others_are_searched(
    capsys: pytest.CaptureFixture,
) -> None:
    words = ["--ranks", "4", "--activation_checkpoint.mode", "full", "--activation_checkpoint.every", "2", *SMALL]
    note = "activation_checkpoint.every = 2 is not searched: every mapping has 1"
    assert plan(*words, "--top", "1") == 0
    assert note in capsys.readouterr().out
    plan(*words, "--explain")
    assert note not in capsys.readouterr().out


def test_differences_within_the_error_of_a_ratio_are_ties(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "plan.json"
    assert main(["plan", "train_configs/olmoe_7b_a1b.toml", "--top", "30", "--json", str(data)]) == 0
    best = json.loads(data.read_text())["best"]
    ties = [mapping["step_s"] / best[0]["step_s"] <= 1 + TIE for mapping in best]
    assert [mapping["within_error"] for mapping in best] == ties and 1 < sum(ties) < len(ties)
    lines = capsys.readouterr().out.splitlines()
    assert f"=: {sum(ties)} ties, within 13% of the fastest. Take the simplest of them." in lines
    assert {mapping["kind"] for mapping in best} > {"FSDP", "FSDP + EP"} and max(map(len, lines)) <= 100
    for i, (mapping, tie) in enumerate(zip(best, ties, strict=True), 1):
        step = f"{mapping['step_s']:.3g} s ±{mapping['range']:.0%}"
        assert sum(line.split()[:4] == [f"{i}{'=' * tie}", *step.split()] for line in lines) == 1


def test_no_schedule_that_splits_backward_is_proposed_with_recomputation(capsys: pytest.CaptureFixture) -> None:
    """DeepSeek-V3 under DualPipeV, pp 16 and full recomputation: planned 69.5 GB, rehearsed 108."""
    argv = ["--config", RECIPE, *SMALL]
    pricer = Pricer(load(argv, COMPONENTS, lambda config: []), read_device("h100"), Factors())
    proposed = {
        (candidate.schedule, candidate.mode)
        for candidate in Candidates(pricer.config, 4, pricer, math.inf)
        if candidate.fold.pp == 2
    }
    assert ("DualPipeV", "none") in proposed and ("1F1B", "full") in proposed
    assert not {("DualPipeV", mode) for mode in RECOMPUTE_MODES[1:]} & proposed
    split = "--parallelism.pp 2 --parallelism.experts.ep 2 --pipeline.schedule DualPipeV --model.num_layers 4"
    more = "--activation_checkpoint.mode full --training.global_batch_size 16"
    assert plan("--ranks", "4", "--explain", *split.split(), *more.split()) == 0
    assert "left out: what recomputation caches between both halves" in capsys.readouterr().out


def test_auto_is_explained_as_what_a_run_would_take_and_searched_as_alltoall(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data, auto = tmp_path / "plan.json", ["--ranks", "4", "--moe.dispatcher", "auto", *SMALL]

    def explained(*words: str) -> tuple[str, bool]:
        assert plan(*auto, "--explain", "--json", str(data), *words) == 0
        mapping = json.loads(data.read_text())["plan"]
        return mapping["dispatcher"], "symmetric buffers" in mapping["memory"][0]["components"]

    assert explained() == ("symm_mem", True) and "left out: the buffers" not in capsys.readouterr().out
    for words in (["--parallelism.node", "2"], ["--parallelism.experts.ep", "1"], ["--hardware", "cpu"]):
        assert explained(*words) == ("alltoall", False)
    capsys.readouterr()
    assert plan(*auto, "--json", str(data)) == 0
    assert 'moe.dispatcher = "auto" is searched as alltoall' in capsys.readouterr().out
    assert {mapping["dispatcher"] for mapping in json.loads(data.read_text())["best"]} == {"alltoall"}


def test_what_nccl_takes_follows_the_mapping() -> None:
    """A communicator for each axis, and rows go to every rank of the node directly."""
    argv = ["--config", "train_configs/mixtral_8x22b.toml"]
    device, counts = read_device("h100"), []
    for more in ([], ["--parallelism.experts.ep", "1"], ["--parallelism.dp_replicate", "2"], ["--parallelism.cp", "2"]):
        config = load([*argv, *more], COMPONENTS, lambda config: [])
        fold = derive(128, config.parallelism)
        counts.append((len(communicators(config, fold, 8)), nccl_bytes(config, fold, device)))
    (plain, plain_bytes), (without, without_bytes), (replicas, replicas_bytes), (ring, ring_bytes) = counts
    # the world, tp, dp, dp_shard x cp, edp, ep, pp; then edp and ep are not, the edp is of replicas, cp, cp x tp too.
    # pp has four, of which three take no more memory.
    assert (plain, without, replicas, ring) == (10, 9, 10, 12)
    assert plain_bytes == 7 * device.communicator + 7 * device.peer and without_bytes == 6 * device.communicator
    assert replicas_bytes == plain_bytes and ring_bytes == plain_bytes + 2 * device.communicator + device.peer


def test_the_search_finds_the_fastest() -> None:
    """Of all mappings that it may choose among, each evaluated by itself."""
    argv = ["--config", RECIPE, *SMALL, "--pipeline.schedule", "GPipe"]
    config, world, device = load(argv, COMPONENTS, lambda config: []), 4, read_device("h100")

    def with_mapping(fold: object, mode: str, samples: int) -> Config | None:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        degrees = [f"--parallelism.{name}={getattr(fold, name)}" for name in names]
        degrees += [f"--parallelism.experts.{name}={getattr(fold, name)}" for name in ("ep", "etp")]
        more = [f"--activation_checkpoint.mode={mode}", f"--training.local_batch_size={samples}"]
        mapped = load([*argv, *degrees, *more], COMPONENTS, lambda config: [])
        return None if violations(mapped, world) else mapped

    every = [
        evaluate(mapped, world, device, Factors())
        for fold, mode, samples in product(legal_folds(world), RECOMPUTE_MODES[::3], (1, 4))
        if fold.pp == 1 and fold.dp_replicate == fold.edp_replicate == 1
        if (mapped := with_mapping(fold, mode, samples)) is not None
    ]
    assert len(every) > 20
    fastest, unfolded_mappings = (
        search(config, world, device, Factors(), count=1),
        [mapping for mapping in every if is_unfolded(mapping.fold)],
    )
    assert fastest.best[0].price.step <= min(mapping.price.step for mapping in every) * (1 + 1e-9)
    assert fastest.best_unfolded.price.step <= min(mapping.price.step for mapping in unfolded_mappings) * (1 + 1e-9)


def test_the_search_keeps_weights_gathered_where_memory_allows() -> None:
    def reshards(choice: str) -> list[str]:
        words = ["--config", "train_configs/olmoe_7b_a1b.toml", f"--parallelism.reshard_after_forward={choice}"]
        found = search(load(words, COMPONENTS, lambda config: []), 8, read_device("h100"), Factors(), count=4).best
        return [one.config.parallelism.reshard_after_forward for one in found]

    assert set(reshards("auto")) == {"auto", "never"}  # with 8 samples in a microbatch, and with 4
    assert set(reshards("always")) == {"always"}  # the recipe says so
