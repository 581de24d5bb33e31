"""The spec of latent attention (arXiv 2405.04434): keys and values come from one narrow vector per token.

Read by families, planner, checkpoints and Muon; titanmoe.models.latent_attention is the implementation. tp shards the
heads; the latents and the projections to them are replicated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, Model
from titanmoe.models.mixers.grouped_query import attention_output_bytes
from titanmoe.models.mixers.mixer_spec import ClippedRows, LocalBatch, MatrixRows, MixerSpec, MixerWork, Product, Split

GROUPED_QUERY_ALONE = (
    "qkv_bias", "out_bias", "attention_sinks", "sliding_window", "attention_gate", "qk_norm", "rotary_dim",
)  # fmt: skip
"""Fields of [model] that latent attention refuses."""


class Latent(MixerSpec):
    """The spec of latent attention."""

    name = "latent attention"
    implementation = "titanmoe.models.latent_attention:LatentAttention"
    attends = True
    after_scores = ("wo.weight",)

    def parameters(self, model: Model) -> dict[str, Split]:
        dim, heads, latent, rank = model.dim, model.num_heads, model.kv_lora_rank, model.q_lora_rank
        query, up = heads * model.head_dim, heads * (model.qk_nope_head_dim + model.v_head_dim)
        splits: dict[str, Split] = {"wq.weight": ((query, dim), 0)}
        if rank:
            splits = {"wq_a.weight": ((rank, dim), None), "wq_b.weight": ((query, rank), 0)}
        splits["wkv_a.weight"] = (latent + model.qk_rope_head_dim, dim), None
        splits["wkv_b.weight"] = (up, latent), 0
        splits["wo.weight"] = (dim, heads * model.v_head_dim), 1
        norms = {"q_norm.weight": rank, "kv_norm.weight": latent}
        return splits | {name: ((width,), None) for name, width in norms.items() if width}

    def matrix_rows(self, model: Model) -> dict[str, MatrixRows]:
        """Return how the rows of each projection divide into matrices for Muon, by parameter name.

        The rows of wkv_a are two matrices, latent and rotated key; so are those of wkv_b, keys and values of all heads,
        whose rows alternate by head.
        """
        query, full = MatrixRows((model.head_dim,)), MatrixRows(())
        rows = {"wq_a": full, "wq_b": query} if model.q_lora_rank else {"wq": query}
        rows |= {"wkv_a": MatrixRows((model.kv_lora_rank, model.qk_rope_head_dim))}
        rows |= {"wkv_b": MatrixRows((model.qk_nope_head_dim, model.v_head_dim)), "wo": full}
        return {f"{name}.weight": value for name, value in rows.items()}

    def qk_clip_rows(self, model: Model) -> dict[str, ClippedRows]:
        """Return which rows of the projections to queries, and to keys and values, QK-Clip scales, by parameter name.

        Rows without RoPE are scaled by the root of the factor in both. As all heads have one rotated key, queries'
        rotated rows are scaled by the factor itself. Values stay as they are (power 0).
        """
        heads, nope = model.num_heads, (model.qk_nope_head_dim, 0.5)
        query = ClippedRows(heads, heads, (nope, (model.qk_rope_head_dim, 1.0)))
        key = ClippedRows(heads, heads, (nope, (model.v_head_dim, 0.0)))
        return {"wq_b.weight" if model.q_lora_rank else "wq.weight": query, "wkv_b.weight": key}

    def pair_flops(self, model: Model) -> int:
        return 2 * model.num_heads * (model.head_dim + model.v_head_dim)

    def work(self, model: Model, tp: int) -> MixerWork:
        heads, rank = model.num_heads / tp, model.q_lora_rank
        query, latents = heads * model.head_dim, model.kv_lora_rank + model.qk_rope_head_dim
        products = [
            Product(latents, model.dim, own_tokens=True),
            Product(heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        ]
        products += [Product(rank, model.dim, own_tokens=True)] if rank else []
        # Of all heads, by titanmoe.ops.kernels.latent_heads: queries' ends are rotated in place, and keys are written
        # from their own part; backward writes queries' gradients anew, and those of keys and values side by side.
        nope, rope, value = (heads * x for x in (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim))
        moved = 2 * rope + nope + query, 2 * query + (query + value) + (nope + value)
        products += [Product(query, rank or model.dim), Product(model.dim, heads * model.v_head_dim)]
        return MixerWork(
            products,
            gathered=latents + (rank or model.dim),
            queries=query,
            keys=query + heads * model.v_head_dim,
            moved=moved,
        )

    def saved_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the bytes that one rank's attention saves for backward of one microbatch, without the block's input.

        With `selective` keys and values are recomputed from the latents, and so are queries if they have a latent.
        """
        X, T, w, heads = batch.positions, batch.tokens, batch.width, model.num_heads // batch.tp
        output = attention_output_bytes(heads, model.v_head_dim, batch, sinks=False)
        latents = T * (model.q_lora_rank + model.kv_lora_rank) * w
        gathered = X * (model.kv_lora_rank + model.qk_rope_head_dim + model.q_lora_rank) * w
        query = heads * model.head_dim
        if selective:
            return output + batch.mask + X * query * w * (not model.q_lora_rank) + latents + gathered
        # Values stay where they were made, beside keys without positions, which are copied to the rotated keys.
        made = heads * (model.qk_nope_head_dim + model.v_head_dim)
        keys = query + made if batch.gathered == 1 else batch.gathered * (query + heads * model.v_head_dim)
        return output + batch.mask + latents + 2 * T * max(4, w) + gathered + X * (query + keys) * w

    def input_positions(self, model: Model, batch: LocalBatch) -> int:
        """Return for how many positions the projections save the block's normed input for backward.

        With a query latent these are the tokens that the rank owns. Without one they are all positions of the attention
        slice and, if tp is above 1, so that the slice is a gathered copy, also the owned tokens.
        """
        if model.q_lora_rank:
            return batch.tokens
        return batch.positions + batch.tokens * (batch.tp > 1)

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        return {"tp": {"model.num_heads": config.model.num_heads}}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a Violation for numbers of heads and widths that do not fit, and for GROUPED_QUERY_ALONE if set."""
        model = config.model
        heads, nope, rope = model.num_heads, model.qk_nope_head_dim, model.qk_rope_head_dim
        if model.num_kv_heads != heads:
            yield Violation(
                ("model.num_kv_heads", "model.num_heads", "model.kv_lora_rank"),
                f"model.num_kv_heads = {model.num_kv_heads} is not model.num_heads = {heads}, but latent "
                f"attention (model.kv_lora_rank = {model.kv_lora_rank}) makes a key and a value for every head: "
                f"use num_kv_heads = {heads}",
            )
        if not rope or rope % 2:
            yield Violation(
                ("model.qk_rope_head_dim", "model.kv_lora_rank"),
                f"model.qk_rope_head_dim = {rope} does not give latent attention pairs for RoPE to rotate: "
                f"use an even number, such as {rope + 1 if rope else 64}",
            )
        if model.head_dim != nope + rope:
            yield Violation(
                ("model.head_dim", "model.qk_nope_head_dim", "model.qk_rope_head_dim"),
                f"model.head_dim = {model.head_dim} is not the width of latent attention's queries and keys, "
                f"model.qk_nope_head_dim + model.qk_rope_head_dim = {nope} + {rope}: use head_dim = {nope + rope}",
            )
        if not model.v_head_dim:
            yield Violation(
                ("model.v_head_dim", "model.kv_lora_rank"),
                "model.v_head_dim = 0 gives latent attention no values: give a width, such as "
                f"v_head_dim = {nope or model.head_dim}",
            )
        for name in GROUPED_QUERY_ALONE:
            value, without = (json.dumps(getattr(m, name)) for m in (model, Model()))
            if value != without:
                yield Violation(
                    (f"model.{name}", "model.kv_lora_rank"),
                    f"model.{name} = {value} is for grouped-query attention, and model.kv_lora_rank = "
                    f"{model.kv_lora_rank} asks for latent attention: set {name} = {without}, or kv_lora_rank = 0",
                )


LATENT = Latent()
