"""Time by component: what must hold of any formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config
from titanmoe.plan.attention_costs import RING, RING_KERNELS
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.devices import read_device
from titanmoe.plan.dispatch_costs import DispatchChoice
from titanmoe.plan.links import Factors, LinkGroup, Links
from titanmoe.plan.search import PricedMapping, evaluate
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

H100 = read_device("h100")


def evaluated(world: int, *changes: str) -> PricedMapping:
    def no_violations(config: Config) -> list[str]:
        return []

    argv = ["--config", "train_configs/mixtral_8x22b.toml", *changes]
    return evaluate(load(argv, COMPONENTS, no_violations), world, H100, Factors())


def test_messages_follow_the_links_that_groups_cross() -> None:
    links = Links(H100, Factors())
    inside, across = LinkGroup(8, 1), LinkGroup(8, 8)
    assert (
        inside.ranks_per_domain(8),
        across.ranks_per_domain(8),
        LinkGroup(16, 1).ranks_per_domain(8),
        LinkGroup(4, 2).ranks_per_domain(8),
    ) == (8, 1, 8, 4)
    assert links.gather(inside, 1e9) == pytest.approx(7 / 8 * 1e9 / links.link, rel=0.02)
    assert links.gather(across, 1e9) == pytest.approx(7 / 8 * 1e9 / links.network, rel=0.02)
    across = 8 / 16 * 1e9 / links.network / links.all_to_all
    assert links.exchange(LinkGroup(16, 1), 1e9) == pytest.approx(across, rel=0.02)
    assert links.gather(LinkGroup(1, 1), 1e9) == links.exchange(LinkGroup(1, 1), 1e9) == 0
    rack = Links(read_device("gb200"), Factors())
    assert rack.exchange(LinkGroup(64, 1), 1e9) < links.exchange(LinkGroup(64, 1), 1e9) / 5


def test_an_all_to_all_waits_for_a_message_to_each_rank() -> None:
    """To ranks of a node eight at a time, else one after the other; an all-gather's delay grows by doublings."""
    links, inside, across = Links(H100, Factors()), H100.link_latency, H100.network_latency
    for group, delay in (
        (LinkGroup(8, 1), 7 * inside),
        (LinkGroup(64, 1), 7 * inside + 7 * across),
        (LinkGroup(8, 8), 7 * across),
    ):
        assert links.exchange(group, 0.0) == pytest.approx(delay)
    assert links.gather(LinkGroup(64, 1), 0.0) == pytest.approx(3 * inside + 3 * across)


def test_a_ring_is_as_slow_as_its_slowest_hop() -> None:
    links = Links(H100, Factors())
    assert links.send_to_next(LinkGroup(4, 2), 1e6) == links.send(2, 1e6)
    assert links.send_to_next(LinkGroup(4, 4), 1e6) == links.send(8, 1e6) > 5 * links.send(4, 1e6)


CUT = (
    "--model.family mixtral --model.size debug --model.vocab_size 256 --model.dim 512 --model.num_layers 2 "
    "--model.num_heads 8 --model.num_kv_heads 2 --model.head_dim 128 --model.expert_hidden 64 --training.seq_len 1024 "
    "--training.local_batch_size 1 --training.global_batch_size 2 --data.source synthetic"
)


def test_the_ring_costs_what_a_rehearsal_counts() -> None:
    """Bytes and kernels of attention beside products, rotations and attention itself, of each layer and microbatch."""
    for cp in (2, 4):
        config = recipe_to_rehearse([*CUT.split(), "--parallelism.cp", str(cp)], 2 * cp, "h100")
        operations = rehearse(config, 2 * cp, 0, "h100").operations
        model, tokens = config.model, config.training.seq_len / cp
        query, keys = tokens * model.num_heads * model.head_dim, 2 * tokens * model.num_kv_heads * model.head_dim
        for part, phase in enumerate(("forward", "backward")):
            counts = {
                operation: count / model.num_layers
                for operation, count in operations.items()
                if (operation.site.region, operation.site.phase) == ("attention", phase)
                and operation.name not in ("mm", "addmm", "rotate")
                and "_scaled_dot_product" not in operation.name
                and "models/layers.py" not in operation.site.file
            }
            (a, b), (c, d) = RING[part]
            planned = query * (a + b * (cp - 1)) + keys * (c + d * (cp - 1))
            assert sum((operation.read + operation.written) * n for operation, n in counts.items()) == pytest.approx(
                planned, rel=0.02
            )
            fixed, per_piece = RING_KERNELS[part]
            assert sum(counts.values()) == pytest.approx(fixed + per_piece * (cp - 1), abs=3)


def test_short_samples_are_split_by_tp_rather_than_cp() -> None:
    """At 4,096 tokens, as all published runs do; at 131,072 a ring's pieces are long enough to hide all but the rate of
    their kernel, if that is FlashAttention-2."""
    kinds = ((4096, "fa2", (1.15, 1.4)), (131072, "fa2", (1.2, 1.5)), (4096, "auto", (1.05, 1.4)))
    for seq, kernel, dearer in (*kinds, (131072, "auto", (1.0, 1.1))):
        argv = ["--config", "train_configs/mixtral_8x22b.toml", "--training.seq_len", str(seq)]
        argv += ["--parallelism.attention_kernel", kernel]
        priced = BlockCosts(load(argv, COMPONENTS, lambda config: []), H100, Factors())
        tp, cp = (sum(sum(part) for part in priced.attention(*split, 1, 0)) for split in ((2, 1), (1, 2)))
        assert dearer[0] < cp / tp < dearer[1]


def test_components() -> None:
    plain = evaluated(128)
    full, slow = (
        evaluated(128, "--activation_checkpoint.mode", "full"),
        evaluated(128, "--parallelism.experts.etp", "2"),
    )
    assert full.price.components["matrix work"] > 1.2 * plain.price.components["matrix work"] * 3 / 4
    assert full.peak < plain.peak
    rows = "dispatch and combine"
    assert slow.price.components[rows] > 2 * plain.price.components[rows]  # twice the rows, and across nodes
    one_stage = evaluated(128, "--pipeline.schedule", "1F1B", "--pipeline.virtual_stages", "-1")
    assert one_stage.price.components["bubble"] > 3 * plain.price.components["bubble"]
    for mapping in plain, full, slow, one_stage:
        assert sum(mapping.price.components.values()) == pytest.approx(mapping.price.step)
        assert 0.1 < mapping.price.mfu < 0.7 and min(mapping.price.components.values()) >= 0


@pytest.mark.parametrize(("recipe", "forward", "backward"), [("qwen3_30b_a3b", 194, 393), ("deepseek_671b", 698, 1473)])
def test_memory_bound_work_is_what_is_counted_of_whole_layers(recipe: str, forward: int, backward: int) -> None:
    """KB per token outside products and attention, as docs/benchmarks.md has them."""
    config = load(["--config", f"train_configs/{recipe}.toml"], COMPONENTS, lambda config: [])
    priced, last = BlockCosts(config, H100, Factors()), config.model.num_layers - 1
    halves = priced.attention(1, 1, 1, 0), priced.experts(1, 1, 1, 1, 1, DispatchChoice("alltoall"))
    assert f"{forward} + {backward} KB" in Path("docs/benchmarks.md").read_text() and has_experts(config.model, last)
    for part, kilobytes in enumerate((forward, backward)):
        bytes_moved = sum(half[part].memory for half in halves) * H100.bandwidth * Factors().memory
        assert bytes_moved / config.training.seq_len / 1000 == pytest.approx(kilobytes, rel=0.12)


def test_rows_of_one_sided_kernels() -> None:
    """HybridEP on H100s (docs/README_Hybrid-EP.md of DeepEP): 4,096 tokens, top 8, 7,168 wide, 57, 47 and 41 GB/s of
    what visits nodes, the sender's included."""
    row = 4096 * 7168 * 2
    for ranks, rate in ((16, 55.5e9), (32, 49.5e9), (64, 44e9)):
        config = load(
            ["--config", "train_configs/deepseek_671b.toml", "--model.num_groups", "1", "--model.top_groups", "1"],
            COMPONENTS,
            lambda c: [],
        )
        priced = BlockCosts(config, H100, Factors())
        seconds = priced.exchange("deepep", 4096, ranks, 1) / 2
        assert seconds == pytest.approx(priced.visits(ranks // 8) * row / rate, rel=0.15)


def test_tokens_of_few_groups_visit_few_nodes() -> None:
    config = load(["--config", "train_configs/deepseek_671b.toml"], COMPONENTS, lambda config: [])
    priced = BlockCosts(config, H100, Factors())
    assert priced.visits(8) == pytest.approx(4 * (1 - (3 / 4) ** 8))  # of 8 groups, on a node each, 4 are chosen
    assert priced.visits(1) == 1 and 2.9 < priced.visits(4) < priced.visits(8) and 7 < priced.visits(64) < 8


def test_backward_of_frozen_products_costs_as_much_as_forward() -> None:
    """Half of what it costs otherwise: only the input has a gradient. None where nothing before is trained."""
    recipe = ["--config", "train_configs/qwen3_30b_a3b.toml", "--training.freeze", "layers.*", "embed.*"]
    trained, partly, none_before = (
        BlockCosts(load([*recipe[:2], *words], COMPONENTS, lambda config: []), H100, Factors())
        for words in ([], ["--training.freeze", "*.attention.w*"], recipe[2:])
    )
    ratios = []
    for priced in (trained, partly, none_before):
        forward, backward = priced.attention(1, 1, 1, 4)
        ratios += [backward.matrix / forward.matrix, backward.attention / forward.attention]
    assert ratios == pytest.approx([2, 2.5, 1, 2.5, 0, 0], rel=1e-3)


def test_adapters_cost_two_narrow_products_and_a_sum() -> None:
    """tp divides the outputs of queries, keys and values, and the inputs of what follows: 4096, 512, 512; 4096."""
    recipe = ["--config", "train_configs/qwen3_30b_a3b.toml", "--lora.rank", "16", "--lora.targets"]
    without, priced = (
        BlockCosts(load([*recipe, target], COMPONENTS, lambda config: []), H100, Factors())
        for target in ("layers.0.*", "layers.[01].*")
    )
    X, D, Q, K = priced.config.training.seq_len, priced.model.dim, 4096 // 2, 512 // 2
    matrices = [(D, Q), (D, K), (D, K), (Q, D)]
    narrow = sum(priced.product(X, 16, inputs) + priced.product(X, outputs, 16) for inputs, outputs in matrices)
    speed, moved = H100.bandwidth * Factors().memory, (X * (Q + 2 * K + D) * 6, X * (3 * D + Q) * 6)
    for part, factor in enumerate((1, 2)):
        mine, plain = (costs.attention(2, 1, 1, 1)[part] for costs in (priced, without))
        assert mine.matrix - plain.matrix == pytest.approx(factor * narrow, rel=1e-6)
        assert mine.memory - plain.memory == pytest.approx(moved[part] / speed, rel=1e-6)
    experts, none = (
        costs.experts(2, 1, 2, 1, 2, DispatchChoice("alltoall"), costs.backward[1].ffn)[0]
        for costs in (priced, without)
    )
    assert experts.matrix > none.matrix and experts.memory > none.memory


@pytest.mark.parametrize("targets", ["*.attention.*", "*.experts.*"])
def test_dropout_before_adapters_moves_the_bytes_of_a_rehearsal(targets: str) -> None:
    recipe = "--model.family mixtral --model.size debug --model.dim 512 --model.num_layers 2 --model.num_heads 8 "
    recipe += "--model.num_kv_heads 4 --model.head_dim 64 --model.expert_hidden 1024 --training.seq_len 4096 "
    recipe += "--training.local_batch_size 1 --training.global_batch_size 1 --data.source synthetic --lora.rank 16 "
    rehearsed, planned = [], []
    for rate in ("0", "0.1"):
        config = recipe_to_rehearse([*recipe.split(), "--lora.targets", targets, "--lora.dropout", rate], 1, "h100")
        rehearsed.append(rehearse(config, 1, 0, "h100").operations.total().moved)
        costs = evaluate(config, 1, H100, Factors()).price.components["memory-bound work"]
        planned.append(costs * H100.bandwidth * Factors().memory)
    dropped = rehearsed[1] - rehearsed[0]
    assert dropped > 0.3 * rehearsed[0] and planned[1] - planned[0] == pytest.approx(dropped, rel=0.15)


def test_replicas_of_experts_in_no_unit_sum_their_gradients_once_a_step() -> None:
    """Of FSDP's units each microbatch's are summed."""

    def exposed(reshard: str, batch: int) -> float:
        words = f"--parallelism.dp_replicate=2 --parallelism.reshard_after_forward={reshard}"
        words += f" --training.dtype=float32 --training.global_batch_size={batch}"
        config = load(["--config", "train_configs/mixtral_8x7b.toml", *words.split()], COMPONENTS, lambda config: [])
        return evaluate(config, 16, H100, Factors()).price.components["weights and gradients"]

    of_a_microbatch = {choice: exposed(choice, 160) - exposed(choice, 80) for choice in ("auto", "always")}
    assert of_a_microbatch["auto"] < 0.1 * of_a_microbatch["always"]
