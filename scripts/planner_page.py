"""The planner against published runs: fits its eight factors, predicts the other rows and writes docs/planner.md.

    python scripts/planner_page.py            write the page below the last mark
    python scripts/planner_page.py --memory   write its first table: rehearses the shipped recipes, ten CPU-minutes
    python scripts/planner_page.py --folding  write README.md's table of what folding gains: a CPU-minute
    python scripts/planner_page.py --fit      print the factors that the calibration rows give

Rows are tests/data/published_runs.jsonl, each with its source. What they leave out is filled in by one rule, RULE,
which was written before anything was compared, as were the calibration rows. No row has a parameter of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import exp, inf, log
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from titanmoe.config.load import load  # noqa: E402
from titanmoe.config.recipes import find_recipe, names  # noqa: E402
from titanmoe.config.schema import (  # noqa: E402
    Config,
    Experts,
    Model,
    MoE,
    Parallelism,
    Pipeline,
    Training,
)
from titanmoe.config.world_size import recipe_ranks  # noqa: E402
from titanmoe.fold.degrees import Fold, derive  # noqa: E402
from titanmoe.models.count import flops_per_token  # noqa: E402
from titanmoe.models.families import preset  # noqa: E402
from titanmoe.plan.devices import Device, read_device  # noqa: E402
from titanmoe.plan.halves import Cost, Stack  # noqa: E402
from titanmoe.plan.links import Factors, Links  # noqa: E402
from titanmoe.plan.memory import ranks  # noqa: E402
from titanmoe.plan.plan_table import stages_per_rank  # noqa: E402
from titanmoe.plan.price import Price, Pricer  # noqa: E402
from titanmoe.plan.schedule_cost import played  # noqa: E402
from titanmoe.plan.search import Found, search  # noqa: E402
from titanmoe.plan.sizes import Sizes, units_of_stage  # noqa: E402
from titanmoe.rehearse.columns import format_bytes  # noqa: E402

ROWS = ROOT / "tests" / "data" / "published_runs.jsonl"
LATER = ROWS.with_name("published_later.jsonl")
PAGE = ROOT / "docs" / "planner.md"
MARK = "<!-- below this line: python scripts/planner_page.py -->\n"
REHEARSED = "<!-- from here: python scripts/planner_page.py --memory -->\n"
END = "<!-- to here -->\n"
README = ROOT / "README.md"
FOLDING = ROOT / "docs" / "folding_gains.jsonl"
FOLDING_MARK = "<!-- from here: python scripts/planner_page.py --folding -->\n"
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
CALIBRATION = (
    "mpf-t3-mixtral-8x22b-mcore-128g-s4096",
    "mpf-t3-mixtral-8x22b-fsdp+ep-128g-s4096",
    "mpf-t3-mixtral-8x22b-g8t8-mcore-128g-s4096",
    "mpf-t3-qwen2-57b-a14b-tp+ep+dp-64g-s4096",
    "mpf-t4-mixtral-8x22b-folding-1024g-s4096",
    "zoo-qwen235-deepep-tp2pp8ep32",
    "zoo-qwen235-long128k-force-balance",
    "bridge-skill-qwen30b-final",
)
"""One of each kind of strategy and of each thing that a factor stands for; three of the nine models, and all rows of
AutoModel, have none."""
START = Factors(matrix=1.0, attention=1.0, memory=0.8, link=0.7, network=0.7, rows=0.85, block=6e-4, busiest=1.2)
"""What one would guess; the fit is drawn towards it, because eight rows cannot tell eight factors apart alone."""
DRAWN = {
    "matrix": 0.1,
    "attention": 0.15,
    "memory": 0.2,
    "link": 0.25,
    "network": 0.25,
    "rows": 0.25,
    "block": 0.7,
    "busiest": 0.2,
}
"""How loosely, as the standard deviation of a factor's logarithm; that of a row's is NOISE."""
NOISE = 0.05
RULE = (
    "microbatch: 1. Virtual stages: one layer each if the layers divide by pp and the microbatches by pp, else 1. "
    "etp: as tp, Megatron's default, or 1 where ep times that exceeds the stage. Recomputation: none in time; in "
    "memory that of norms and activations, which costs next to nothing. Dispatcher: all-to-all. Routing: balanced "
    "where it is forced or where a capacity of 1 drops the rest, else learned. FLOPs behind a stated MFU: with causal "
    "attention, but in arXiv 2504.14960 with all of it, as Megatron counted then."
)
PAPER = "arXiv 2504.14960"
LONG = {"gpus": 1024, "seq": 131072, "tp": 8, "cp": 8, "pp": 8, "ep": 8, "etp": 1, "tflops_per_gpu": 0.429 * 989.5}
"""Its longest run of Mixtral-8x22B, which says neither batch, pp nor ep: those here are of its runs of 4,096 tokens."""
BATCHES = (32, 1024)
"""Samples of a step of LONG, at least and at most."""
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
UNDER = (1, 2, 4)
"""Microbatches in the range of a row that states none."""


@dataclass(frozen=True)
class Run:
    config: Config
    fold: Fold
    stack: Stack
    virtual: int
    learned: bool
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
    mode = "full" if named & {"activation_checkpointing", "full"} else "moe" if "moe" in named else "none"
    kind = row["framework"]
    automodel, bridge = "AutoModel" in kind, "Bridge" in kind
    gathers = "step" if automodel else "microbatch" if "FSDP" in kind else "none"
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
        moe=MoE(dispatcher="alltoall" if dispatcher == "alltoall" else "hierarchical"),
    )
    stack = Stack(
        gathers=gathers,
        neighbours=automodel and "balanced" in routing,
        etp_gathers=True,
        fused=True,
        even_split=True,
        fused_exchange=dispatcher != "alltoall",
        hides_rows="overlap" in (row["dispatcher"] or ""),
        pieces=row.get("pieces", 1),
        recompute=named if mode != "full" else frozenset({"full"}),
    )
    whole, state = STATE.get(row["model"]) or STATE.get(kind, (6, 12))
    waits = row["source"].startswith(PAPER)
    fold = derive(world, config.parallelism)
    made_whole = "FSDP" in kind and not automodel
    return Run(config, fold, stack, stages, learned, row["recompute"] is None, whole, state, waits, made_whole)


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


def price_of(run: Run, device: Device, factors: Factors) -> Price:
    imbalance = factors.busiest if run.learned else 1.0
    return Pricer(run.config, device, factors, run.stack, imbalance).price(run.config, run.fold)


def predict(row: dict[str, Any], factors: Factors, microbatch: int = 0, virtual: int = 0) -> Prediction | None:
    run = run_of(row, microbatch, virtual)
    if run is None:
        return None
    device = device_of(row["gpu"])
    price, held = price_of(run, device, factors), memory(run)
    return Prediction(price, held, held <= device.memory - KEPT)


# ---- memory of the published runs' software, which is not ours


def memory(run: Run) -> float:
    """Weights and gradients whole, master weights and moments sharded over data ranks; or all of it sharded, and some
    gathered. Activations as fused kernels keep them."""
    config, fold, stack, model = run.config, run.fold, run.stack, run.config.model
    sizes = Sizes(model, fold.tp, fold.ep, fold.etp, fold.edp)
    data = fold.dp * fold.cp
    stages = fold.pp * run.virtual
    pricer = Pricer(config, device_of("H100"), START, stack)
    split = pricer.split(stages)
    worst = 0.0
    for rank in range(fold.pp):
        mine = [i for i in range(stages) if i % fold.pp == rank]
        dense, experts, kept = 0, 0, 0.0
        for i in mine:
            units, moe = units_of_stage(config, sizes, split[i], i == 0, i == stages - 1)
            dense += sum(unit.whole + sum(unit.replicated) for unit in units)
            experts += moe * sizes.experts.whole
            kept += sum(_kept(run, layer) for layer in split[i])
        static = run.whole * (dense + experts) + run.sharded * (dense / data + experts / fold.edp)
        if stack.gathers != "none":
            last = sizes.block(model.num_layers - 1)
            block = last.whole + sum(last.replicated) + sizes.experts.whole
            static += 2 * (2 * block if stack.gathers == "microbatch" else dense + experts) + 4 * block
        flights = 1.0
        if fold.pp > 1:
            m = config.training.global_batch_size // (config.training.local_batch_size * fold.dp * stack.pieces)
            flights = played(config.pipeline.schedule, fold.pp, run.virtual, m).flights[rank] / run.virtual
        logits = 0.0
        if rank == fold.pp - 1:
            X = config.training.local_batch_size * config.training.seq_len / fold.cp
            logits = X * model.vocab_size / fold.tp * 8
        made = MADE * (dense + experts) * run.made_whole
        worst = max(worst, made, static + flights * kept + logits)
    return worst


def _kept(run: Run, layer: int) -> float:
    """Bytes of a microbatch in a block."""
    from titanmoe.config.blocks import has_experts

    config, fold, model, named = run.config, run.fold, run.config.model, run.stack.recompute or frozenset()
    X = config.training.local_batch_size * config.training.seq_len / fold.cp
    T, D = X / fold.tp, model.dim
    if named & {"full", "activation_checkpointing"}:
        return 2 * T * D
    heads, value = model.num_heads / fold.tp, model.v_head_dim or model.head_dim
    query = heads * model.head_dim
    keys = query + heads * value if model.kv_lora_rank else 2 * model.num_kv_heads / fold.tp * model.head_dim
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


# ---- memory of the shipped recipes, planned and rehearsed


def planned_peaks(name: str) -> tuple[Config, Fold, dict[int, int]]:
    """A shipped recipe's own mapping, and planned bytes of its first, its last and its fullest pipeline rank."""
    from titanmoe.rehearse.world import recipe_to_rehearse  # only here, because it takes torch seconds to start

    path = find_recipe(name)
    world = recipe_ranks([str(path)], preset)
    config = recipe_to_rehearse(["--config", str(path)], world, "h100")
    fold = derive(world, config.parallelism)
    peaks = [rank.peak for rank in ranks(config, fold)]
    return config, fold, {i: peaks[i] for i in sorted({0, fold.pp - 1, peaks.index(max(peaks))})}


def rows_on_page() -> list[tuple[str, ...]]:
    text = PAGE.read_text(encoding="utf-8").partition(REHEARSED)[2].partition(END)[0]
    return [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line.startswith("| ")][1:]


def memory_rows(recipes: list[str]) -> list[tuple[str, ...]]:
    """Of recipes that are not named, those that the page has."""
    from titanmoe.rehearse.world import rehearse

    known, found = rows_on_page(), []
    for name in names():
        if recipes and name not in recipes:
            found += [row for row in known if row[0] == name]
            continue
        config, fold, peaks = planned_peaks(name)
        for rank, planned in peaks.items():
            peak = rehearse(config, fold.world, rank * fold.stage, "h100").memory.peak
            place = f"{rank} of {fold.pp}"
            found.append((name, place, format_bytes(planned), format_bytes(peak), f"{planned / peak - 1:+.1%}"))
            print(*found[-1], flush=True)
    return found


# ---- what folding gains


class OneMesh(Pricer):
    """Prices experts on attention's mesh, dp x cp x tp: the ranks of a group of ep are cp x tp apart, so that a node
    has fewer of them."""

    def _experts(self, share: int, samples: int, tp: int, *mapping: Any) -> tuple[Cost, Cost]:
        whole = self.device, self.links
        self.device = replace(self.device, domain=max(tp, self.device.domain * tp // share))
        self.links = Links(self.device, self.factors)
        try:
            return super()._experts(share, samples, tp, *mapping)
        finally:
            self.device, self.links = whole


def folding_gains() -> list[dict[str, Any]]:
    """The fastest mapping of each recipe for GPUs, and the fastest unfolded one: as overrides, with seconds a step."""
    gains = []
    for name in (name for name in names() if not name.startswith("debug")):
        config, world = recipe(name), recipe_ranks([str(find_recipe(name))], preset)
        asked = config, world, device_of("H100"), Factors(), 1
        found = {
            "best": search(*asked).best[0],
            "unfolded": search(*asked, prices=OneMesh).best_unfolded,
        }
        mappings = {kind: {"seconds": one.price.step} | overrides(one) for kind, one in found.items() if one}
        gains.append({"recipe": name, "ranks": world} | mappings)
        print(*folding_cells(gains[-1]), flush=True)
    return sorted(gains, key=gain)


def recipe(name: str, changed: Sequence[str] = ()) -> Config:
    return load(["--config", str(find_recipe(name)), *changed], preset, lambda config: [])


def overrides(found: Found) -> dict[str, Any]:
    config, fold = found.config, found.fold
    return {
        "training.local_batch_size": config.training.local_batch_size,
        **{f"parallelism.{axis}": getattr(fold, axis) for axis in ("pp", "dp_replicate", "cp", "tp")},
        **{f"parallelism.experts.{axis}": getattr(fold, axis) for axis in ("edp_replicate", "ep", "etp")},
        "pipeline.schedule": config.pipeline.schedule,
        "pipeline.virtual_stages": config.pipeline.virtual_stages,
        "activation_checkpoint.mode": config.activation_checkpoint.mode,
        "moe.dispatcher": config.moe.dispatcher,
    }


def gain(row: dict[str, Any]) -> float:
    return row["unfolded"]["seconds"] / row["best"]["seconds"] - 1 if "unfolded" in row else inf


def folding_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def text(kind: str) -> str:
        if kind not in row:
            return "none fits"
        of = row[kind]
        views = (("parallelism.", ("pp", "cp", "tp")), ("parallelism.experts.", ("ep", "etp")))
        degrees = [[f"{axis} {of[table + axis]}" for axis in axes if of[table + axis] > 1] for table, axes in views]
        return f"{' / '.join(' '.join(view) or '1' for view in degrees)}: {of['seconds']:.3g} s"

    longer = f"{gain(row):.0%}" if "unfolded" in row else ""
    return row["recipe"], f"{row['ranks']:,}", text("best"), text("unfolded"), longer


def folding_table(gains: list[dict[str, Any]]) -> str:
    head = ("recipe", "GPUs", "fastest: attention / experts", "fastest unfolded", "takes longer by")
    return "\n".join(table_of(head, [folding_cells(row) for row in gains]))


# ---- the fit


def fit(rows: list[dict[str, Any]]) -> Factors:
    """Gauss-Newton on logarithms: the calibration rows' errors, and the factors' distances from START."""
    chosen = [row for row in rows if row["id"] in CALIBRATION]
    names = [field.name for field in fields(Factors)]
    wanted = [log(published_step(row)) for row in chosen]
    runs = [(run_of(row), device_of(row["gpu"])) for row in chosen]

    def errors(at: list[float]) -> list[float]:
        factors = Factors(**dict(zip(names, map(exp, at), strict=True)))
        steps = [price_of(*run, factors).step for run in runs]
        return [(log(step) - want) / NOISE for step, want in zip(steps, wanted, strict=True)]

    start = [log(getattr(START, name)) for name in names]
    spread = [DRAWN[name] for name in names]
    at = list(start)
    for _ in range(6):
        here = errors(at)
        slopes = []
        for i in range(len(names)):
            moved = [x + 0.02 * (i == j) for j, x in enumerate(at)]
            slopes.append([(b - a) / 0.02 for a, b in zip(here, errors(moved), strict=True)])
        matrix = [[sum(a * b for a, b in zip(p, q, strict=True)) for q in slopes] for p in slopes]
        right = [-sum(a * b for a, b in zip(p, here, strict=True)) for p in slopes]
        for i, s in enumerate(spread):
            matrix[i][i] += 1 / s**2
            right[i] -= (at[i] - start[i]) / s**2
        step = _solved(matrix, right)
        at = [x + max(-0.3, min(0.3, dx)) for x, dx in zip(at, step, strict=True)]
    return Factors(**{name: float(f"{exp(x):.3g}") for name, x in zip(names, at, strict=True)})


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a symmetric, positive system."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - sum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return found


# ---- the page

HIDES = "the source hides more of the messages of weights and gradients, or sends gradients in bfloat16"
HOST = "the host: no graphs, so that some ten milliseconds a block go on launching, which nothing here stands for"
LEARNED = "learned routing, more uneven than where its factor was fitted: the same run balanced by force is faster"
SLOW = "other software is as far below with this model: kernels for widths of 2,880, heads of 64 and its activation"
DEEPSEEK = "slower kernels of latent attention, or messages of experts and of weights at once"
CAUSES = {
    "mpf-t4-mixtral-8x22b-fsdp+ep": HIDES + "; its rate rises from 128 to 256 GPUs, where more of them cross nodes",
    "mpf-t4-qwen2-57b-a14b-fsdp+ep": HIDES,
    "mpf-t4-mixtral-8x22b-g8t8-fsdp+ep-1024g": HIDES,
    "mpf-t4-mixtral-8x22b-g8t8-mcore": "all-to-alls across nodes slow down as the job grows: no formula here has that",
    "zoo-qwen235-a2a": HOST + "; one block a stage, so that each hop waits for the host of another rank",
    "zoo-qwen235-newest": "more of the rows' messages are hidden than the share that was measured on another model",
    "zoo-qwen235-long": LEARNED,
    "automodel-dsv3-1024": DEEPSEEK
    + "; and a microbatch takes 16 % longer than on 256 GPUs, which its source does not "
    "explain",
    "automodel-dsv3-256": DEEPSEEK,
    "bridge-skill-moonlight": HOST + ": one microbatch a step",
    "bridge-2": SLOW,
    "later-automodel-gptoss": SLOW,
    "later-gptoss": SLOW,
    "later-qwen235-fsdp": "its weights are gathered less often, or in another way, than for each microbatch",
    "later-qwen235-tp4": "an old release; half the rate of its neighbours, of which none is so far off",
    "later-qwen235-long": LEARNED,
}
"""The likely cause, by the beginning of a row's name, where it is off by more than MISS."""
MISS = 0.10


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ranks_of(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(x) + (order.count(x) - 1) / 2 for x in values]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    x, y = ranks_of(a), ranks_of(b)
    mean = (len(x) - 1) / 2
    cov = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return cov / (sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5


@dataclass
class Row:
    row: dict[str, Any]
    published: float | None
    predicted: Prediction
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted.price.step / self.published - 1

    @property
    def calibration(self) -> bool:
        return self.row["id"] in CALIBRATION

    @property
    def oom(self) -> bool:
        return self.row["outcome"] == "oom"


def judged(rows: list[dict[str, Any]], factors: Factors) -> list[Row]:
    found = []
    for row in rows:
        if why_not(row):
            continue
        predicted = predict(row, factors)
        steps = [
            other.price.step
            for b in ((row["mbs"],) if row["mbs"] else UNDER)
            for v in ((0,) if row["vpp"] or row["pp"] == 1 else (0, 1, 2, 4))
            if (other := predict(row, factors, b or 0, v or 0)) is not None
        ]
        found.append(Row(row, published_step(row), predicted, min(steps), max(steps)))
    return found


def cause(row: Row) -> str:
    wrong_memory = row.predicted.fits == row.oom
    if not wrong_memory and (row.oom or abs(row.error) <= MISS):
        return ""
    return next((text for start, text in CAUSES.items() if row.row["id"].startswith(start)), "unknown")


def table_of(head: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in body),
        "",
    ]


def cells(one: Row) -> tuple[str, ...]:
    row, price = one.row, one.predicted.price
    measured = published_memory(row)
    memory = f"{one.predicted.memory / 2**30:.0f}" + (f" ({measured:.1f})" if measured else "")
    outcome = "out of memory" if one.oom else ""
    published = f"{one.published:.2f}" if one.published else outcome
    error = f"{one.error:+.1%}" if one.published else ("found" if not one.predicted.fits else "**missed**")
    if one.published and not one.predicted.fits:
        memory += " **too much**"
    mark = " (c)" if one.calibration else ""
    spread = f"{one.low:.2f} to {one.high:.2f}" if one.high > 1.001 * one.low else ""
    return row["id"] + mark, published, f"{price.step:.2f}", error, spread, memory, price.binds, cause(one)


def summary(rows: list[Row]) -> list[tuple[str, ...]]:
    body = []
    kinds = {
        "all held-out rows": lambda row: True,
        "all but Moonlight, there for its memory": lambda row: row["model"] != "Moonlight-16B-A3B",
        "Table 3 of arXiv 2504.14960": lambda row: "-t3-" in row["id"],
        "Table 4 of arXiv 2504.14960": lambda row: "-t4-" in row["id"],
        "Megatron model zoo": lambda row: row["id"].startswith("zoo"),
        "AutoModel (FSDP2)": lambda row: row["id"].startswith("automodel"),
        "Megatron Bridge": lambda row: row["id"].startswith("bridge"),
    }
    for name, of in kinds.items():
        errors = [abs(one.error) for one in rows if one.published and not one.calibration and of(one.row)]
        if errors:
            three = (median(errors), quantile(errors, 0.9), max(errors))
            body.append((name, str(len(errors)), *(f"{x:.1%}" for x in three)))
    return body


def correlations(rows: list[Row]) -> list[tuple[str, ...]]:
    groups = defaultdict(list)
    for one in rows:
        if one.published and "-t3-" in one.row["id"]:
            groups[one.row["model"]].append(one)
    body = []
    for model, group in groups.items():
        found = rank_correlation([x.published for x in group], [x.predicted.price.step for x in group])
        best, ours = (min(group, key=by) for by in (lambda x: x.published, lambda x: x.predicted.price.step))
        names = [one.row["framework"] for one in (best, ours)]
        body.append((model, str(len(group)), f"{found:.2f}", *names))
    return body


def conventions(rows: list[dict[str, Any]], factors: Factors) -> list[tuple[str, ...]]:
    """Errors of PAPER's rows if its MFU counts whole attention, and if it counts causal attention."""
    short = [
        (row, predict(row, factors).price.step)
        for row in rows
        if row["source"].startswith(PAPER) and not why_not(row) and row["outcome"] == "ok"
    ]
    like = next(row for row, _ in short if row["id"] == "mpf-t3-mixtral-8x22b-folding-128g-s4096")
    long = [(row, predict(row, factors).price.step) for row in (like | LONG | {"gbs": n} for n in BATCHES)]
    body = []
    for name, causal in (("whole, as this page takes it", False), ("causal", True)):
        errors, ends = (
            [step / published_step(row, causal) - 1 for row, step in runs if row["id"] not in CALIBRATION]
            for runs in (short, long)
        )
        body.append((name, f"{median(map(abs, errors)):.1%}", " to ".join(f"{x:+.0%}" for x in ends)))
    return body


def best_mappings() -> list[tuple[str, ...]]:
    """Of our own stack, for the models and worlds of Table 3, next to what was published as fastest."""
    body = []
    for name, world, published in (
        ("Mixtral-8x22B", 128, "pp 8 tp 2 ep 8 etp 1"),
        ("Qwen2-57B-A14B", 64, "pp 4 tp 2 ep 4 etp 1"),
        ("Mixtral-8x22B-G8T8", 128, "pp 8 tp 4 ep 8 etp 1"),
        ("Llama3-8x70B", 256, "pp 16 tp 8 ep 8 etp 1"),
    ):
        training = Training(seq_len=4096, global_batch_size=256)
        config = Config(model=model_of(name), training=training)
        found = search(config, world, device_of("H100"), Factors(), 1)

        def mapping_text(one: Found) -> str:
            fold, options = one.fold, one.config
            stages = f" x {stages_per_rank(options)} stages" if fold.pp > 1 else ""
            return (
                f"pp {fold.pp}{stages}, cp {fold.cp} tp {fold.tp} ep {fold.ep} etp {fold.etp}, microbatch "
                f"{options.training.local_batch_size}, {options.activation_checkpoint.mode}: {one.price.step:.2f} s"
            )

        plain = mapping_text(found.best_unfolded) if found.best_unfolded else "none fits"
        body.append((f"{name}, {world} H100", published, mapping_text(found.best[0]), plain))
    return body


def verdicts(scored: list[Row]) -> list[tuple[str, ...]]:
    """Which aims were reached."""
    held = [abs(one.error) for one in scored if one.published and not one.calibration]
    ooms = [one for one in scored if one.oom]
    found = sum(not one.predicted.fits for one in ooms)
    invented = sum(not one.oom and not one.predicted.fits for one in scored)
    measured = [(one.predicted.memory / 2**30, published_memory(one.row)) for one in scored]
    memory = [ours / theirs - 1 for ours, theirs in measured if theirs]
    memory_range = f"{min(memory):+.0%} to {max(memory):+.0%}"
    orders = [one[2] for one in correlations(scored)]
    asked = [
        ("median error of step time", "under 10 %", f"{median(held):.1%}", median(held) < 0.1),
        ("90th percentile", "under 25 %", f"{quantile(held, 0.9):.1%}", quantile(held, 0.9) < 0.25),
        ("rank correlation, each model", "over 0.9", ", ".join(orders), all(float(one) > 0.9 for one in orders)),
        ("out-of-memory rows found", f"{len(ooms)} of {len(ooms)}", f"{found} of {len(ooms)}", found == len(ooms)),
        ("out-of-memory rows invented", "none", str(invented), not invented),
        (
            "memory of measured rows",
            "within 10 %",
            memory_range,
            max(map(abs, memory)) < 0.1,
        ),
    ]
    return [(*cells, "yes" if fine else "**no**") for *cells, fine in asked]


def made(rows: list[dict[str, Any]], factors: Factors) -> str:
    """The page below its mark."""
    scored = judged(rows, factors)
    lines = ["", *table_of(("held-out rows", "aim", "found", "reached"), verdicts(scored))]
    lines += table_of(("held-out rows", "rows", "median", "90th percentile", "worst"), summary(scored))
    lines += [*wrap(f"What rows leave out: {RULE}", 120), ""]
    head = ("attention in its FLOPs", "median error of 4,096 tokens", "error at 131,072, a batch of 32 to 1,024")
    lines += [*wrap(CONVENTION, 120), "", *table_of(head, conventions(rows, factors))]
    what = [
        (f.name, f"{getattr(START, f.name):g}", f"{getattr(factors, f.name):g}", said)
        for f, said in zip(fields(Factors), docs_of(Factors), strict=True)
    ]
    lines += table_of(("factor", "guessed", "fitted", "what"), what)
    lines += ["## The best mapping", "", "Of titanmoe's own code, 256 samples of 4,096 tokens, balanced, dropless:", ""]
    lines += table_of(("model", "published as fastest", "planned for titanmoe", "best unfolded"), best_mappings())
    lines += ["## Strategies of one model", "", "Comparable rows of Table 3 of arXiv 2504.14960 that have a time:", ""]
    head = ("model", "rows", "rank correlation", "published as fastest", "planned as fastest")
    lines += table_of(head, correlations(scored))
    lines += ["## Every row", ""]
    head = (
        "row",
        "published, s",
        "predicted, s",
        "error",
        "range over the unstated, s",
        "memory, GiB",
        "binds",
        "cause",
    )
    lines += table_of(head, [cells(one) for one in sorted(scored, key=lambda one: not one.calibration)])
    lines += ["## Rows that came later", "", *wrap(LATER_SAYS, 120), ""]
    later = judged(read_rows(LATER), factors)
    errors = [abs(one.error) for one in later]
    three = f"{len(later)} rows: median {median(errors):.1%}, 90th percentile {quantile(errors, 0.9):.1%}."
    lines += [*table_of(head, [cells(one) for one in later]), three, ""]
    lines += ["## Not scored", ""]
    reasons = defaultdict(list)
    for row in rows:
        if why := why_not(row):
            reasons[why].append(row["id"])
    for why, left_out in reasons.items():
        lines += wrap(f"* {', '.join(left_out)}: {why}", 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


CONVENTION = (
    "No source says which FLOPs arXiv 2504.14960 counts. Its rows of 4,096 tokens are as well predicted by either, its "
    "longest run (42.9 % on 1,024 GPUs, tp 8, cp 8; its batch, pp and ep are not stated) by causal attention only, "
    "and the gap grows with length: none of its long runs is scored."
)
LATER_SAYS = (
    "Taken from the sources of the rows above when formulas and factors had been frozen again, and predicted "
    "once; nothing was changed since but the last column, the memory of the run under FSDP by the third round, and "
    "times by up to 1 % by the fourth."
)


def docs_of(kind: type) -> list[str]:
    """The docstring below each field of a dataclass, on one line."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(kind)).body[0].body
    said = [x.value.value for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    return [" ".join(text.split()) for text in said[-len(fields(kind)) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print what the calibration rows give")
    parser.add_argument("--memory", nargs="*", metavar="RECIPE", help="rehearse these recipes, or all")
    parser.add_argument("--folding", action="store_true", help="write what folding gains into README.md")
    args = parser.parse_args()
    if args.folding:
        gains = folding_gains()
        FOLDING.write_text("".join(json.dumps(row) + "\n" for row in gains), encoding="utf-8")
        before, _, rest = README.read_text(encoding="utf-8").partition(FOLDING_MARK)
        after = rest.partition(END)[2]
        text = before + FOLDING_MARK + "\n" + folding_table(gains) + "\n" + END + after
        README.write_text(text, encoding="utf-8")
        return
    if args.memory is not None:
        head = ("recipe", "pipeline rank", "planned", "rehearsed", "error")
        lines = "\n".join(["", *table_of(head, memory_rows(args.memory)), ""])
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(REHEARSED)
        PAGE.write_text(before + REHEARSED + lines + END + rest.partition(END)[2], encoding="utf-8")
        return
    rows = read_rows()
    if args.fit:
        print(json.dumps(asdict(fit(rows))))
        return
    prose = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(prose + MARK + made(rows, Factors()), encoding="utf-8")


if __name__ == "__main__":
    main()
