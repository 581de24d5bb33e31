"""The spec of linear attention: gated delta rule (arXiv 2412.06464), or the gate of GLA (arXiv 2312.06635).

Read by families, planner and checkpoints; titanmoe.models.linear_attention is the implementation. Costs follow its
recurrence, a chunk at a time (titanmoe.ops.gated_delta_rule).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from titanmoe.config.ranges import Violation, divisors, nearest_values
from titanmoe.config.schema import OWN, Config, Model
from titanmoe.models.mixers.mixer_spec import LocalBatch, MatrixRows, MixerSpec, MixerWork, Product, Split

FIELDS: dict[str, int | float | bool | str] = dict(
    linear_key_heads=8, linear_value_heads=8, linear_key_dim=8, linear_value_dim=8, conv_width=4, linear_gate="delta"
)
"""Fields of [model.own], with defaults, for a family that has such layers."""
GATES = "delta", "gla"
"""Values of linear_gate."""
GLA_RANK = 16
"""Rank of the product that computes the decay in gated linear attention."""
CHUNK = 64
"""Positions of a chunk, as in titanmoe.ops.gated_delta_rule."""


class Heads(NamedTuple):
    """Numbers and widths of the heads of linear attention."""

    keys: int
    """Number of key heads."""
    values: int
    """Number of value heads. Value heads that share a key head are consecutive."""
    key_dim: int
    value_dim: int
    conv_width: int
    """Positions that the convolution sees, the position itself included."""
    gate: str
    """linear_gate of [model.own]: "delta" or "gla"."""

    @classmethod
    def of(cls, model: Model) -> Heads:
        """Return the heads that a model's [model.own] asks for."""
        return cls(*(model.own[name] for name in FIELDS))

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.keys * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.values * self.value_dim


def chunk_elements(heads: Heads) -> float:
    """Return the most elements per position, in float32, that backward of the recurrence holds for its chunks.

    The result is for all heads, as without tp. It is within 4 % of what is counted in bfloat16 for heads 64 to 256
    wide. Kernels of fla-core hold and move less.
    """
    K, H, k, v, C = heads.keys, heads.values, heads.key_dim, heads.value_dim, CHUNK
    if heads.gate == "gla":
        return H * (2 * k + 4 * v + 2 * C + 3.5 * k * v / C) + 19 * K * k
    return H * (4 * (k + v) + 5 * C + k * (2.2 * k + 3.2 * v) / C) + K * (8 * k + 2 * C)


class GatedDeltaSpec(MixerSpec):
    """The spec of linear attention."""

    name = "linear attention"
    implementation = "titanmoe.models.linear_attention:GatedDelta"
    by_segments = True
    after_scores = ("norm.weight", "wo.weight")

    def parameters(self, model: Model) -> dict[str, Split]:
        heads, dim = Heads.of(model), model.dim
        key, value, values = heads.key_width, heads.value_width, heads.values
        outputs = {"wq": key, "wk": key, "wv": value, "wz": value}
        vectors: dict[str, Split] = {"dt_bias": ((values,), 0), "A_log": ((values,), 0)}
        gates: dict[str, Split] = {}
        if heads.gate == "gla":
            gates = {"wg_a.weight": ((GLA_RANK, dim), None), "wg_b.weight": ((key, GLA_RANK), 0)}
            vectors = {"wg_b.bias": ((key,), 0)}
        else:
            outputs |= {"wb": values, "wa": values}
        splits: dict[str, Split] = {f"{w}.weight": ((width, dim), 0) for w, width in outputs.items()} | gates
        splits |= {f"conv_{part}": ((outputs[f"w{part}"], heads.conv_width), 0) for part in "qkv"}
        splits["wo.weight"] = (dim, value), 1
        return splits | vectors | {"norm.weight": ((heads.value_dim,), None)}

    def matrix_rows(self, model: Model) -> dict[str, MatrixRows]:
        """Return how the rows of each projection divide into matrices for Muon, by parameter name.

        The weights of beta and of the decay, and the convolution's taps, have no entry: AdamW trains them.
        """
        heads = Heads.of(model)
        key, value = MatrixRows((heads.key_dim,)), MatrixRows((heads.value_dim,))
        rows = {"wq": key, "wk": key, "wv": value, "wz": value, "wo": MatrixRows(())}
        return {f"{name}.weight": value for name, value in rows.items()}

    def token_flops(self, model: Model) -> int:
        """Return the forward FLOPs of the recurrence for a token, as it is defined token by token.

        For each value head they read the state by the key (gated delta rule alone), update the state, and read it by
        the query. The form by chunks of 64 tokens computes more.
        """
        heads = Heads.of(model)
        return (4 if heads.gate == "gla" else 6) * heads.values * heads.key_dim * heads.value_dim

    def work(self, model: Model, tp: int) -> MixerWork:
        """Return the work of one of `tp` ranks per position, for the planner.

        Elements are read and written by the convolution, for each tap, by the gated norm, and by the recurrence's
        chunks, as counted in rehearsals.
        """
        heads, dim = Heads.of(model), model.dim
        key, value, chunks = heads.key_width / tp, heads.value_width / tp, chunk_elements(heads) / tp
        products = [Product(2 * key + 2 * value, dim), Product(dim, value)]
        if heads.gate == "gla":
            products += [Product(GLA_RANK, dim), Product(key, GLA_RANK)]
        else:
            products.append(Product(2 * heads.values / tp, dim))
        state = heads.values / tp * heads.key_dim * (heads.key_dim + heads.value_dim)
        convolved, taps = 2 * key + value, 5 * heads.conv_width + 1
        forward, backward = (
            taps * convolved + 20 * value + 7 * chunks,
            2.3 * taps * convolved + 40 * value + 21 * chunks,
        )
        return MixerWork(products, dim, state=state, moved=(forward, backward))

    def saved_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the bytes of activations that one rank saves for backward of a microbatch.

        Saved are inputs and outputs of the convolution and of SiLU, which are queries, keys and values; the gates; the
        recurrence's output and z; and the gated norm's inputs and output. With `selective` (activation_checkpoint.mode)
        those of the convolution and the norm are recomputed instead.
        """
        value, w, W = Heads.of(model).value_width // batch.tp, batch.width, max(4, batch.width)
        normed = 0 if selective else (3 * value + Heads.of(model).values // batch.tp) * W
        return self._convolved_bytes(model, batch, 1 if selective else 3) + batch.positions * (2 * value * w + normed)

    def backward_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the most bytes that one rank's mixer holds in backward of a microbatch, still saved ones included.

        They are those of the recurrence's recomputed chunks, of the two gradients that enter these, and of queries,
        keys, values and gates, of which `selective` (activation_checkpoint.mode) saves a part.
        """
        heads, W = Heads.of(model), max(4, batch.width)
        chunks = chunk_elements(heads) * W + 2 * heads.value_width * batch.width
        return self._convolved_bytes(model, batch, 2 if selective else 3) + round(batch.positions * chunks / batch.tp)

    def _convolved_bytes(self, model: Model, batch: LocalBatch, copies: int) -> int:
        """Return the bytes of `copies` times queries, keys and values, plus the gates, plus cp's states per segment.

        They are those of one rank and one microbatch; without cp there are no segments.
        """
        heads, w, W = Heads.of(model), batch.width, max(4, batch.width)
        convolved = copies * (2 * heads.key_width + heads.value_width) * w
        gates = 2 * heads.key_width * W + GLA_RANK * w * batch.tp if heads.gate == "gla" else 4 * heads.values * W
        segment = heads.values * heads.key_dim * (heads.key_dim + 2 * heads.value_dim) * W
        return (batch.positions * (convolved + gates) + batch.segments * segment) // batch.tp

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """Return {"tp": {option: number of key heads}}: tp must divide it, and value heads are a multiple of it."""
        return {"tp": {f"{OWN}.linear_key_heads": Heads.of(config.model).keys}}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a Violation for numbers below 1, value heads that key heads do not divide, other gates, and windows."""
        options: dict[str, Any] = {name: config.model.own[name] for name in FIELDS}
        for name, value in options.items():
            if name != "linear_gate" and value < 1:
                yield Violation((f"{OWN}.{name}",), f"{OWN}.{name} = {value} leaves nothing: use 1 or more")
        keys, values, gate = options["linear_key_heads"], options["linear_value_heads"], options["linear_gate"]
        if keys > 0 and values % keys:
            yield Violation(
                (f"{OWN}.linear_value_heads", f"{OWN}.linear_key_heads"),
                f"{OWN}.linear_value_heads = {values} is not a multiple of {OWN}.linear_key_heads = {keys} "
                f"({values} % {keys} = {values % keys}): use linear_key_heads {nearest_values(divisors(values), keys)}",
            )
        if gate not in GATES:
            known = " or ".join(f'"{name}"' for name in GATES)
            yield Violation((f"{OWN}.linear_gate",), f'{OWN}.linear_gate = "{gate}" is no gate: use {known}')
        if window := config.model.sliding_window:
            yield Violation(
                ("model.sliding_window", "model.family"),
                f"model.sliding_window = {window} is for blocks that do not attend to the full sequence, and those of "
                f'model.family = "{config.model.family}" have linear attention: set sliding_window = 0',
            )


GATED_DELTA = GatedDeltaSpec()
