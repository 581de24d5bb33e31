"""What is refused, or filled in, before any process group exists and depends on where the processes run."""

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.train.launch import read_config

HIERARCHICAL = ["--moe.dispatcher", "hierarchical", "--parallelism.experts.ep", "4"]


@pytest.fixture(autouse=True)
def on_a_machine_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_a_node_is_what_torchrun_started_here_unless_given():
    assert read_config(HIERARCHICAL, 4, COMPONENTS).parallelism.node == 2
    assert read_config([*HIERARCHICAL, "--parallelism.node", "1"], 4, COMPONENTS).parallelism.node == 1
    assert read_config(HIERARCHICAL[2:], 4, COMPONENTS).parallelism.node == -1


def test_experts_cut_by_a_node_are_refused():
    with pytest.raises(ConfigError, match=r"parallelism.node = 2 is neither .* use parallelism.node = 4, another"):
        read_config([*HIERARCHICAL[:2], "--parallelism.experts.etp", "4"], 4, COMPONENTS)


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch):
    from titanmoe.ops import kernels

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options = ["--moe.kernels", "triton", "--training.device", "cpu", "--training.seq_len", "64"]
    with pytest.raises(ConfigError, match="but Triton compiles for GPUs"):
        read_config(options, 1, COMPONENTS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert read_config(options, 1, COMPONENTS).moe.kernels == "triton"
    monkeypatch.setattr(kernels, "installed", lambda: False)
    with pytest.raises(ConfigError, match="but Triton is not installed"):
        read_config(options, 1, COMPONENTS)


def test_8_bit_products_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch):
    small = ["--training.device", "cpu", "--training.seq_len", "64"]
    with pytest.raises(ConfigError) as refused:
        read_config(
            [*small, "--moe.expert_dtype", "fp8", "--moe.grouped_mm", "loop", "--model.expert_hidden", "40"],
            1,
            COMPONENTS,
        )
    problems = refused.value.problems
    assert len(problems) == 3, problems
    assert 'moe.grouped_mm = "loop" asks for none' in problems[0]
    assert "model.expert_hidden / etp is 40: use a multiple of 16" in problems[1]
    assert 'needs 8-bit products, but the run is on CPUs, which have none: use expert_dtype = "compute"' in problems[2]
    assert read_config([*small, "--moe.expert_dtype", "fp8_emulated"], 1, COMPONENTS).moe.expert_dtype == "fp8_emulated"
