"""Linear attention with a gated delta rule (arXiv 2412.06464), or with the gate of GLA (arXiv 2312.06635)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from titanmoe.config.ranges import Violation, divisors, nearest_values
from titanmoe.config.schema import OWN, Config, Model
from titanmoe.models.mixers.mixer_spec import BatchShare, MatrixRows, MixerSpec, MixerWork, Product, Split

FIELDS: dict[str, int | float | bool | str] = dict(
    linear_key_heads=8, linear_value_heads=8, linear_key_dim=8, linear_value_dim=8, conv_width=4, linear_gate="delta"
)
"""Of [model.own], for a family that has such layers."""
GATES = "delta", "gla"
GLA_RANK = 16
CHUNK = 64
"""As in titanmoe.ops.gated_delta_rule."""


class Heads(NamedTuple):
    keys: int
    values: int
    """Value heads that belong to one key head are consecutive."""
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str

    @classmethod
    def of(cls, model: Model) -> Heads:
        return cls(*(model.own[name] for name in FIELDS))

    @property
    def key_width(self) -> int:
        return self.keys * self.key_dim

    @property
    def value_width(self) -> int:
        return self.values * self.value_dim


def numbers_of_chunks(heads: Heads) -> float:
    """Return how many numbers the backward of titanmoe.ops.gated_delta_rule holds at most, in chunks and float32, per
    position: within 4 % of what is counted in bfloat16 for heads 64 to 256 wide. Kernels of fla-core hold and move
    less."""
    K, H, k, v, C = heads.keys, heads.values, heads.key_dim, heads.value_dim, CHUNK
    if heads.gate == "gla":
        return H * (2 * k + 4 * v + 2 * C + 3.5 * k * v / C) + 19 * K * k
    return H * (4 * (k + v) + 5 * C + k * (2.2 * k + 3.2 * v) / C) + K * (8 * k + 2 * C)


class GatedDeltaSpec(MixerSpec):
    name = "linear attention"
    implementation = "titanmoe.models.linear_attention:GatedDelta"
    by_runs = True
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

    def rows(self, model: Model) -> dict[str, MatrixRows]:
        """What makes beta and decay are gates, and AdamW's like the taps."""
        heads = Heads.of(model)
        key, value = MatrixRows((heads.key_dim,)), MatrixRows((heads.value_dim,))
        rows = {"wq": key, "wk": key, "wv": value, "wz": value, "wo": MatrixRows(())}
        return {f"{name}.weight": value for name, value in rows.items()}

    def token_flops(self, model: Model) -> int:
        """Of the recurrence as it is defined, token by token: what the state holds for a key (delta), its change, and
        what it holds for the query. The form by chunks of 64 tokens computes more."""
        heads = Heads.of(model)
        return (4 if heads.gate == "gla" else 6) * heads.values * heads.key_dim * heads.value_dim

    def work(self, model: Model, tp: int) -> MixerWork:
        """moved: by the convolution, which reads and writes for each tap, by the gated norm, and by the chunks, as
        counted in rehearsals."""
        heads, dim = Heads.of(model), model.dim
        key, value, chunks = heads.key_width / tp, heads.value_width / tp, numbers_of_chunks(heads) / tp
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

    def kept_bytes(self, model: Model, share: BatchShare, selective: bool) -> int:
        """Both sides of the convolution and of SiLU, which are queries, keys and values; the gates; what the recurrence
        gives and z, and what becomes of both."""
        value, w, W = Heads.of(model).value_width // share.tp, share.width, max(4, share.width)
        normed = 0 if selective else (3 * value + Heads.of(model).values // share.tp) * W
        return self._convolved(model, share, 1 if selective else 3) + share.positions * (2 * value * w + normed)

    def backward_bytes(self, model: Model, share: BatchShare, selective: bool) -> int:
        """The chunks, computed again; by then what followed has become two gradients."""
        heads, W = Heads.of(model), max(4, share.width)
        chunks = numbers_of_chunks(heads) * W + 2 * heads.value_width * share.width
        return self._convolved(model, share, 2 if selective else 3) + round(share.positions * chunks / share.tp)

    def _convolved(self, model: Model, share: BatchShare, copies: int) -> int:
        """Queries, keys and values so many times, the gates, and the maps of runs with the states after them."""
        heads, w, W = Heads.of(model), share.width, max(4, share.width)
        convolved = copies * (2 * heads.key_width + heads.value_width) * w
        gates = 2 * heads.key_width * W + GLA_RANK * w * share.tp if heads.gate == "gla" else 4 * heads.values * W
        run = heads.values * heads.key_dim * (heads.key_dim + 2 * heads.value_dim) * W
        return (share.positions * (convolved + gates) + share.runs * run) // share.tp

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        return {"tp": {f"{OWN}.linear_key_heads": Heads.of(config.model).keys}}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        own: dict[str, Any] = {name: config.model.own[name] for name in FIELDS}
        for name, value in own.items():
            if name != "linear_gate" and value < 1:
                yield Violation((f"{OWN}.{name}",), f"{OWN}.{name} = {value} leaves nothing: use 1 or more")
        keys, values, gate = own["linear_key_heads"], own["linear_value_heads"], own["linear_gate"]
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
                f"model.sliding_window = {window} is for blocks that do not attend to the whole sequence, and those of "
                f'model.family = "{config.model.family}" have linear attention: set sliding_window = 0',
            )


GATED_DELTA = GatedDeltaSpec()
