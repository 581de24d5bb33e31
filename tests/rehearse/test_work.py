"""FLOPs, bytes and kernels of operations."""

from __future__ import annotations

import pytest
import torch

from tests.rehearse.small import config_of
from titanmoe.config.schema import Config
from titanmoe.models.count import flops_per_token
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.work import Work, weight
from titanmoe.rehearse.world import rehearse

aten = torch.ops.aten


def test_operations() -> None:
    work, x, w = Work(), torch.zeros(4, 8), torch.zeros(8, 16)
    work.add(aten.mm.default, (x, w), {}, x @ w)
    assert work == Work(1, 2 * 4 * 8 * 16, 4 * (32 + 128), 4 * 64)
    work = Work()
    work.add(aten.embedding.default, (torch.zeros(1000, 8), torch.zeros(3, dtype=torch.int64)), {}, torch.zeros(3, 8))
    assert (work.read, work.written) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)
    work = Work()
    work.add(aten.view.default, (x, [32]), {}, x.view(32))
    work.add(aten.empty_like.default, (x,), {}, x)
    assert work == Work()
    assert weight(torch.zeros(4, 1).expand(4, 100)) == 16


def of(config: Config) -> Work:
    return rehearse(config, 1, 0, "h100").work


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_a_step_has_the_flops_that_its_model_is_said_to_have() -> None:
    """flops_per_token counts what MFU does: nothing recomputed; attention is a small part of it here."""
    wide = {"model.num_layers": 2, "model.dim": 64, "model.head_dim": 8, "model.expert_hidden": 128}
    wide |= {"training.mixed_precision_param": "bfloat16", "moe.kernels": "auto", "training.global_batch_size": 2}
    config = config_of(wide, 1, "h100")
    tokens = config.training.global_batch_size * config.training.seq_len
    counted, said = of(config).flops / tokens, flops_per_token(config.model, config.training.seq_len)
    assert counted == pytest.approx(said, rel=0.05)
