"""Compare training on a GPU with training on a CPU: steps of tiny models from the same weights and data.

    python scripts/gpu/gpu_parity.py [--device cuda|cpu|pretend] [--json FILE] [--only NAME ...] [--skip NAME ...]

"pretend" runs a GPU's code on the CPU, with kernels that Triton interprets. Exits with status 1 if a check failed:

    init, float64  initial weights and random bits; two steps: loss, norm, gradients, weights within 1e-10 (relative)
    float32, bf16  one step: within 1e-4; with balanced routing, the GPU's error at most 3 times the CPU's
    compiled ...   with compile.enable: as float64; so are optimizers, objectives, recomputation, ...
    resume         losses of train.py after a checkpoint; deterministic: equal to the bit; generate: the same text
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tiny_models import (
    CPU,
    DTYPES,
    FEATURES,
    IN_BF16,
    MAIN,
    MIXED,
    OTHERS,
    ROOT,
    WITH_DOCUMENTS,
    Changes,
    Run,
    Side,
    config_of,
    run,
    to_cpu,
    trainer_of,
)

from tests import parity
from tests.support.parity_errors import nan_to_inf, relative_error, tolerance, worst_error
from tests.support.tolerances import unit_roundoff
from titanmoe.ops import counter_rng, gated_delta_rule
from titanmoe.ops.device import Hardware

PROCESS_SECONDS = 150
MARGIN, SEEDS = 1e-4, 40
"""The least margin of a choice of experts in float32, and the number of seeds tried for it."""


@dataclass
class Result:
    """The result of a check, which passes if `error` is at most `allowed`."""

    error: float
    allowed: float
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def differences(got: Run, want: Run, with_weights: bool) -> dict[str, float]:
    """Return the largest relative errors of "loss", "norm", "grads" and "weights", and the number of other "choices".

    Choices of experts are left out of compiled runs; they are infinite if the routers were called less or more often.
    Weights after the last step are left out unless `with_weights`.
    """
    out = {}
    if not got.config.compile.enable:
        out["choices"] = math.inf if len(got.chosen) != len(want.chosen) else 0.0
        out["choices"] += sum(float((a != b).sum()) for a, b in zip(got.chosen, want.chosen, strict=False))
    for name in ("loss", "norm"):
        out[name] = max(map(relative_error, getattr(got, name), getattr(want, name)))
    out["grads"] = worst_error(got.grads, want.grads)[0]
    return out | ({"weights": worst_error(got.weights, want.weights)[0]} if with_weights else {})


def exact(family: str, side: Side, dtype: str, changes: Changes, steps: int, documents: bool = False) -> Result:
    """Compare steps on a device with the CPU's, from the same weights; the result's error is the largest relative one.

    The number of different choices of experts counts as such an error. Weights are compared only after several steps in
    float64. In float32 a seed is used with which choices of experts do not depend on rounding; ValueError if there is
    none.

    Args:
        family: the model family.
        side: the device.
        dtype: dtype of weights and computation.
        changes: options that differ from the tiny model's.
        steps: number of steps.
        documents: whether samples have several documents.
    """
    changes = dict.fromkeys(DTYPES, dtype) | changes
    for seed in range(SEEDS):
        changes["training.seed"] = seed
        want = run(family, changes, CPU, steps, documents)
        if want.margin > MARGIN or want.config.training.dtype == "float64":
            break
    else:
        raise ValueError(f"no margin above {MARGIN} with {SEEDS} seeds")
    got = run(family, changes, side, steps, documents, initial=want)
    errors = differences(got, want, with_weights=steps > 1 and want.config.training.dtype == "float64")
    figures = {**errors, "margin": want.margin, "seed": seed, "worst gradient": worst_error(got.grads, want.grads)[1]}
    return Result(max(errors.values()), tolerance(want.config), figures)


def bf16(
    family: str, side: Side, changes: Changes | None = None, times: float = 3.0, documents: bool = False
) -> Result:
    """Compare a step in bfloat16; the result's error is the largest ratio of the device's error to the CPU's.

    The ratio is that of the loss or of one gradient; norm and weights are not compared. An error is |x - x64| / |x64|
    in the 2-norm, with x64 from float64 on the CPU, whose root mean square counts as at least 1% of the largest; errors
    of the CPU below 4 roundings, 4 u, count as these. Routing is balanced unless `changes` say otherwise.

    Args:
        family: the model family.
        side: the device.
        changes: options that differ from the tiny model's.
        times: largest ratio allowed, because devices round at other places; twice that for a pretended GPU, because
            Triton's interpreter truncates to bfloat16.
        documents: whether samples have several documents.
    """
    times *= 2 if side.pretended else 1
    even = {"moe.force_balance": True} | (changes or {})
    want = run(family, even, CPU, documents=documents)
    on_cpu, on_gpu = (run(family, even | MIXED, where, documents=documents, initial=want) for where in (CPU, side))
    floor, errors = 4 * unit_roundoff(torch.bfloat16), {}
    largest = max(float(x.norm()) / x.numel() ** 0.5 for x in want.grads.values())
    for name, x in want.grads.items():
        scale = max(float(x.norm()), 1e-2 * largest * x.numel() ** 0.5)
        errors[name] = tuple(
            nan_to_inf(float((each.grads[name].double() - x).norm()) / scale) for each in (on_gpu, on_cpu)
        )
    errors["loss"] = relative_error(on_gpu.loss[0], want.loss[0]), relative_error(on_cpu.loss[0], want.loss[0])
    ratios = {name: mine / max(other, floor) for name, (mine, other) in errors.items()}
    worst = max(ratios, key=ratios.__getitem__)
    figures = {"loss": errors["loss"], "worst": worst, "its errors": errors[worst]}
    figures["largest error"] = max(mine for mine, _ in errors.values())
    figures["median error"] = sorted(errors.values())[len(errors) // 2]
    return Result(ratios[worst], times, figures, f"times the CPU's error; {worst}")


def by_fla(side: Side) -> Result:
    """Compare a bfloat16 step with linear attention, which fla-core's kernels compute, as `bf16` does.

    More error is allowed than for our own code, `times=6` the CPU's: the kernels' chunks round states more often.
    Without fla-core on this device the check passes with a note.
    """
    if not gated_delta_rule.uses_fla("auto", torch.empty(1, dtype=torch.bfloat16, device=side.device)):
        return Result(0.0, 0.0, note="fla-core is not used here: not installed, a wrong Triton, or no GPU")
    return bf16("qwen3_next", side, times=6.0)


def init(side: Side) -> Result:
    """Compare random numbers and initial weights with the CPU's: equal bit by bit, float64 weights to 64 roundings."""
    index, key = torch.arange(-(1 << 40), 1 << 40, 12345678901), counter_rng.key("law")
    pairs = {
        f"counter_rng.{make.__name__}": [make(key, index.to(where.device)).cpu() for where in (CPU, side)]
        for make in (counter_rng.bits, counter_rng.uniform, counter_rng.normal)
    }
    worst, rounded = 0.0, []
    for dtype in ("float32", "float64"):
        for family in MAIN:
            sides = []
            for where in (CPU, side):
                made = trainer_of(config_of(family, dict.fromkeys(DTYPES, dtype), where), where)
                sides.append(to_cpu(made.training.parameters))
            pairs |= {f"{dtype} {family} {name}": [side[name] for side in sides] for name in sides[0]}
    for name, (want, got) in pairs.items():
        if torch.equal(want, got):
            continue
        rounded.append(name)
        off = float(((got - want).double().abs() / want.double().abs().clamp(min=1e-300)).max())
        in_roundings = nan_to_inf(off / torch.finfo(want.dtype).eps) if want.is_floating_point() else math.inf
        # cos and log in float64 may be off by a bit or two; a float32 weight computed from them is equal.
        worst = max(worst, in_roundings if name.startswith("float64") else math.inf)
    unequal = [name for name in rounded if not name.startswith("float64")]
    figures = {"tensors": len(pairs), "not equal": len(rounded), "float32 not equal": unequal}
    return Result(worst, 64.0, figures, "in roundings, of float64")


# ---- what needs processes of its own


def outputs(commands: list[list[str]]) -> list[str]:
    """Run commands side by side and return what each printed.

    Raises RuntimeError, with the end of its stderr, if a command fails; TimeoutExpired after PROCESS_SECONDS.
    """
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        texts = [process.communicate(timeout=PROCESS_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, err) in zip(started, texts, strict=True):
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}: {err.strip()[-2000:]}")
    return [out for out, _ in texts]


def training_command(folder: Path, side: Side, *more: str) -> list[str]:
    """Return the command, as words, that trains the debug recipe on one rank, four steps, saved after 2 and 4.

    It replaces mapping, data and batch of the recipe, and turns validation off. `folder` is job.dump_folder, `more` are
    further words, "--TABLE.FIELD" and value.
    """
    options = {"parallelism.tp": 1, "parallelism.experts.ep": 1, "data.source": "synthetic", "validation.interval": 0}
    options |= {"validation.held_out": 0, "training.steps": 4, "training.seq_len": 64, "training.global_batch_size": 4}
    options |= {"checkpoint.interval": 2, "checkpoint.keep_last": 0, "metrics.tensorboard": False, "job.name": "run"}
    options |= {"job.dump_folder": folder, "training.device": side.device.type}
    return [sys.executable, "train.py", "--config", "train_configs/debug.toml", *parity.arguments(options), *more]


def losses(folder: Path) -> list[float]:
    """Return the loss of each line of the metrics.jsonl of the run in a folder."""
    text = next(folder.rglob("metrics.jsonl")).read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Return a temporary folder for all runs of this process."""
    return tempfile.TemporaryDirectory(prefix="gpu_parity")


def resumed(side: Side, name: str, *more: str) -> Result:
    """Compare the losses of steps 3 and 4 of an uninterrupted run and of one resumed at step 2, both on a device.

    They may differ by 1e-6, with --training.deterministic not at all. `name` is the folder for the runs in `scratch`,
    `more` are options of both. Raises RuntimeError if a run fails or does not report each step's loss.
    """
    uninterrupted, rest = (Path(scratch().name) / name / run_name for run_name in ("uninterrupted", "resumed"))
    outputs([training_command(uninterrupted, side, *more)])
    checkpoint = next(uninterrupted.rglob("step-00000002"))
    outputs([training_command(rest, side, *more, "--checkpoint.load", str(checkpoint))])
    want, got = losses(uninterrupted), losses(rest)
    if (len(want), len(got)) != (4, 2):
        raise RuntimeError(f"4 steps reported {len(want)} losses, and 2 more {len(got)}")
    allowed = 0.0 if "--training.deterministic" in more else 1e-6
    return Result(max(map(relative_error, got, want[2:])), allowed, {"losses": want, "resumed": got})


def generated(side: Side) -> Result:
    """Compare what a checkpoint generates on the CPU and on the device, greedily, in float32.

    The checkpoint is that of the check "resume"; without one the device trains it first. The result's error is the
    number of prompts whose lines differ.
    """
    folder = Path(scratch().name) / "resume" / "uninterrupted"
    if not folder.exists():
        outputs([training_command(folder, side)])
    checkpoint = next(folder.rglob("step-00000004"))
    options = ["--temperature", "0", "--max-tokens", "32", "--dtype", "float32", "--json"]
    prompts = ["--prompt", "def law(", "--prompt", "the same"]
    command = [sys.executable, "-m", "titanmoe", "generate", "--checkpoint", str(checkpoint), *options, *prompts]
    outs = outputs([[*command, "--device", where.device.type] for where in (CPU, side)])
    texts = [[json.loads(line) for line in out.splitlines()] for out in outs]
    wrong = sum(a != b for a, b in zip(*texts, strict=True))
    return Result(float(wrong), 0.0, {"prompts": len(texts[0])}, "" if not wrong else f"{texts}"[:500])


def checks(side: Side, tiny: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield the name of each check and the function that runs it, the most important first, slow ones late.

    Checks that need a real GPU are left out if `side` is pretended; `tiny` leaves out slow checks and most families.
    """
    main, others = (MAIN[:2], ()) if tiny else (MAIN, OTHERS)

    def in_bf16(name: str) -> tuple[str, Callable[[], Result]]:
        how = {"changes": IN_BF16[name], "documents": name.startswith(WITH_DOCUMENTS)}
        return f"bf16 {name}", functools.partial(bf16, "mixtral", side, **how)

    def narrow(families: Sequence[str]) -> Iterator[tuple[str, Callable[[], Result]]]:
        for family in families:
            yield f"float32 {family}", functools.partial(exact, family, side, "float32", {}, 1)
        for family in families:
            yield f"bf16 {family}", functools.partial(bf16, family, side)

    yield "init", functools.partial(init, side)
    for family in (*main, *others):
        yield f"float64 {family}", functools.partial(exact, family, side, "float64", {}, 2)
    yield from narrow([family for family in main if family != "gpt_oss"])
    for name in IN_BF16:
        # Triton's interpreter multiplies bfloat16 as integers.
        if name != "documents" and not (name == "accumulated" and side.pretended):
            yield in_bf16(name)
    for name, (family, changes) in FEATURES.items():
        yield name, functools.partial(exact, family, side, "float64", changes, 2, name.startswith(WITH_DOCUMENTS))
    yield "fla", functools.partial(by_fla, side)
    if not side.pretended:
        yield from narrow(["gpt_oss"])
        yield in_bf16("documents")
        yield "resume", functools.partial(resumed, side, "resume", "--training.mixed_precision_param", "float32")
        yield "generate", functools.partial(generated, side)
        if not tiny:
            options = ("--training.mixed_precision_param", "bfloat16", "--training.deterministic", "true")
            yield "deterministic", functools.partial(resumed, side, "deterministic", *options)
    yield from narrow(others)


def last_frame(trace: Any) -> str:
    """Return " at FILE:LINE" of the last frame in titanmoe of a traceback; "" if there is none."""
    ours = [
        f for f in traceback.extract_tb(trace) if "titanmoe" in Path(f.filename).parts and "tests" not in f.filename
    ]
    return f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


def attempt(name: str, check: Callable[[], Result]) -> dict[str, Any]:
    """Run a check and return its row: "name", "ok", "seconds", "figures" and "note"; an error makes a failed row."""
    began = time.monotonic()
    try:
        result = check()
        ok, note = result.error <= result.allowed, result.note
        figures = {"error": result.error, "allowed": result.allowed, **result.figures}
    except Exception as caught:
        traceback.print_exc()
        sys.stderr.flush()
        text = " ".join(str(caught).split())[:300]
        ok, note, figures = False, f"{type(caught).__name__}: {text}{last_frame(caught.__traceback__)}", {}
    torch._dynamo.reset()  # else its graphs would count towards the limit of a function
    seconds = round(time.monotonic() - began, 2)
    return {"name": name, "ok": ok, "seconds": seconds, "figures": figures, "note": note}


def is_broken(side: Side) -> bool:
    """Return whether an error has made the device unusable for this process."""
    try:
        return torch.ones(1, device=side.device).item() != 1
    except Exception:
        return True


def restart() -> NoReturn:
    """Replace this process by a new one that runs the remaining checks.

    The new one reads the rows of finished checks from GPU_PARITY_DONE in the environment, where the caller puts them.
    """
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after every check")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="checks by name or first word")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all checks but these")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no check after so many")
    parser.add_argument("--tiny", action="store_true", help="only two families")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: use --device cpu to test the script")
    began = float(os.environ.setdefault("GPU_PARITY_BEGAN", str(time.time())))
    done: list[dict[str, Any]] = json.loads(os.environ.get("GPU_PARITY_DONE", "[]"))
    torch.set_num_threads(1)
    side, backend = Side(CPU.device, backend="aot_eager"), "gloo"
    if args.device == "pretend":
        if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it on import, and torch has imported it
            os.environ["TRITON_INTERPRET"] = "1"
            restart()
        side = Side(CPU.device, Hardware("cuda", (9, 0)))
    elif args.device == "cuda":
        side, backend = Side(torch.device("cuda", 0), backend="inductor"), "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    every = dict(checks(side, args.tiny))
    names = {name: {name, name.partition(" ")[0]} for name in every}
    if unknown := {*args.only, *args.skip}.difference(*names.values()):
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(every)}")
    finished, left_out = {one["name"] for one in done}, []
    for name in every:
        wanted = not names[name] & set(args.skip) and (not args.only or names[name] & set(args.only))
        if not wanted or name in finished:
            continue
        if time.time() - began > args.seconds:
            left_out.append(name)
            continue
        done.append(one := attempt(name, every[name]))
        verdict, seconds = "ok" if one["ok"] else "FAILED", one["seconds"]
        worst = f"{one['figures']['error']:9.2e} of {one['figures']['allowed']:.1e}" if one["figures"] else ""
        print(f"{name:<26} {verdict:<6} {worst:<20} {seconds:6.1f} s  {one['note']}", flush=True)
        if args.json:
            new = args.json.with_suffix(".new")
            new.write_text(json.dumps(done, indent=1))
            new.replace(args.json)
        if not one["ok"] and is_broken(side):
            print("the GPU cannot be used any more: restarting", flush=True)
            os.environ["GPU_PARITY_DONE"] = json.dumps(done)
            restart()
    if left_out:
        print(f"left out after {args.seconds:g} s: {', '.join(left_out)}", flush=True)
    failed = [one["name"] for one in done if not one["ok"]]
    print(f"{len(done)} checks, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}", flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
