"""Routing from the experts.jsonl of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.rehearse.small import config_of
from tests.rehearse.test_rehearse_command import SMALL, refused, rehearse
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.rehearse.assumed_routing import Routing
from titanmoe.rehearse.recorded_routing import assign_experts, recorded_routing
from titanmoe.rehearse.rehearsal import FakeLoader


@pytest.mark.parametrize("counts", [[1] * 8, [90, 4, 0, 30, 30, 2, 60, 1], [1, 1, 0, 0, 0, 0, 0, 0]])
def test_every_stretch_of_tokens_follows_the_shares_with_no_expert_twice(counts: list[int]) -> None:
    fraction_E = torch.tensor(counts) * 2 / sum(counts)
    for first, last in (0, 1000), (700, 1400):
        chosen_TK = assign_experts(torch.arange(first, last), fraction_E, 2)
        assert (chosen_TK[:, 0] != chosen_TK[:, 1]).all()
        load_E = torch.bincount(chosen_TK.flatten(), minlength=8)
        assert (load_E - fraction_E * (last - first)).abs().max() < 6


def lines(*loads: tuple[int, dict[str, list[int]]]) -> str:
    return "".join(json.dumps({"step": step, "load": load}) + "\n" for step, load in loads)


def written(folder: Path, text: str) -> Path:
    (folder / "experts.jsonl").write_text(text)
    return folder


FIRST = {"0": [1] * 8, "1": [8, 8, 0, 0, 0, 0, 0, 0]}
LAST = {"0": [4, 2, 2, 2, 2, 2, 1, 1], "1": [1] * 8}


def test_each_layer_has_its_own_routing_and_the_last_line_is_used(tmp_path: Path) -> None:
    config = config_of({"parallelism.experts.ep": 4}, 4, "cpu")
    run = written(tmp_path, lines((1, FIRST), (20, LAST)) + '{"step": 40, "lo')
    for step, load in (None, LAST), (20, LAST), (1, FIRST):
        routing = Routing(config, derive(4, config.parallelism), FakeLoader, recorded_routing(config, run, step))
        for layer in (0, 1):
            experts = torch.cat(
                [routing.chosen_experts(rank, m, layer).flatten() for rank in range(4) for m in range(2)]
            )
            shares = torch.bincount(experts, minlength=8) / len(experts)
            want = torch.tensor(load[str(layer)]) / sum(load[str(layer)])
            assert (shares - want).abs().max() < 0.03


def problem_text(folder: Path, text: str, step: int | None = None, **changes: int) -> str:
    config = config_of({f"model.{name}": value for name, value in changes.items()}, 1, "cpu")
    with pytest.raises(ConfigError) as error:
        recorded_routing(config, written(folder, text), step)
    return str(error.value)


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good = lines((1, FIRST), (20, LAST))
    assert "no line for step 3: the nearest steps are 1, 20" in problem_text(tmp_path, good, 3)
    assert "loads for layers 0, 1; the recipe has experts in 0, 1, 2" in problem_text(tmp_path, good, num_layers=3)
    assert "layer 0 has 8 experts, but the recipe has model.num_experts = 16" in problem_text(
        tmp_path, good, num_experts=16
    )
    assert "expert 0 of layer 1 has 8 of 16 routed tokens, but with model.top_k = 4" in problem_text(
        tmp_path, good, 1, top_k=4
    )
    for text in (
        "",
        "[]\n",
        "null",
        '{"step": 1, "load": {"0": [-1, 2]}}',
        '{"step": 1, "load": {"x": [1]}}',
        "[" * 9999,
    ):
        assert "has no line with expert loads" in problem_text(tmp_path, text)
    (run := tmp_path / "linked").mkdir()
    (run / "experts.jsonl").symlink_to(written(tmp_path, good))
    with pytest.raises(ConfigError, match=r"experts\.jsonl is a link to"):
        recorded_routing(Config(), run)
    options = ["--ranks", "4", "--routing", str(tmp_path / "none")]
    assert "cannot read" in refused(capsys, *options, *SMALL)
    assert "both set the routing" in refused(capsys, *options, "--imbalance", "2")
    assert "name the file with --routing" in refused(capsys, "--ranks", "4", "--routing-step", "2")


def test_the_output_says_that_it_estimates(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, file = written(tmp_path, lines((7, {"0": [16, 12, 0, 12]}))), tmp_path / "rank.json"
    options = ["--ranks", "4", "--routing", str(run), "--json", str(file), "--model.num_experts", "4"]
    assert rehearse(*options, *SMALL) == 0
    text = capsys.readouterr().out
    assert "routing as in step 7 of" in text and "what two ranks send each other, and all that depends on it" in text
    (report,) = json.loads(file.read_text())["ranks"]
    assert "is estimated" in report["estimates"] and "step 7" in report["routing"]
