"""What is refused, or filled in, before any process group exists and depends on where the processes run."""

import pytest

from titanmoe.config import ConfigError
from titanmoe.train.launch import read

HIERARCHICAL = ["--moe.dispatcher", "hierarchical", "--parallelism.experts.ep", "4"]


@pytest.fixture(autouse=True)
def on_a_machine_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_a_node_is_what_torchrun_started_here_unless_given():
    assert read(HIERARCHICAL, 4).parallelism.node == 2
    assert read([*HIERARCHICAL, "--parallelism.node", "1"], 4).parallelism.node == 1
    assert read(HIERARCHICAL[2:], 4).parallelism.node == -1


def test_experts_cut_by_a_node_are_refused():
    with pytest.raises(ConfigError, match=r"parallelism.node = 2 is neither .* use parallelism.node = 4, another"):
        read([*HIERARCHICAL[:2], "--parallelism.experts.etp", "4"], 4)


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch):
    from titanmoe.moe import kernels

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = ["--moe.kernels", "triton", "--training.device", "cpu", "--training.seq_len", "64"]
    with pytest.raises(ConfigError, match="but Triton compiles for GPUs"):
        read(asked, 1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert read(asked, 1).moe.kernels == "triton"
    monkeypatch.setattr(kernels, "installed", lambda: False)
    with pytest.raises(ConfigError, match="but Triton is not installed"):
        read(asked, 1)
