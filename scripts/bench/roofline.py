"""Count kernels, FLOPs and bytes of real models' layers, and the MFU that a roofline allows them.

    python scripts/bench/roofline.py [--models mixtral qwen3 deepseek] [--tokens 4096] [--json FILE]
    PYTHONPATH=DIR python scripts/bench/roofline.py --torchtitan      the same for TorchTitan's layers

Nothing is measured: operations are those of a rehearsal as on h100 of one layer of one rank, with balanced routing,
without recomputation, compilation, FSDP's copies and messages. A kernel takes the longer of FLOPs over the bf16 matmul
rate and bytes over the bandwidth, GAP passes before the next, and the host launches one every LAUNCH. Rates are the
manufacturers', so the MFU is a ceiling; "at usual rates" uses those of titanmoe/plan/hardware. "edp = 1" are experts
that no other data rank shares. B samples, L positions, D model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
import torchtitan_side  # noqa: E402

from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.ops.device import HARDWARE, imitate  # noqa: E402
from titanmoe.plan.devices import Device, read_device  # noqa: E402
from titanmoe.rehearse import stand_ins  # noqa: E402
from titanmoe.rehearse.code_site import FORWARD_BACKWARD, GATHER, REDUCE  # noqa: E402
from titanmoe.rehearse.fake_recorder import FakeRecorder  # noqa: E402
from titanmoe.rehearse.operation_costs import Operation, OperationCost, cost_of  # noqa: E402
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse  # noqa: E402
from titanmoe.replace import replaced  # noqa: E402
from titanmoe.text_report import columns  # noqa: E402

MODELS = {
    "mixtral": "family=mixtral size=8x7b",
    "qwen3": "family=qwen3_moe size=30b_a3b",
    # As on one of 8 ranks of ep: 32 of 256 experts, all of a token's 8 among them.
    "deepseek": "family=deepseek_v3 size=671b num_experts=32 num_dense_layers=0 mtp_depth=0",
}
AS_ON = "h100"
GAP, LAUNCH = 1e-6, 5e-6
"""The assumed seconds between two kernels on the device, and between two launches of the host."""
NAMED = 0.03
"""The fraction of all bytes above which an operation is listed."""


DEVICES = {"H100": read_device("h100"), "H200": read_device("h200")}
Counted = dict[Operation, int]


def recipe(model: str, tokens: int) -> Config:
    """Return the config of two layers of a model of MODELS, with one sample of `tokens`; the second is counted."""
    words = [word for pair in MODELS[model].split() for word in ("--model." + pair.replace("=", " ", 1)).split()]
    words += ["--model.num_layers", "2", "--model.vocab_size", "1024", "--training.seq_len", str(tokens)]
    words += ["--training.local_batch_size", "1", "--training.global_batch_size", "1"]
    words += ["--activation_checkpoint.mode", "none", "--training.device", "cpu"]
    return recipe_to_rehearse(words, 1, AS_ON)


def ours(config: Config, gathered: bool) -> Counted:
    """Return how often each operation of the second of two layers of titanmoe runs, forward and backward.

    `config` is from `recipe`; `gathered` says whether FSDP gathers the experts, or else they are copied once a
    step, as with edp = 1. FSDP's gathers and reductions are left out either way.
    """
    parallelism = replace(config.parallelism, reshard_after_forward="always" if gathered else "auto")
    rehearsal = rehearse(replace(config, parallelism=parallelism), 1, 0, AS_ON)
    if rehearsal.left_out:
        print("left out: " + "; ".join(rehearsal.left_out))
    return {
        one: count
        for one, count in rehearsal.operations.items()
        if one.site.layer == "layers.1" and one.site.region not in (GATHER, REDUCE)
    }


def theirs(config: Config) -> Counted:
    """Return how often each operation of one of TorchTitan's layers runs, forward and backward, with weights in bf16.

    `config` is titanmoe's, from `recipe`. Raises NotCompared if TorchTitan cannot be imported or has no such model.
    """
    torchtitan_side._import("cuda")
    layer = torchtitan_side._spec(config.model, config.training.seq_len).model.layers[1]

    def attention(*args: Any, scale: float | None = None, **kwargs: Any) -> Any:
        return stand_ins.attention(*args, **kwargs)

    recorder = FakeRecorder({}, 0, True, fake := FakeTensorMode(allow_non_fake_inputs=True))
    shape = 1, config.training.seq_len, config.model.dim
    with ExitStack() as stack:
        stack.enter_context(imitate(HARDWARE[AS_ON]))
        stack.enter_context(fake)
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attention))
        stack.enter_context(replaced(F, "rms_norm", stand_ins.rms_norm))
        block = layer.build()
        for parameter in block.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        x_BLD = torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()
        position_BL = torch.arange(shape[1]).unsqueeze(0)
        with recorder.recording():
            recorder.begin_step()
            with recorder.sites.region(FORWARD_BACKWARD):
                y_BLD = block(x_BLD, None, position_BL)
                y_BLD.backward(torch.zeros_like(y_BLD))
    return dict(recorder.operations)


def summary(counted: Counted, tokens: int) -> dict[str, Any]:
    """Return a row: kernels of the layer, FLOPs and bytes per token, and the MFU that they allow on each device.

    Under "forward" and "backward" are "kernels", "kernels_outside" (of matmuls and attention), "flops", "bytes" and
    "bytes_outside"; under "mfu", at peak rates, and "mfu_usual" the MFU by the device's name. `tokens` are those of the
    microbatch.
    """
    phases: dict[str, OperationCost] = defaultdict(OperationCost)
    for one, count in counted.items():
        work = cost_of(one) * count
        phases[one.site.phase] += work
        if not one.flops:
            phases["outside " + one.site.phase] += work
    row: dict[str, Any] = {}
    for phase in ("forward", "backward"):
        work, outside = phases[phase], phases["outside " + phase]
        row[phase] = {
            "kernels": work.kernels,
            "kernels_outside": outside.kernels,
            "flops": work.flops / tokens,
            "bytes": work.moved / tokens,
            "bytes_outside": outside.moved / tokens,
        }
    for key, usual in (("mfu", False), ("mfu_usual", True)):
        row[key] = {name: ceiling(counted, device, usual) for name, device in DEVICES.items()}
    return row


def model_flops(one: Operation) -> float:
    """Return the FLOPs of an operation that count for MFU.

    Of a router's matmul in three bfloat16 splits these are a third of what the device does.
    """
    return one.flops / 3 if one.site.file == "moe/router_product.py" else one.flops


def fraction_of_peak(one: Operation, device: Device) -> float:
    """Return the fraction of the device's peak FLOP/s that a matmul of this size reaches, or attention of any size.

    A matmul is looked up in the device's curve by one size: 3 * FLOPs / bytes, in bf16 the harmonic mean of its three
    sizes; of a grouped matmul, those of one group.
    """
    if "attention" in one.name:
        return device.attention
    size = 3 * one.flops / (one.read + one.written)
    return device.peak_fraction(size, size, size)


def ceiling(counted: Counted, device: Device, usual: bool = False) -> float:
    """Return the highest MFU: model FLOPs over the FLOPs that the device could do at its peak in the layer's time.

    That time is the device's, with GAP after each kernel, or the host's, LAUNCH for each kernel, if that is longer.
    With `usual`, matmuls and attention run at the rates that they usually reach, instead of the peak.
    """
    peak = device.peak_bfloat16

    def on_device(one: Operation) -> float:
        rate = peak * fraction_of_peak(one, device) if usual and one.flops else peak
        return max(one.flops / rate, (one.read + one.written) / device.bandwidth) + GAP

    busy = sum(count * on_device(one) for one, count in counted.items())
    on_host = LAUNCH * sum(counted.values())
    return sum(model_flops(one) * count for one, count in counted.items()) / peak / max(busy, on_host)


def movers(counted: Counted, tokens: int) -> list[tuple[str, ...]]:
    """Return a row of text for each operation that moves more than NAMED of all bytes, by name, line and pass.

    Rows are (name, region, pass, line, kernels, KB per token, fraction of all bytes), the most bytes first.
    """
    total, moved = 0, defaultdict(OperationCost)
    for one, count in counted.items():
        moved[one.name, one.site.region, one.site.phase, str(one.site)] += cost_of(one) * count
        total += (one.read + one.written) * count
    return [
        (name, region, phase, line, str(work.kernels), f"{work.moved / tokens / 1e3:.1f}", f"{work.moved / total:.1%}")
        for (name, region, phase, line), work in sorted(moved.items(), key=lambda x: -x[1].moved)
        if work.moved > NAMED * total
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the layer, in one sequence (default 4096)")
    parser.add_argument("--torchtitan", action="store_true", help="TorchTitan's layers too, where it has the model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.models, args.tokens = ["qwen3"], 128
    head = ("model", "side", "kernels", "of them outside", "FLOPs", "bytes", "of them outside")
    head += ("MFU H100", "MFU H200", "usual H100", "usual H200")
    body, tables, report = [head], [], {}
    for model in args.models:
        config = recipe(model, args.tokens)
        sides = {"titanmoe": ours(config, True), "titanmoe, edp = 1": ours(config, False)}
        if args.torchtitan:
            try:
                sides["torchtitan"] = theirs(config)
            except torchtitan_side.NotCompared as error:
                print(f"{model}: {error}")
        for side, counted in sides.items():
            row = report[f"{model} {side}"] = summary(counted, args.tokens)
            forward, backward = row["forward"], row["backward"]
            both = [f"{forward[x]} + {backward[x]}" for x in ("kernels", "kernels_outside")]
            bytes_ = [f"{forward[x] / 1e3:.0f} + {backward[x] / 1e3:.0f} KB" for x in ("bytes", "bytes_outside")]
            flops = f"{forward['flops'] / 1e6:.0f} + {backward['flops'] / 1e6:.0f} M"
            mfu = [f"{x:.1%}" for key in ("mfu", "mfu_usual") for x in row[key].values()]
            body.append((model, side, *both, flops, *bytes_, *mfu))
            row["movers"] = movers(counted, args.tokens)
            tables += ["", f"{model}, {side}: what moves more than {NAMED:.0%} of the bytes (KB per token)", ""]
            tables += columns(
                [("operation", "region", "pass", "line", "kernels", "KB", "of all"), *row["movers"]], right=(4, 5, 6)
            )
    print(f"Per token of {args.tokens}, forward + backward of one layer; outside: of products and attention\n")
    print("\n".join([*columns(body, right=tuple(range(2, 11))), *tables]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
