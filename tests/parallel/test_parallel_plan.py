"""The parallel plan lists every parameter, refuses what does not fit, and follows from two rules but for exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests import parity
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.blocks import rotary_width
from titanmoe.config.fields import build
from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config, LoRA
from titanmoe.mask import CAUSAL
from titanmoe.models.families import family_of, names, qwen2_moe
from titanmoe.models.families.family import Family
from titanmoe.models.layers import rope_angles
from titanmoe.models.lora import add_adapters
from titanmoe.models.transformer import Block, Transformer
from titanmoe.parallel.parallel_plan import Plan, Sharded, TensorParallel, expand, make_plan, summing_ranks

FAMILY = Family({"debug": qwen2_moe.SIZES["debug"]}, plan={"moe.shared.w?.weight": None})
"""A family whose shared experts are replicated over tp and see only the rank's own tokens."""
WRONG = Family({"debug": qwen2_moe.SIZES["debug"]}, plan={"moe.shared.w9.*": None})


def config_of(family: str, **changes: Any) -> Config:
    named = {"model.family": family, "model.size": "debug"}
    config = build(named | family_of(family).preset(named), COMPONENTS)
    return replace(config, model=replace(config.model, **changes))


def stage(config: Config, layers: range, first: bool, last: bool) -> tuple[Transformer, Plan]:
    with torch.device("meta"):
        model = Transformer(config, 1, torch.float32, layers=layers, first=first, last=last)
        add_adapters(model, config)
    return model, make_plan(config, layers, first, last)


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_has_a_row_for_each_parameter(family: str, tied: bool) -> None:
    config = config_of(family, mtp_depth=1, tie_embeddings=tied, full_attention_every=2)
    config = replace(config, lora=LoRA(rank=2))
    for layers, first, last in ((range(4), True, True), (range(2), True, False), (range(2, 4), False, True)):
        model, plan = stage(config, layers, first, last)
        rows = expand(plan, model)
        listed = [f"{path}.{name}" for path, style in rows.items() for name in style.dims]
        assert sorted(listed) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
        gathering = {path for path, module in model.named_modules() if hasattr(module, "tp")}
        assert gathering == {path for path, style in rows.items() if isinstance(style, TensorParallel)}


def test_each_replicated_parameter_names_the_ranks_that_sum_its_gradient() -> None:
    config = replace(config_of("mixtral"), lora=LoRA(rank=2))
    model, plan = stage(config, range(2), True, True)
    rows, heads = expand(plan, model), config.model.num_kv_heads
    few, many = (summing_ranks(rows, tp) for tp in (heads, 2 * heads))
    assert {name for name, ranks in few.items() if ranks == "stage"} == {
        name for name, _ in model.named_parameters() if ".router." in name
    }
    assert few["layers.0.attention_norm.weight"] == few["head.norm.weight"] == "tp"
    assert few["layers.1.moe.experts.w1_lora_A"] == "etp" and "layers.1.moe.experts.w1" not in few
    assert set(many) - set(few) == {
        f"layers.{i}.attention.{module}.{name}"
        for i in range(2)
        for module in ("wk", "wv")
        for name in ("weight", "lora_B")
    }


def test_rows_and_parameters_without_the_other_are_refused_together() -> None:
    model, plan = stage(config_of("mixtral"), range(2), True, False)
    del plan["layers.*.attention.wo"]
    plan["layers.{0,7}.attention.wq"] = plan.pop("layers.*.attention.wq")
    plan["head"] = Sharded({"weight": 0})
    plan["embed"] = Sharded({"weight": 0, "bias": 0})
    with pytest.raises(ConfigError) as refused:
        expand(plan, model)
    assert refused.value.problems == [
        "the parallel plan has head, which is the name of no module",
        "the parallel plan lists embed.bias, which the model does not have",
        "no row of the parallel plan lists layers.0.attention.wo.weight",
        "no row of the parallel plan lists layers.1.attention.wo.weight",
        "no row of the parallel plan lists layers.1.attention.wq.weight",
    ]


@dataclass
class Recorded(ParallelStyle):
    modules: list[nn.Module] = field(default_factory=list)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.modules.append(module)
        return module


def test_a_pattern_is_what_torch_makes_of_it() -> None:
    model, plan = stage(config_of("mixtral"), range(2), True, True)
    recorded = {pattern: Recorded() for pattern in plan}
    parallelize_module(model, object(), recorded)
    rows = expand(plan, model)
    for pattern, style in recorded.items():
        assert style.modules == [model.get_submodule(path) for path, row in rows.items() if row is plan[pattern]]


# ---- the rules of Redco (arXiv 2310.16355)

VECTOR = "it is added to, or scales, outputs that tp shards"
LATENT = "latents are made of the rank's own tokens and gathered, and so narrower than the residual stream"
PER_HEAD = "it is no product: there is one for each head, or each channel of a head"
EXCEPTIONS = {
    **dict.fromkeys(("wq.bias", "wk.bias", "wv.bias", "wg_b.bias"), VECTOR),
    **dict.fromkeys(("q_norm.weight, over all heads", "k_norm.weight, over all heads"), VECTOR),
    **dict.fromkeys(("sinks", "conv_q", "conv_k", "conv_v", "dt_bias", "A_log"), PER_HEAD),
    **dict.fromkeys(("wq_a.weight", "wkv_a.weight"), LATENT),
    **dict.fromkeys(("wq_b.weight", "wkv_b.weight", "wo.weight, after latents"), "the first of two after the latents"),
    **dict.fromkeys(("wg_a.weight", "wg_b.weight"), "a bottleneck of 16, too narrow to shard"),
    "gate.weight": "one number for each token: there is nothing to divide",
}
"""Parameters of attention and feed-forward layers which the plan places otherwise than Redco would, and why."""


def depths(module: nn.Module, *inputs: Any) -> dict[str, int]:
    """Return how many products come before each of a module's matrices, by what changes when a matrix does."""
    matrices = {p.data_ptr(): (name, p) for name, p in module.named_parameters() if p.dim() == 2}

    def seen() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            found[matrices[weight.data_ptr()][0]] = x.clone()
            return linear(x, weight, bias)

        linear = F.linear
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(F, "linear", recorded)
            module(*inputs)
        return found

    before, after = seen(), {}
    for name, matrix in matrices.values():
        if name in before:
            own = matrix.data.clone()
            matrix.data += 1
            after[name] = {later for later, x in seen().items() if not torch.equal(x, before[later])}
            matrix.data.copy_(own)
    depth = dict.fromkeys(before, 0)
    for _ in before:
        for name, later in after.items():
            depth |= {other: max(depth[other], depth[name] + 1) for other in later}
    return depth


def by_two_rules(module: nn.Module, *inputs: Any) -> dict[str, int | None]:
    """Return the dim of each parameter by Redco's rules: of two consecutive products the first is divided by its
    outputs, the second by its inputs; in attention queries, keys and values are first, and the output is second. Biases
    and norms are whole."""
    depth = depths(module, *inputs)
    return {name: depth[name] % 2 if name in depth else None for name, _ in module.named_parameters()}


def differences(family: str, **changes: Any) -> set[str]:
    config = config_of(family, **changes)
    model = Transformer(config, 1, torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    rows, out = expand(make_plan(config, range(4)), model), set()
    x_BsD = torch.randn(1, 6, config.model.dim, generator=generator, dtype=torch.float64)
    rope = rope_angles(torch.arange(6).unsqueeze(0), config.model, rotary_width(config.model), torch.float64)

    def compare(path: str, *inputs: Any) -> None:
        module = model.get_submodule(path)
        for name, dim in by_two_rules(module, *inputs).items():
            place, _, parameter = f"{path}.{name}".rpartition(".")
            if rows[place].dims[parameter] != dim:
                over_heads = ", over all heads" * (name in ("q_norm.weight", "k_norm.weight"))
                out.add(name + over_heads + ", after latents" * (name == "wo.weight"))

    for number in range(4):
        block: Block = model.layers[str(number)]
        compare(f"layers.{number}.attention", x_BsD, rope, CAUSAL)
        if block.ffn is not None:
            compare(f"layers.{number}.ffn", x_BsD)
        elif block.moe.shared is not None:
            compare(f"layers.{number}.moe.shared", x_BsD)
    return out


@pytest.mark.parametrize("family", ["mixtral", "llama3_moe", "qwen3_moe"])
def test_rows_of_plain_attention_and_dense_layers_follow_from_two_rules(family: str) -> None:
    assert differences(family, num_dense_layers=2, dense_hidden=64, shared_hidden=64) == set()


def test_all_other_rows_that_do_not_follow_are_listed() -> None:
    found = [differences(family) for family in names()]
    found += [differences("qwen3_next", own=config_of("qwen3_next").model.own | {"linear_gate": "gla"})]
    assert set().union(*found) == set(EXCEPTIONS)


# ---- rows of a family

NAMED = {"model.family": f"{__name__}:FAMILY", "model.shared_hidden": 16, "model.shared_gate": True}


def test_a_family_has_rows_of_its_own() -> None:
    model, plan = stage(config_of(NAMED["model.family"]), range(4), True, True)
    shared = {path: style.dims for path, style in expand(plan, model).items() if ".shared" in path}
    assert shared and set(map(str, shared.values())) == {"{'weight': None}"}
    parity.check(
        4, NAMED | {"parallelism.tp": 2, "parallelism.experts.ep": 4, "training.global_batch_size": 2}, steps=1
    )


def test_rows_of_a_family_that_match_nothing_are_refused() -> None:
    (violation,) = contradictions(config_of(f"{__name__}:WRONG"))
    assert 'model.family has "*.moe.shared.w9.*", which matches no parameter: choose from' in violation.text
