"""Published runs, priced by the planner's formulas as their own software works.

Rows are tests/data/published_runs.jsonl, each with its source. What they leave out is filled in by one rule, RULE,
which was written before anything was compared. No row has a parameter of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config, Experts, Model, MoE, Parallelism, Pipeline, Training
from titanmoe.fold.degrees import Fold, derive
from titanmoe.models.count import flops_per_token
from titanmoe.models.families import preset
from titanmoe.models.mixers.mixer_spec import MixerWork
from titanmoe.plan.block_costs import RESIDUAL, ROPE
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device, read_device
from titanmoe.plan.dispatch_costs import PROFILED, DispatchChoice
from titanmoe.plan.links import Factors, LinkGroup
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.schedule_cost import schedule_cost
from titanmoe.plan.sizes import Sizes, units_of_stage
from titanmoe.plan.weight_copies import WeightCopies

ROWS = Path(__file__).resolve().parents[1] / "tests" / "data" / "published_runs.jsonl"
LATER = ROWS.with_name("published_later.jsonl")
FAMILIES = {
    "Mixtral-8x22B": ("mixtral", "8x22b"),
    "Mixtral-8x22B-G8T8": ("mixtral", "8x22b_g8t8"),
    "Qwen2-57B-A14B": ("qwen2_moe", "57b_a14b"),
    "Llama3-8x70B": ("llama3_moe", "8x70b"),
    "Qwen3-235B-A22B": ("qwen3_moe", "235b_a22b"),
    "Qwen3-30B-A3B": ("qwen3_moe", "30b_a3b"),
    "DeepSeek-V3": ("deepseek_v3", "671b"),
    "Moonlight-16B-A3B": ("deepseek_v3", "16b"),
    "GPT-OSS-120B": ("gpt_oss", "120b"),
    "GPT-OSS-20B": ("gpt_oss", "20b"),
}
RULE = (
    "microbatch: 1. Virtual stages: one layer each if the layers divide by pp and the microbatches by pp, else 1. "
    "etp: as tp, Megatron's default, or 1 where ep times that exceeds the stage. Recomputation: none in time; in "
    "memory that of norms and activations, which costs next to nothing. Dispatcher: all-to-all. Routing: balanced "
    "where it is forced or where a capacity of 1 drops the rest, else learned. FLOPs behind a stated MFU: with causal "
    "attention, but in arXiv 2504.14960 with all of it, as Megatron counted then."
)
PAPER = "arXiv 2504.14960"
READ_AGAIN = {
    "bridge-skill-qwen30b-final": {"dispatcher": "hybridep + EP overlap"},
    "bridge-skill-qwen30b": {"recompute": "none"},
    "bridge-2": {"recompute": "layernorm,moe_act", "vpp": 1},
    "automodel-dsv3-1024": {"recompute": "activation_checkpointing", "pieces": 4},
}
"""By the beginning of a row's name: what its source says and the row does not. Bridge's skill page of the first says
"EP overlap: enabled", and that a step took 24.7 s without; its recipes say what is computed again
(recipes/qwen/h100, perf_recipes/gpt_oss/h100), its table of gpt-oss "n/a" for virtual stages. AutoModel's table says
"LBS 8, GA 4": each data rank runs 32 samples through the pipeline in 4 pieces; the recipe of its 1,024 GPUs, when it
was added (commit 2c236e0, examples/benchmark/configs/deepseek_v3_te_deepep_1024.yaml), "activation_checkpointing:
true"."""
CONTRADICTED = {
    "bridge-25.11-gpt-oss-120b-h100-64-bf16-l592": "its source contradicts itself: with pp 4, 64 GPUs are 16 data "
    "ranks, and 16 x microbatch 4 x accumulation 2 is not the batch of 512",
}
STATE = {
    "NeMo AutoModel (PyTorch FSDP2)": (0, 8),
    "FSDP": (0, 18),
    "FSDP+EP": (0, 18),
    "Megatron-Bridge": (4, 12),
    "Moonlight-16B-A3B": (4, 8),
}
"""Bytes per weight, whole and sharded, by framework or model; (6, 12) elsewhere, as Megatron's --bf16: gradients in
float32. Bridge's performance recipes reduce gradients in bfloat16 (perf_recipes/_common.py), its Moonlight recipe keeps
moments in it too, AutoModel everything (components/distributed/config.py)."""
MADE = 2
"""Bytes per weight while Megatron makes a model. Even under FSDP each rank first has all weights that tp, etp, ep and
pp leave it, in bfloat16 (megatron/training/training.py, get_model: .cuda() comes before FSDP), unless options say
otherwise that are off by default and that no source here mentions (--init-model-with-meta-device)."""
KEPT = 5e9
"""Bytes that CUDA, NCCL and fragmentation keep from the tensors of software whose communicators are not known."""
NORM, SWIGLU, PERMUTE = (10, 20), (6, 10), (8, 8)
"""Bytes that Megatron's kernels move, forward and backward, per element in 16 bits: reads and writes of each."""
CLAMP, BIAS = (16, 22), (28, 40)
"""Bytes again, of what Megatron does to gpt-oss' experts by plain operations: clamping and joining both halves of the
activation's input, and adding biases times probabilities in float32, joined over experts (its fused_bias_geglu.py and
experts.py)."""


@dataclass(frozen=True)
class PublishedFactors(Factors):
    """The planner's, and one of what published runs do."""

    busiest: float = 1.04
    """Rows of the busiest rank over the mean under learned routing."""


@dataclass(frozen=True)
class Run:
    config: Config
    fold: Fold
    virtual: int
    learned: bool
    gathers: str
    """Weights: each microbatch, once a step, or none where only the optimizer's state is sharded."""
    neighbours: bool
    """Tokens choose experts next to each other, as AutoModel's balanced gate does, and so few ranks."""
    fsdp2: bool
    """Weights and gradients are copied as torch's FSDP2 does it."""
    hides_rows: bool
    """Some of the rows travel while another microbatch computes."""
    pieces: int
    """A step's microbatches go through the pipeline in that many pieces, which wait for each other."""
    recompute: frozenset[str]
    """Modules computed again in backward, in Megatron's names."""
    cheap: bool
    """Recomputation unsaid."""
    whole: int
    """Bytes per weight that a rank holds of its pieces as tp, etp and ep leave them: the weight, and its gradient."""
    sharded: int
    """Bytes per weight that data ranks share: master weights and moments."""
    waits: bool
    """Rows wait for their probabilities until they are back, as Megatron's did until 2025."""
    made_whole: bool
    """Weights are on the device before they are sharded."""


@dataclass(frozen=True)
class Prediction:
    price: Price
    memory: float
    """Bytes that tensors request, on the fullest rank."""
    fits: bool


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    for start, more in READ_AGAIN.items():
        rows = [row | more if row["id"].startswith(start) else row for row in rows]
    return rows


def why_not(row: dict[str, Any]) -> str:
    """Why a row is listed and not scored."""
    if row["id"] in CONTRADICTED:
        return CONTRADICTED[row["id"]]
    if row["model"] not in FAMILIES:
        return "the model cannot be built here"
    if not row["seq"] or not row["gbs"]:
        return "no sequence length or batch stated"
    if not row["comparable"] and row["outcome"] != "oom":
        return "marked not comparable"
    return ""


@lru_cache(maxsize=16)
def model_of(name: str) -> Model:
    family, size = FAMILIES[name]
    return Model(**preset(family, size))


def run_of(row: dict[str, Any], microbatch: int = 0, virtual: int = 0) -> Run | None:
    """None if that microbatch or number of virtual stages does not fit the row."""
    model = model_of(row["model"])
    tp, cp, pp, world = row["tp"], row["cp"], row["pp"], row["gpus"]
    samples = row["mbs"] or microbatch or 1
    dp = world // (tp * cp * pp)
    if row["gbs"] % (samples * dp):
        return None
    m = row["gbs"] // (samples * dp)
    fine = model.num_layers // pp if pp > 1 and model.num_layers % pp == 0 and m % pp == 0 else 1
    stages = row["vpp"] or virtual or fine
    if pp == 1:
        stages = 1
    if stages > 1 and not row["vpp"] and (m % pp or stages * pp > model.num_layers):
        stages = 1
        if virtual > 1:
            return None
    etp = tp if row["etp"] is None else row["etp"]
    if row["etp"] is None and world // pp % (row["ep"] * etp):
        etp = 1
    named = frozenset((row["recompute"] or "").replace("selective ", "").replace("none", "").split(",")) - {""}
    if named & {"activation_checkpointing", "full"}:
        named = frozenset({"full"})
    kind = row["framework"]
    automodel, bridge = "AutoModel" in kind, "Bridge" in kind
    dispatcher = (row["dispatcher"] or "alltoall").split()[0]
    routing = row["routing"] or ""
    learned = not any(word in routing for word in ("capacity", "balance"))
    config = Config(
        model=model,
        training=Training(
            seq_len=row["seq"],
            local_batch_size=samples,
            global_batch_size=row["gbs"],
            mixed_precision_reduce="bfloat16" if bridge else "float32",
        ),
        parallelism=Parallelism(pp=pp, cp=cp, tp=tp, experts=Experts(ep=row["ep"], etp=etp)),
        pipeline=Pipeline(schedule="Interleaved1F1B" if stages > 1 else "1F1B", virtual_stages=stages),
        moe=MoE(dispatcher="alltoall" if dispatcher == "alltoall" else "deepep"),
    )
    whole, state = STATE.get(row["model"]) or STATE.get(kind, (6, 12))
    return Run(
        config=config,
        fold=derive(world, config.parallelism),
        virtual=stages,
        learned=learned,
        gathers="step" if automodel else "microbatch" if "FSDP" in kind else "none",
        fsdp2=automodel,
        neighbours=automodel and "balanced" in routing,
        hides_rows="overlap" in (row["dispatcher"] or ""),
        pieces=row.get("pieces", 1),
        recompute=named,
        cheap=row["recompute"] is None,
        whole=whole,
        sharded=state,
        waits=row["source"].startswith(PAPER),
        made_whole="FSDP" in kind and not automodel,
    )


def published_memory(row: dict[str, Any]) -> float | None:
    """GiB. Rows whose note says so give GB, which Megatron Bridge counts as 1e9 (training/utils/train_utils.py)."""
    peak = row["peak_mem_gib"]
    return peak * (1e9 / 2**30 if peak and "GB" in (row["note"] or "") else 1) if peak else None


def published_step(row: dict[str, Any], causal: bool = False) -> float | None:
    """Seconds. A rate is converted by the FLOPs that its source counts. causal: take those of PAPER as causal too."""
    if row["step_s"]:
        return row["step_s"]
    tokens = row["gbs"] * row["seq"]
    if row["tok_s_gpu"]:
        return tokens / row["tok_s_gpu"] / row["gpus"]
    if not row["tflops_per_gpu"]:
        return None
    model = model_of(row["model"])
    flops = flops_per_token(model, row["seq"])
    if row["source"].startswith(PAPER) and not causal:
        flops += 3 * model.num_layers * model.num_heads * 2 * model.head_dim * row["seq"]
    return tokens * flops / (row["tflops_per_gpu"] * 1e12) / row["gpus"]


@lru_cache(maxsize=8)
def device_of(gpu: str) -> Device:
    return read_device(gpu.lower())


def price_of(run: Run, device: Device, factors: PublishedFactors) -> Price:
    return RunPricer(run, device, factors).price(run.config, run.fold)


def predict(row: dict[str, Any], factors: PublishedFactors, microbatch: int = 0, virtual: int = 0) -> Prediction | None:
    run = run_of(row, microbatch, virtual)
    if run is None:
        return None
    device = device_of(row["gpu"])
    price, peak = price_of(run, device, factors), memory(run)
    return Prediction(price, peak, peak <= device.memory - KEPT)


# ---- time, where the runs' software is not ours


class RunPricer(Pricer):
    """Prices a run as its software does it: kernels as Megatron's."""

    head_recompute = 1.0

    def __init__(self, run: Run, device: Device, factors: PublishedFactors):
        super().__init__(run.config, device, factors, factors.busiest if run.learned else 1.0)
        self.run = run

    def split(self, stages: int, uneven: tuple[int, ...]) -> list[range]:
        return even_split(self.model.num_layers, stages)

    def idle(self, config: Config, fold: Fold, per_rank: int, m: int) -> float:
        return self.run.pieces * super().idle(config, fold, per_rank, m // self.run.pieces)

    def gathers(self, config: Config, fold: Fold) -> str:
        return self.run.gathers

    def weight_copies(self, config: Config, fold: Fold, m: int) -> WeightCopies | None:
        """AutoModel's are FSDP2's, in 16 bits and reduced once a step. Megatron's products add gradients to their sum
        themselves (gradient_accumulation_fusion), and its weights are computed with where they are gathered."""
        return WeightCopies(2, 2, 2, False, True, m) if self.run.fsdp2 else None

    def leaves_out_experts(self, config: Config, fold: Fold) -> bool:
        return False

    def _norms(self, elements: float, part: int) -> float:
        return self.move_seconds(elements * (NORM[part] + RESIDUAL[part]))

    def _activation(self, elements: float, part: int) -> float:
        return self.move_seconds(elements * SWIGLU[part])

    def _row_copies(self, left: float, arrived: float, exchanged: bool, part: int) -> float:
        return self.move_seconds((left + arrived) * self.model.dim * PERMUTE[part])

    def _mixer_bytes(self, work: MixerWork, part: int) -> float:
        turned = 4 * work.queries if self.model.kv_lora_rank else work.rotated  # latents: queries and keys are joined
        return turned * ROPE[part] * (1 + 2 * (work.normed > 0))

    def _router_product(self, T: float) -> float:
        """In float32, as Megatron's router and AutoModel's are."""
        return self.product(T, self.model.num_experts, self.model.dim) * 4

    def _attention_rate(self, cp: int, ring: bool) -> float:
        return super()._attention_rate(cp, ring=False)

    def _ring(self, group: LinkGroup, query: float, keys: float, attention: float, part: int) -> Cost:
        """Megatron's works on two pieces at a time, so that short ones fill the device and merging is hidden (cp_stream
        in TransformerEngine's context_parallel.py): it costs what its messages add, and gradients travel in 16 bits."""
        passes = group.size - 1
        message_seconds = passes * self.links.pass_on(group, keys * self.w)
        return Cost(cp=self.links.exposed(message_seconds * (2 if part else 1), attention * passes / group.size))

    def _experts(
        self, share: int, samples: int, tp: int, ep: int, etp: int, choice: DispatchChoice, *more: Any
    ) -> tuple[Cost, Cost]:
        both = super()._experts(share, samples, tp, ep, etp, choice, *more)
        if not self.model.expert_biases:
            return both
        R = samples * self.config.training.seq_len / share * self.model.top_k * etp * self.imbalance
        F, D = self.model.expert_hidden / etp, self.model.dim
        forward, backward = (
            cost._replace(memory=cost.memory + self.move_seconds(R * F * clamp + R * D * bias))
            for cost, clamp, bias in zip(both, CLAMP, BIAS, strict=True)
        )
        return forward, backward

    def covering(self, matrix: float) -> float:
        return 0.0

    def exchange(self, dispatcher: str, T: float, ep: int, etp: int) -> float:
        """Rows of etp ranks go by all-gather and reduce-scatter, rather than as copies in the all-to-all."""
        if dispatcher != "alltoall" or etp == 1:
            return super().exchange(dispatcher, T, ep, etp)
        rows = T * self.model.top_k * self.model.dim * self.w
        return 2 * (self.links.exchange(LinkGroup(ep, etp), rows) + self.links.gather(LinkGroup(etp, 1), rows * etp))

    def visits(self, parts: int) -> float:
        if self.run.neighbours:
            return max(1.0, self.model.top_k * parts / self.model.num_experts)
        return super().visits(parts)

    def block(self, fold: Fold, samples: int, layer: int, choice: DispatchChoice, mode: str) -> Cost:
        attention, ffn = self.attention_and_ffn(fold, samples, layer, choice)
        total = super().block(fold, samples, layer, choice._replace(hidden=PROFILED * self.run.hides_rows), "none")
        return total + self._again(attention[0], ffn[0], has_experts(self.model, layer))

    def _again(self, attention: Cost, ffn: Cost, experts: bool) -> Cost:
        named = self.run.recompute
        if "full" in named:
            return attention + ffn
        total = Cost()
        if ("moe" in named and experts) or ("mlp" in named and not experts):
            total = total + ffn
        if "core_attn" in named:
            total = total + Cost(attention=attention.attention)
        if named & {"norm", "layernorm", "act", "moe_act"}:
            total = total + Cost(memory=(attention.memory + ffn.memory) / 3)
        if "mla_up_proj" in named:
            total = total + Cost(matrix=attention.matrix / 4)
        return total


def even_split(layers: int, stages: int) -> list[range]:
    """Equally many layers for each stage, whatever embedding and head cost."""
    each, more = divmod(layers, stages)
    ends = [each * (i + 1) + min(i + 1, more) for i in range(stages)]
    return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]


# ---- memory, where their software is not ours


def memory(run: Run) -> float:
    """Weights and gradients whole, master weights and moments sharded over data ranks; or all of it sharded, and some
    gathered. Activations as fused kernels keep them."""
    config, fold, model = run.config, run.fold, run.config.model
    sizes = Sizes(model, fold.tp, fold.ep, fold.etp, fold.edp)
    data = fold.dp * fold.cp
    stages = fold.pp * run.virtual
    split = even_split(model.num_layers, stages)
    worst = 0.0
    for rank in range(fold.pp):
        mine = [i for i in range(stages) if i % fold.pp == rank]
        dense, experts, kept_bytes = 0, 0, 0.0
        for i in mine:
            units, moe = units_of_stage(config, sizes, split[i], i == 0, i == stages - 1)
            dense += sum(unit.whole + sum(unit.replicated) for unit in units)
            experts += moe * sizes.experts.whole
            kept_bytes += sum(_kept(run, layer) for layer in split[i])
        static = run.whole * (dense + experts) + run.sharded * (dense / data + experts / fold.edp)
        if run.gathers != "none":
            last = sizes.block(model.num_layers - 1)
            block = last.whole + sum(last.replicated) + sizes.experts.whole
            static += 2 * (2 * block if run.gathers == "microbatch" else dense + experts) + 4 * block
        in_flight = 1.0
        if fold.pp > 1:
            m = config.training.global_batch_size // (config.training.local_batch_size * fold.dp * run.pieces)
            in_flight = schedule_cost(config.pipeline.schedule, fold.pp, run.virtual, m).in_flight[rank] / run.virtual
        logits = 0.0
        if rank == fold.pp - 1:
            X = config.training.local_batch_size * config.training.seq_len / fold.cp
            logits = X * model.vocab_size / fold.tp * 8
        made_bytes = MADE * (dense + experts) * run.made_whole
        worst = max(worst, made_bytes, static + in_flight * kept_bytes + logits)
    return worst


def _kept(run: Run, layer: int) -> float:
    """Bytes of a microbatch in a block."""
    config, fold, model, named = run.config, run.fold, run.config.model, run.recompute
    X = config.training.local_batch_size * config.training.seq_len / fold.cp
    T, D = X / fold.tp, model.dim
    if "full" in named:
        return 2 * T * D
    heads, value = model.num_heads / fold.tp, model.v_head_dim or model.head_dim
    query = heads * model.head_dim
    keys = query + heads * value if model.kv_lora_rank else 2 * max(1, model.num_kv_heads / fold.tp) * model.head_dim
    latents = T * (model.q_lora_rank + model.kv_lora_rank)
    attention = T * D + X * heads * value * ("core_attn" not in named) + 2 * latents
    attention += X * (query + keys) * ("mla_up_proj" not in named or not model.kv_lora_rank)
    norms = 0 if run.cheap or named & {"norm", "layernorm"} else 2 * T * D
    acts = 0 if run.cheap or named & {"act", "moe_act"} else 1
    if not has_experts(model, layer):
        ffn = T * D + (0 if "mlp" in named else 3 * X * model.dense_hidden / fold.tp)
    elif "moe" in named:
        ffn = T * D
    else:
        R, F = T * model.top_k * fold.etp, model.expert_hidden / fold.etp
        ffn = T * D + R * D + T * model.top_k * D * run.waits + (2 + acts) * R * F + 4 * T * model.num_experts
        ffn += 0 if "shared_expert" in named else 3 * X * model.shared_hidden / fold.tp
    return 2 * (attention + norms + ffn)
