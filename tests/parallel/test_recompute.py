"""Recomputation changes no number: of latent attention, which then does not save queries, keys and values, and where
routed tokens are saved, whatever lies between a forward and its backward. Its mechanism is in one place."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from tests import parity
from tests.support.live_bytes import LiveBytes
from tests.support.masks import mask_of
from titanmoe.comm import recomputation
from titanmoe.config.schema import ActivationCheckpoint, Config, Model
from titanmoe.models.layers import rope_angles
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.alltoall import AllToAllExchange
from titanmoe.parallel import recompute
from titanmoe.parallel.recompute import RECOMPUTED_PARTS, apply_recomputation
from titanmoe.tokens import Tokens

B, S = 2, 16
ROOT = Path(__file__).parents[2]
MODEL = Model(
    dim=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    head_dim=16,
    v_head_dim=16,
)


def attention(model: Model, mode: str):
    made = Transformer(replace(Config(), model=model), 1, torch.float64)
    for seed, weight in enumerate(made.parameters()):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    apply_recomputation(made, ActivationCheckpoint(mode=mode))
    return made.layers["0"].attention


def run(model: Model, mode: str) -> tuple[list[Tensor], int]:
    module = attention(model, mode)
    x_BSD = torch.randn(B, S, model.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_angles(torch.arange(S).expand(B, S), model, model.qk_rope_head_dim, torch.float64)
    leaves = [x_BSD.requires_grad_(), *module.parameters()]
    mask = mask_of((torch.arange(S) // 5).expand(B, S))
    with LiveBytes() as live:
        y_BSD = module(x_BSD, rope, mask)
    kept = live.now
    first = torch.autograd.grad(y_BSD.square().sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y_BSD.square().sum(), leaves)  # schedules that split backward run it twice
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [y_BSD.detach(), *first], kept


@pytest.mark.parametrize("latent", [20, 0])
def test_what_is_made_of_latents_is_not_kept(latent: int) -> None:
    model = replace(MODEL, q_lora_rank=latent)
    want, whole = run(model, "none")
    got, kept = run(model, "selective")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    query, key, key_value = 16, 16, 8 + 16
    forgotten = key + key_value + (query if latent else 0)
    assert whole - kept >= B * S * 8 * model.num_heads * forgotten, f"{kept} of {whole} bytes"


def layers(mode: str) -> Callable[[], Tensor]:
    """Return the forward of two MoE layers."""
    model = Model(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=32)
    model = replace(model, num_experts=4, top_k=2, expert_hidden=16)
    made = Transformer(replace(Config(), model=model), 1, torch.float32, last=False)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    apply_recomputation(made, ActivationCheckpoint(mode=mode))
    index = torch.arange(B * S)
    ids = index.view(B, S) % model.vocab_size
    tokens = Tokens(index.view(B, S) % S, index, index // S, index >= 0, torch.tensor(0))
    return lambda: made(ids, tokens)


@pytest.mark.parametrize("mode", ["full", "full_except_dispatch"])
def test_backward_frees_what_a_region_cached(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although pipelines hold every output, and with it the nodes of its graph, until a step ends."""
    recomputations = []
    init = recomputation._Pass.__init__

    def noted(self: Any, cache: list[Any], recomputes: bool) -> None:
        init(self, cache, recomputes)
        if recomputes:
            recomputations.append(weakref.ref(self))

    monkeypatch.setattr(recomputation._Pass, "__init__", noted)
    forward = layers(mode)
    outputs = [forward() for _ in range(2)]
    regions = 2 * 2 * (2 if mode == "full_except_dispatch" else 1)
    assert len(recomputations) == regions and all(region() is not None for region in recomputations)
    for output in outputs:
        output.sum().backward()
    assert [region() for region in recomputations] == [None] * regions


@pytest.mark.parametrize("mode", ["moe", "full_except_dispatch"])
def test_a_dispatcher_that_saves_outputs_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation ends before the experts' outputs, so it would give their gradients wrong numbers."""
    finish_combine = AllToAllExchange.finish_combine
    monkeypatch.setattr(AllToAllExchange, "finish_combine", lambda *inputs: finish_combine(*inputs).sin())
    output = layers(mode)()
    with pytest.raises(RuntimeError, match=r"saved inside titanmoe\.comm\.recomputation\.save_tensors"):
        output.sum().backward()


def words_of(path: Path) -> set[str]:
    """Return the words of which a file's identifiers are made."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    fields = [getattr(node, name, None) for node in nodes for name in ("id", "attr", "arg", "name", "asname")]
    return {word for name in fields if isinstance(name, str) for word in name.split("_")}


def test_every_mode_is_in_the_table() -> None:
    modes = get_args(get_type_hints(ActivationCheckpoint)["mode"])
    assert set(modes) == set(RECOMPUTED_PARTS)
    assert all(f"\n    {mode} " in recompute.__doc__ for mode in modes)


def test_layers_experts_and_dispatchers_do_not_mention_what_is_recomputed() -> None:
    names = "layer", "experts", "expert_products", "halves", "capacity"
    folder = ROOT / "titanmoe" / "moe"
    for path in [*(folder / f"{name}.py" for name in names), *sorted((folder / "dispatchers").glob("*.py"))]:
        assert not words_of(path) & {"again", "keep", "kept"}, path


SAVED = {
    "all forwards first, beside a shared expert": {
        "parallelism.pp": 2,
        "pipeline.schedule": "GPipe",
        "parallelism.experts.ep": 2,
        "model.shared_hidden": 16,
    },
    "backward split in two, across nodes": {
        "parallelism.pp": 2,
        "pipeline.schedule": "ZBVZeroBubble",
        "model.num_layers": 4,
        "parallelism.experts.ep": 2,
        "moe.dispatcher": "hierarchical",
        "parallelism.node": 1,
    },
    "dropping and balance over ranks": {
        "parallelism.tp": 2,
        "parallelism.experts.ep": 4,
        "moe.dispatcher": "allgather",
        "moe.capacity_factor": 1.0,
        "moe.capacity_scope": "full_sequence",
        "moe.aux_loss_global": 0.02,
        "moe.aux_loss_sequence": 0.02,
    },
    "biases, unused rows": {
        "parallelism.experts.ep": 2,
        "parallelism.experts.etp": 2,
        "model.expert_linear_bias": True,
        "moe.dispatcher": "symm_mem",
    },
}


@pytest.mark.parametrize("case", SAVED, ids=lambda name: name.replace(" ", "_"))
def test_saved_routed_tokens_change_no_number(case: str) -> None:
    few: dict[str, Any] = {"training.global_batch_size": 8 if "pp" in str(SAVED[case]) else 4}
    parity.check(4, few | SAVED[case] | {"activation_checkpoint.mode": "full_except_dispatch"}, steps=1)
