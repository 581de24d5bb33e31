"""The spec of grouped-query attention (arXiv 2305.13245), with windows, sinks, biases and norms of queries and keys.

Read by families, planner, checkpoints and Muon; titanmoe.models.attention is the implementation. tp shards the heads;
where it exceeds the number of key heads, these are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.blocks import rotary_width
from titanmoe.config.ranges import Replicable, Violation, divisors, nearest_values
from titanmoe.config.schema import Config, Model
from titanmoe.models.mixers.mixer_spec import ClippedRows, LocalBatch, MatrixRows, MixerSpec, MixerWork, Product, Split


def attention_output_bytes(heads: int, value_dim: int, batch: LocalBatch, sinks: bool) -> int:
    """Return the bytes of attention's output and log-sum-exp that one rank saves for backward of a microbatch.

    Sinks make a second pair of these from the first, except in ring attention. The ring's output has heads before
    positions, and is copied for the output projection. `heads` are the query heads of the rank.
    """
    output, sums = batch.positions * heads * value_dim * batch.width, batch.positions * heads * 4
    if batch.ring:
        return 2 * output + sums
    return (output + sums) * (2 if sinks else 1)


class GroupedQuery(MixerSpec):
    """The spec of grouped-query attention."""

    name = "grouped-query attention"
    implementation = "titanmoe.models.attention:Attention"
    attends = True
    after_scores = ("wo.weight", "wo.bias")

    def parameters(self, model: Model) -> dict[str, Split]:
        query, key = _widths(model)
        outputs = {"wq": query, "wk": key, "wv": key}
        gate = {"wg": query} if model.attention_gate else {}
        splits: dict[str, Split] = {f"{w}.weight": ((width, model.dim), 0) for w, width in (outputs | gate).items()}
        splits["wo.weight"] = (model.dim, query), 1
        if model.qkv_bias:
            splits |= {f"{w}.bias": ((width,), 0) for w, width in outputs.items()}
        if model.out_bias:
            splits["wo.bias"] = (model.dim,), None
        if model.attention_sinks:
            splits["sinks"] = (model.num_heads,), 0
        if model.qk_norm == "head":
            splits |= {f"{x}_norm.weight": ((model.head_dim,), None) for x in "qk"}
        elif model.qk_norm == "full":
            splits |= {"q_norm.weight": ((query,), 0), "k_norm.weight": ((key,), 0)}
        return splits

    def max_tp(self, model: Model) -> dict[str, int]:
        """Return the number of key heads for each module of keys and values, which a larger tp replicates."""
        return dict.fromkeys(("wk", "wv", *["k_norm"] * (model.qk_norm == "full")), model.num_kv_heads)

    def matrix_rows(self, model: Model) -> dict[str, MatrixRows]:
        heads = ("wq", "wk", "wv", *["wg"] * model.attention_gate)
        return {f"{w}.weight": MatrixRows((model.head_dim,)) for w in heads} | {"wo.weight": MatrixRows(())}

    def qk_clip_rows(self, model: Model) -> dict[str, ClippedRows]:
        """Return all rows of wq and wk, and of their biases, scaled by the factor's root; {} with norms of both."""
        if model.qk_norm != "none":
            return {}
        heads, keys, root = model.num_heads, model.num_kv_heads, ((model.head_dim, 0.5),)
        kinds = ("weight", "bias") if model.qkv_bias else ("weight",)
        both = {"wq": ClippedRows(heads, keys, root), "wk": ClippedRows(keys, keys, root)}
        return {f"{name}.{kind}": rows for name, rows in both.items() for kind in kinds}

    def pair_flops(self, model: Model) -> int:
        return 4 * model.num_heads * model.head_dim

    def work(self, model: Model, tp: int) -> MixerWork:
        query, key = (width / tp for width in _widths(model))
        key = max(key, model.head_dim)
        rotated = (query + key) * rotary_width(model) / model.head_dim
        joined = 2 * (query + key) * (model.rotary_dim > 0)  # with the dims that stay as they are
        gate = query * model.attention_gate  # read and written by a sigmoid and a product: five times, then nine
        return MixerWork(
            [Product(query + gate + 2 * key, model.dim), Product(model.dim, query)],
            gathered=model.dim,
            queries=query,
            keys=2 * key,
            rotated=rotated,
            normed=(query + key) * (model.qk_norm != "none"),
            moved=(joined + 5 * gate, joined + 9 * gate),
        )

    def saved_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the bytes that one rank's attention saves for backward of one microbatch, without the block's input.

        `selective` leaves out the statistics of norms that a kernel computes, and nothing else: queries, keys and
        values are saved.
        """
        X, w = batch.positions, batch.width
        heads, kv_heads = model.num_heads // batch.tp, max(1, model.num_kv_heads // batch.tp)
        query, key = heads * model.head_dim, kv_heads * model.head_dim
        inner = 0
        if model.qk_norm == "head":
            inner = X * (query + key) * w + X * (heads + kv_heads) * max(4, w) * (not selective)
        elif model.qk_norm == "full" and batch.tp == 1:
            inner = X * (query + key) * w + X * 2 * max(4, w) * (not selective)
        elif model.qk_norm == "full":  # the kernel does not sum over tp
            inner = 2 * X * (query + key) * max(4, w)
        output = attention_output_bytes(heads, model.head_dim, batch, model.attention_sinks)
        gate = 2 * X * query * w * model.attention_gate  # its sigmoid, and what that lets through
        # With a mask torch's kernel gets the keys and values of each query head.
        keys = 2 * (query if batch.mask else key) * batch.gathered
        return output + X * (query + keys) * w + batch.mask + inner + gate

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """Return the numbers of query heads and of key heads, as {"tp": {option: number}}.

        tp must divide the former; of the latter it may also be a multiple.
        """
        model = config.model
        return {"tp": {"model.num_heads": model.num_heads, "model.num_kv_heads": Replicable(model.num_kv_heads)}}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a Violation for key heads that do not divide the heads, wrong widths, and fields of latent attention.

        model.head_dim must be even; rotary_dim must be even and less.
        """
        model = config.model
        heads, kv_heads = model.num_heads, model.num_kv_heads
        if heads % kv_heads:
            yield Violation(
                ("model.num_heads", "model.num_kv_heads"),
                f"model.num_heads = {heads} is not a multiple of model.num_kv_heads = {kv_heads} "
                f"({heads} % {kv_heads} = {heads % kv_heads}): use num_kv_heads "
                f"{nearest_values(divisors(heads), kv_heads)}",
            )
        if model.head_dim % 2:
            yield Violation(
                ("model.head_dim",),
                f"model.head_dim = {model.head_dim} is odd, and RoPE rotates pairs: "
                f"use {model.head_dim - 1} or {model.head_dim + 1}",
            )
        if model.rotary_dim % 2 or model.rotary_dim >= model.head_dim:
            yield Violation(
                ("model.rotary_dim", "model.head_dim"),
                f"model.rotary_dim = {model.rotary_dim} is not an even number below model.head_dim = {model.head_dim}, "
                "and RoPE rotates pairs: use one, or 0 for full heads",
            )
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if value := getattr(model, name):
                yield Violation(
                    (f"model.{name}", "model.kv_lora_rank"),
                    f"model.{name} = {value} is for latent attention, and model.kv_lora_rank = 0 asks for "
                    f"grouped-query attention: set kv_lora_rank, such as 512, or {name} = 0",
                )


def _widths(model: Model) -> tuple[int, int]:
    """Return the width of all query heads together, and the width of all key heads together."""
    return model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim


GROUPED_QUERY = GroupedQuery()
