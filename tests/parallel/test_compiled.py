"""torch.compile in the trainer: what is one graph on several ranks, that it stays one, and that no number changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests import parity, world
from tests.support.case_features import DISPATCHERS, MODELS, TRAINED
from tests.support.masks import mask_of, tree_mask
from titanmoe.comm.collectives import NO_GROUP, Group, all_gather_autograd, reduce_scatter_autograd
from titanmoe.components import COMPONENTS
from titanmoe.config.load import read_draft
from titanmoe.config.schema import Compile, Config, Model
from titanmoe.config.world_size import recipe_ranks
from titanmoe.fold.pipeline_schedules import splits_backward
from titanmoe.mask import CAUSAL
from titanmoe.models.families import preset
from titanmoe.models.layers import rope_angles
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.choose_attention import apply_context_parallel
from titanmoe.parallel.compiled import compile_model, why_not_one_graph
from titanmoe.parallel.recompute import apply_recomputation
from titanmoe.tokens import Tokens
from titanmoe.train.launch import read_config

PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True, "moe.capacity_scope": "full_sequence"}
COMPILED = {"compile.enable": True, "compile.backend": "kept"}
MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"} | {
    "training.mixed_precision_reduce": "float32"
}
EP2 = {"parallelism.experts.ep": 2}
DISPATCH_SAVED = {"activation_checkpoint.mode": "full_except_dispatch"}
HIERARCHICAL = DISPATCHERS["hierarchical"] | {"parallelism.node": 2, "parallelism.experts.ep": 4}
STEPS, CROWDED = 4, 3
"""In step 3 every token goes to the first experts, which one rank has."""


class Seen(NamedTuple):
    outcome: parity.Outcome | None
    graphs: dict[str, Counter[str]]  # the operations of each, by the compiler's number: 2/1 is the second of function 2
    made: list[int]  # graphs after each step
    breaks: int


_graphs: dict[str, Counter[str]] = {}


def kept(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """aot_eager that records the graphs it is given."""
    inside = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    number = str(torch._guards.CompileContext.current_compile_id())
    _graphs[number] = Counter(str(node.target) for module in inside for node in module.graph.nodes)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def trained(changes: dict[str, Any], steps: int = STEPS) -> Seen:
    """On a rank: `parity.measure`, and the graphs that torch.compile made."""
    made: list[int] = []

    def train_step(trainer: Any) -> dict[str, Any]:
        for moe in trainer.training.moe_layers.values():
            moe.router.expert_bias[: parity.TINY["model.top_k"]] = 1e6 if trainer.step + 1 == CROWDED else 0.0
        report = trainer.train_step()
        made.append(len(_graphs))
        return report

    torch._dynamo.reset()
    counters.clear()
    _graphs.clear()
    if "kept" not in torch._dynamo.list_backends(()):
        torch._dynamo.register_backend(kept)
    try:
        outcome = parity.measure(changes, steps=steps, train_step=train_step)
        return Seen(outcome, dict(_graphs), made, sum(counters["graph_break"].values()))
    finally:
        torch._dynamo.reset()


def run(size: int, changes: dict[str, Any]) -> tuple[list[Seen], parity.Outcome]:
    """On every rank, compiled and not; checks that other routing does not compile again."""
    compiled = world.run(size, trained, changes | COMPILED, timeout=400)
    for seen in compiled:
        assert seen.made == seen.made[:1] * STEPS, f"compiled again: {seen.made}, {list(seen.graphs)}"
    outcome = compiled[0].outcome
    loads = [report["layers.0.load"] for report in outcome.reports]
    assert len({str(load) for load in loads}) == STEPS
    assert sum(loads[CROWDED - 1][2:]) == 0 < sum(loads[0][2:])
    return compiled, world.run(size, trained, changes)[0].outcome


def named(seen: Seen, word: str) -> dict[str, int]:
    """How many operations with this name each graph has."""
    counts = {graph: sum(n for op, n in ops.items() if word in op) for graph, ops in seen.graphs.items()}
    return {graph: n for graph, n in counts.items() if n}


@pytest.mark.parametrize(
    ("size", "case", "sent"),
    [
        (2, EP2, {"all_to_all": 7}),
        pytest.param(
            4, EP2 | {"moe.dispatcher": "allgather", "moe.z_loss": 0.01}, {"all_gather": 4}, marks=pytest.mark.slow
        ),
        pytest.param(4, HIERARCHICAL, {"all_to_all": 15}, marks=pytest.mark.slow),
        pytest.param(
            4,
            EP2 | {"parallelism.experts.etp": 2, "model.shared_hidden": 16},
            {"all_to_all": 7},
            marks=pytest.mark.slow,
        ),
        pytest.param(4, EP2 | PADDED, {"all_to_all": 6}, marks=pytest.mark.slow),
        pytest.param(1, {}, {}, marks=pytest.mark.slow),
        pytest.param(
            4,
            EP2 | {"parallelism.experts.edp_replicate": 2, "parallelism.dp_replicate": 2},
            {"all_to_all": 7},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alltoall", "allgather", "hierarchical", "etp", "padded", "one_rank", "hsdp"],
)
def test_a_layer_is_one_graph_whatever_the_routing(size: int, case: dict[str, Any], sent: dict[str, int]) -> None:
    """The graph also has all messages: counts, routed tokens, weights, outputs, and the gradients of the last three."""
    compiled, plain = run(size, case)
    for seen in compiled:
        assert seen.breaks == 0
        (graph,) = named(seen, "experts_up")
        for word in ("all_to_all", "all_gather"):
            assert named(seen, word).get(graph, 0) == sent.get(word, 0)
        for within in ("argsort", "experts_down", "linear"):
            assert graph in named(seen, within)
    got, reference = compiled[0].outcome, parity.expected(case, size).steps
    assert got.loss == pytest.approx(plain.loss, rel=1e-12)
    assert got.loss[: len(reference)] == pytest.approx([step.loss for step in reference], rel=1e-10)
    pairs = (got.grads, plain.grads), (got.weights, plain.weights), (got.grads, reference[0].grads)
    assert max(parity.worst_error(*pair)[0] for pair in pairs) < 1e-10


def operations(mode: str, compiled: bool, more: dict[str, Any] = EP2 | COMPILED) -> tuple[Counter[str], list[float]]:
    """On a rank: which operations the second step runs; and on rank 0 the losses."""
    ran: list[Counter[str]] = []

    def train_step(trainer: Any) -> dict[str, Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            report = trainer.train_step()
        ran.append(Counter(event.name for event in profile.events()))
        return report

    changes = more | {"compile.backend": "aot_eager", "activation_checkpoint.mode": mode}
    torch._dynamo.reset()
    outcome = parity.measure(changes | {"compile.enable": compiled}, steps=2, train_step=train_step)
    torch._dynamo.reset()
    return ran[1], outcome.loss if outcome else []


@pytest.mark.slow
def test_one_graph_that_is_recomputed_sends_nothing_twice() -> None:
    """Forward and backward send 3 messages each and the counts; only the products for gate and up are computed again.
    Modes that send rows a second time, to save no rows, leave the layer in parts."""
    modes = "none", "full_except_dispatch", "moe", "full"
    graphs, eager = (
        {mode: world.run(2, operations, mode, compiled, timeout=400)[0] for mode in modes} for compiled in (True, False)
    )
    for seen in (graphs, eager):
        sends = {mode: ran["_c10d_functional::all_to_all_single"] for mode, (ran, _) in seen.items()}
        calls = sends["none"] // 7  # of a layer: microbatches and layers
        assert sends == dict(zip(modes, (7 * calls, 7 * calls, 8 * calls, 8 * calls), strict=True)) and calls > 0
    for mode, (ran, losses) in graphs.items():
        assert losses == pytest.approx(eager["none"][1], rel=1e-12)
        up, down = ran["titanmoe::experts_up"], ran["titanmoe::experts_down"]
        assert (up, down) == {"none": (calls, calls), "full_except_dispatch": (2 * calls, calls)}.get(mode, (0, 0))


@pytest.mark.slow
def test_a_compiled_ring_sends_what_an_eager_one_sends() -> None:
    """On all ranks alike, though not all use what arrives: a compiler may neither drop nor repeat a message."""
    changes = EP2 | MODELS["gpt_oss"] | {"parallelism.cp": 2}
    compiled, eager = (
        [ran["_c10d_functional::all_to_all_single"] for ran, _ in world.run(2, operations, "none", on, changes)]
        for on in (True, False)
    )
    assert compiled == eager and len(set(compiled)) == 1 and compiled[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "adapters"])
@pytest.mark.parametrize("padded", [False, True], ids=["dropless", "padded"])
def test_a_layer_in_bfloat16_is_one_graph(trained: str, padded: bool) -> None:
    """Weights are stored in float32, so that the router is an FSDP unit of its own."""
    changes = EP2 | MIXED | {"training.global_batch_size": 4} | TRAINED[trained] | (PADDED if padded else {})
    compiled, plain = run(2, changes)
    for seen in compiled:
        assert len(named(seen, "experts_up")) == len(named(seen, "all_to_all")) == 1
    got = compiled[0].outcome
    assert got.loss[0] == pytest.approx(plain.loss[0], rel=1e-3)
    assert parity.worst_error(got.grads, plain.grads)[0] < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "whole"),
    [
        ({"moe.dispatcher": "allgather"} | DISPATCH_SAVED, True),
        (HIERARCHICAL | {"model.expert_linear_bias": True}, True),
        (HIERARCHICAL | PADDED, True),
        (MODELS["deepseek_v3"] | {"parallelism.tp": 2, "activation_checkpoint.mode": "selective"}, True),
        (
            MODELS["gpt_oss"] | {"parallelism.cp": 2, "moe.capacity_factor": 1.0, "moe.capacity_scope": "sub_sequence"},
            True,
        ),
        ({"parallelism.pp": 2, "model.mtp_depth": 1, "moe.jitter": 0.1}, True),
        ({"model.mtp_depth": 1, "model.mtp_after_norm": True, "parallelism.tp": 2}, True),
        ({"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4}, False),
        (DISPATCHERS["symm_mem"] | {"moe.symm_mem_factor": 1.0} | DISPATCH_SAVED, True),
        ({"optimizer.name": "muon", "model.shared_hidden": 16, "parallelism.cp": 2}, True),
        ({"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 16}, False),
        (TRAINED["adapters"] | {"parallelism.tp": 2} | DISPATCH_SAVED, True),
        (TRAINED["subset"] | {"parallelism.tp": 2, "parallelism.experts.etp": 2}, True),
        (MODELS["qwen2_moe"] | {"parallelism.tp": 4}, True),
    ],
    ids=[
        "allgather",
        "hierarchical",
        "padded_hierarchical",
        "deepseek_v3",
        "gpt_oss",
        "pipeline",
        "after_norm",
        "zero_bubble",
        "symm_mem",
        "muon",
        "halves",
        "adapters",
        "frozen",
        "qwen2",
    ],
)
def test_other_layers_keep_their_numbers(case: dict[str, Any], whole: bool) -> None:
    """A layer that is not left in parts is one graph, or an error."""
    changes = EP2 | {"moe.aux_loss_global": 0.02, "moe.bias_update_rate": 0.05} | case
    changes |= {"compile.enable": True, "compile.backend": "aot_eager"}
    config = parity.read(changes, 4)
    splits = splits_backward(config.pipeline, config.parallelism.pp)
    assert (not why_not_one_graph(config, splits)) == whole
    parity.check(4, changes, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["dropless", "padded"])
def test_inductor_keeps_the_numbers(padded: bool) -> None:
    single = dict.fromkeys(MIXED, "float32") | {"training.seed": 3}  # whose first step has a wide margin
    changes = EP2 | single | {"compile.enable": True, "model.shared_hidden": 16} | (PADDED if padded else {})
    parity.check(2, changes, timeout=600, steps=1)


def compiled_collectives() -> None:
    """On a rank: gradients through each collective, compiled and not."""
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(group.rank)
    for collective in (all_gather_autograd, reduce_scatter_autograd):
        for dim in (0, 1):
            x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
            compiled = torch.compile(lambda x, dim=dim, how=collective: how(x * 2, dim, group), backend="aot_eager")
            outs = compiled(x), collective(x * 2, dim, group)
            torch.testing.assert_close(*outs)
            grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in outs]
            assert grads[1].abs().max() > 0.1
            torch.testing.assert_close(*grads)
    torch._dynamo.reset()


def test_compiled_collectives_have_their_gradients() -> None:
    world.run(2, compiled_collectives)


def test_few_graphs_are_called_in_a_block() -> None:
    """Each call takes the host some 50 microseconds: as long as five norms, which on GPUs are one kernel each."""
    config = Config(model=replace(Model(**preset("deepseek_v3", "debug")), num_layers=2))
    with torch.device("meta"):
        model = Transformer(config, 1, torch.bfloat16)
    compile_model(model, replace(config, compile=Compile(enable=True)), False)
    graphs = {
        number: {name for name, part in block.named_modules() if "forward" in vars(part)}
        for number, block in model.blocks().items()
    }
    assert graphs == {
        0: {"attention", "ffn"},
        1: {"attention", "moe", "moe.experts"},
    }  # calls of moe are of its experts


def test_the_loss_is_compiled_where_the_head_calls_a_block() -> None:
    """Multi-token prediction after the norm runs in the head's forward, so its loss alone is a graph."""
    shape = replace(Model(**preset("deepseek_v3", "debug")), num_layers=2, mtp_depth=1, mtp_after_norm=True)
    config = Config(model=shape, compile=Compile(enable=True))
    with torch.device("meta"):
        model = Transformer(config, 1, torch.bfloat16)
    plain = model.head.loss_and_entropy
    compile_model(model, config, False)
    assert model.head.loss_and_entropy != plain and "forward" not in vars(model.head)


def test_documents_leave_the_graph_and_windows_do_not() -> None:
    """The blocks that are computed depend on the documents of a batch: no graph for each, and none again."""
    changes = {"model.sliding_window": 3, "model.full_attention_every": 0, "training.seq_len": 26}
    config, mode = parity.read(changes, 1), torch.compile(lambda *given: attention(*given), backend="aot_eager")
    model = Transformer(config, 1, torch.float64)
    apply_context_parallel(model, config.parallelism, NO_GROUP)
    attention = model.layers["0"].attention
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_BSD = torch.randn(1, 26, config.model.dim, dtype=torch.float64, requires_grad=True)
    rope = rope_angles(torch.arange(26).unsqueeze(0), config.model, config.model.head_dim, torch.float64)
    made, documents = [], [mask_of(torch.arange(26).unsqueeze(0) // n) for n in (5, 7)]
    for mask in (CAUSAL, tree_mask(), *documents):
        counters.clear()
        outs = [how(x_BSD, rope, mask) for how in (mode, attention)]
        torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
        inputs = x_BSD, attention.wk.weight
        torch.testing.assert_close(
            *(torch.autograd.grad(out.sin().sum(), inputs) for out in outs), rtol=1e-9, atol=1e-9
        )
        made.append((sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]))
    torch._dynamo.reset()
    assert made[0] == (0, 1) and made[1][0] and made[3] == (0, 0), made


def test_models_of_other_sizes_in_one_process() -> None:
    """torch remembers what it compiled by function: the options and sizes of one model are no variables of the next."""
    torch._dynamo.reset()
    sizes = dict(dim=32, num_layers=1, vocab_size=64, num_experts=4, expert_hidden=16)
    graphs, made = counters["stats"], []
    for factor, length in ((1.0, 16), (1.25, 16), (1.25, 24), (1.25, 32)):
        config = Config(model=replace(Model(**preset("mixtral", "debug")), **sizes))
        config.moe.capacity_factor, config.moe.pad_to_capacity, config.moe.aux_loss = factor, True, 0.01
        model = Transformer(config, 1, torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        index = torch.arange(2 * length)
        tokens = Tokens(index.view(2, -1) % length, index, index // length, index >= 0, torch.tensor(0))
        ids = index.view(2, -1) % 64
        for moe in model.moe_layers().values():
            moe.begin_step(1, torch.tensor(32.0), 2)
        plain, before = model(ids, tokens, ids), graphs["unique_graphs"]
        compile_model(model, replace(config, compile=Compile(enable=True, backend="eager")), False)
        torch.testing.assert_close(model(ids, tokens, ids), plain)
        made.append(graphs["unique_graphs"] - before)
    assert made[0] >= made[1] > 0 and made[2] == made[3] > made[1], "a graph for every length, none for any"
    torch._dynamo.reset()


ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
GPU_RECIPES = [path for path in RECIPES if "debug" not in path.stem and not path.stem.startswith(("sft", "lora"))]
"""Without fine-tuning, which needs shards, and trains the model of another recipe."""
FIRST = ("deepseek_671b", "qwen3_30b_a3b")
"""The others take the same parts."""


def small(config: Config) -> Config:
    """The recipe with every switch of its model and narrow widths."""
    model = config.model
    narrow = dict(dim=64, expert_hidden=32, num_heads=4, num_experts=8, top_k=2, num_layers=2, vocab_size=64)
    narrow |= dict(num_kv_heads=2, head_dim=16, mtp_depth=0, num_dense_layers=0, dense_hidden=64)
    for name, width in dict(shared_hidden=32, sliding_window=8, num_groups=4, top_groups=2, rotary_dim=8).items():
        narrow[name] = min(width, getattr(model, name))
    if model.kv_lora_rank:
        narrow |= dict(num_kv_heads=4, head_dim=24, kv_lora_rank=16, q_lora_rank=min(model.q_lora_rank, 24))
        narrow |= dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    return replace(config, model=replace(model, **narrow))


@pytest.mark.parametrize(
    "recipe", [pytest.param(p, marks=() if p.stem in FIRST else pytest.mark.slow, id=p.stem) for p in GPU_RECIPES]
)
def test_recipes_for_gpus_compile_and_never_again(recipe: Path) -> None:
    """Two of their layers, forward and backward, under changing routing; bfloat16, as the recipes have it."""
    world = recipe_ranks(read_draft([str(recipe)], COMPONENTS))
    config = small(read_config(["--config", str(recipe)], world, COMPONENTS))
    assert config.compile.enable and config.training.mixed_precision_param == "bfloat16"
    torch._dynamo.reset()
    counters.clear()
    model = Transformer(config, 1, torch.bfloat16)
    splits = splits_backward(config.pipeline, config.parallelism.pp)
    compile_model(model, replace(config, compile=replace(config.compile, backend="aot_eager")), splits)
    apply_recomputation(model, config.activation_checkpoint, not why_not_one_graph(config, splits))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    index = torch.arange(2 * 16)
    tokens = Tokens(index.view(2, 16) % 16, index, index // 16, index >= 0, torch.tensor(0))
    made = []
    for favourite in (None, 0, 3, None):
        for moe in model.moe_layers().values():
            moe.begin_step(1, torch.tensor(32.0), 2)
            moe.router.expert_bias.zero_()
            if favourite is not None:
                moe.router.expert_bias[favourite : favourite + config.model.top_k] = 1e6
        model(index.view(2, 16) % 64, tokens, index.view(2, 16) % 64).sum().backward()
        made.append(counters["stats"]["unique_graphs"])
    parts = 2 if why_not_one_graph(config, splits) else 3  # attention, the head's norm, and a MoE layer
    assert made == made[:1] * 4 and made[0] >= parts, made
    assert not counters["graph_break"], counters["graph_break"]
    torch._dynamo.reset()
