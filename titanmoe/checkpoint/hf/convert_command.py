"""`titanmoe convert`: check the options, run the conversion, print what was made.

Called by titanmoe.cli. Each kind of conversion opens a source of tensors by our names and writes it block by block;
under torchrun the ranks share the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanmoe.config.allowed_code import add_allow_code
from titanmoe.config.load import ConfigError, format_problems
from titanmoe.files import format_bytes
from titanmoe.this_process import is_rank_0

if TYPE_CHECKING:
    import torch

    from titanmoe.checkpoint.on_all_ranks import Group

EPILOG = """\
Weights only: optimizer state is neither read nor written. OUT appears once it is complete. Under torchrun
(torchrun --no-python --nproc-per-node 8 titanmoe convert ...) the ranks share the work. docs/huggingface.md says more.
"""


def add_convert(commands: argparse._SubParsersAction) -> None:
    convert = commands.add_parser(
        "convert",
        help="Hugging Face checkpoints in and out, TorchTitan's in, and dense ones upcycled to experts",
        description="Converts between Hugging Face folders (config.json, *.safetensors) and titanmoe checkpoints, and "
        "reads TorchTitan's checkpoints.",
        epilog=EPILOG,
    )
    add_allow_code(convert)
    convert.set_defaults(run=run_convert)
    what = convert.add_mutually_exclusive_group(required=True)
    what.add_argument("--from-hf", action="store_true", help="IN is a Hugging Face folder, OUT a checkpoint to train")
    what.add_argument(
        "--from-dcp",
        action="store_true",
        help="IN is a folder that TorchTitan wrote with torch.distributed.checkpoint, OUT a checkpoint to train",
    )
    what.add_argument(
        "--to-hf",
        action="store_true",
        help="IN is a run or one of its checkpoints, OUT a folder. Adapters (or a folder of PEFT) are merged into the "
        "weights under them",
    )
    what.add_argument(
        "--to-peft", action="store_true", help="IN is a run with adapters or one of its checkpoints, OUT a PEFT folder"
    )
    what.add_argument("--upcycle", action="store_true", help="IN is a dense Llama, Qwen2 or Qwen3, OUT has experts")
    what.add_argument("--describe", action="store_true", help="print a recipe that trains IN, a Hugging Face folder")
    convert.add_argument(
        "source", metavar="IN", help="what to convert; a Hugging Face model may be on the hub (OWNER/MODEL) or at a URL"
    )
    convert.add_argument("out", metavar="OUT", type=Path, nargs="?", help="the folder to make; none with --describe")
    convert.add_argument("--overwrite", action="store_true", help="replace OUT if it is already such a folder")
    reading = convert.add_argument_group("with --from-dcp")
    reading.add_argument(
        "--hf-assets",
        metavar="MODEL",
        help="config.json of the model and its tokenizer: TorchTitan's hf_assets_path, or a model on the hub "
        "(default: IN)",
    )
    reading = convert.add_argument_group("with --from-hf, --from-dcp or --to-peft")
    reading.add_argument(
        "--drop", choices=["mtp"], action="append", default=[], help="leave out multi-token prediction"
    )
    writing = convert.add_argument_group("with --to-hf or --to-peft")
    writing.add_argument(
        "--base",
        metavar="BASE",
        help="the weights under adapters: a Hugging Face model or a checkpoint (default: as their recipe says). Others "
        "than they were trained on are refused",
    )
    writing.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="dtype of the files (default: the checkpoint's)"
    )
    writing = convert.add_argument_group("with --to-hf")
    writing.add_argument("--max-shard-gb", type=float, metavar="GB", help="size of a file (default 5)")
    writing.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer files, if the checkpoint has none")
    making = convert.add_argument_group("with --upcycle")
    making.add_argument("--experts", type=int, metavar="N", help="experts per block, counting all slices (default 8)")
    making.add_argument("--top-k", type=int, metavar="N", help="experts that a token is routed to (default 2)")
    making.add_argument(
        "--granularity", type=int, metavar="G", help="slices that each copy of the FFN is split into (default 1)"
    )
    making.add_argument("--seed", type=int, metavar="N", help="seed of the routers' random weights (default 0)")


def run_convert(args: argparse.Namespace) -> int:
    """Run `titanmoe convert`, under torchrun in a process group of its own; return 0, or 2 after an error.

    Only rank 0 prints.
    """
    from titanmoe.checkpoint.safe_files import CheckpointError

    first = is_rank_0()
    group = None
    try:
        _check_options(args)
        group = _join()
        lines = _convert(args, group)
        if first:
            print("\n".join(lines))
        return 0
    except ConfigError as error:
        text = format_problems(error.problems, error.source)
    except CheckpointError as error:
        text = format_problems([str(error)])
    finally:
        if group is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
    if first:
        print(text, file=sys.stderr)
    return 2


def _check_options(args: argparse.Namespace) -> None:
    """Raise a ConfigError with every option that the chosen conversion does not have, and with a missing OUT.

    Of values only that of --max-shard-gb is checked here.
    """
    kinds_of_option = dict.fromkeys(("--max-shard-gb", "--tokenizer"), ("to_hf",)) | {"--hf-assets": ("from_dcp",)}
    kinds_of_option["--drop"] = ("from_hf", "from_dcp", "to_peft")
    kinds_of_option |= dict.fromkeys(("--dtype", "--base"), ("to_hf", "to_peft"))
    kinds_of_option |= dict.fromkeys(("--experts", "--top-k", "--granularity", "--seed"), ("upcycle",))
    problems = [
        f"{option} is an option of {' and '.join(f'--{kind}' for kind in kinds).replace('_', '-')}: leave it out"
        for option, kinds in kinds_of_option.items()
        if getattr(args, option[2:].replace("-", "_")) not in (None, [])
        and not any(getattr(args, kind) for kind in kinds)
    ]
    if args.describe and args.out is not None:
        problems.append(f"--describe prints a recipe and makes no folder: leave {args.out} out")
    if not args.describe and args.out is None:
        problems.append("OUT is missing: name the folder to make")
    if args.max_shard_gb is not None and not args.max_shard_gb > 0:
        problems.append(f"--max-shard-gb = {args.max_shard_gb} is not a size: give more than 0")
    if problems:
        raise ConfigError(problems)


def _join() -> Group:
    """Join torchrun's ranks in a gloo group and return it; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.group.WORLD


def _convert(args: argparse.Namespace, group: Group) -> list[str]:
    """Do what the options say and return the lines to print. Collective over the group.

    With --from-hf, multi-token prediction in the files gives model.mtp_depth = 1 unless --drop mtp leaves it out.
    """
    import torch

    from titanmoe.checkpoint.hf import config_json, convert
    from titanmoe.checkpoint.hf.fetch import describing_folder, weights_folder
    from titanmoe.checkpoint.hf.huggingface_source import HuggingFaceSource
    from titanmoe.checkpoint.hf.torchtitan import open_torchtitan
    from titanmoe.checkpoint.hf.upcycle import UpcycledWeights
    from titanmoe.checkpoint.on_all_ranks import raise_on_all_ranks

    if args.describe:
        from titanmoe.checkpoint.hf.describe_recipe import write_recipe

        return [raise_on_all_ranks(group, lambda: write_recipe(args.source))]
    if args.to_hf or args.to_peft:
        source = raise_on_all_ranks(group, lambda: _checkpoint_or_peft(args))
        dtype = getattr(torch, args.dtype) if args.dtype else None
        return (_to_hf if args.to_hf else _to_peft)(args, source, dtype, group)

    described = args.hf_assets or args.source
    folder = raise_on_all_ranks(
        group, lambda: describing_folder(described) if args.from_dcp else weights_folder(args.source)
    )

    def open_weights() -> HuggingFaceSource | UpcycledWeights:
        if args.from_dcp:
            return open_torchtitan(Path(args.source), folder, tuple(args.drop))
        if args.upcycle:
            options = {"experts": 8, "top_k": 2, "granularity": 1, "seed": 0}
            arguments = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
            return UpcycledWeights(folder, **options | arguments)
        parsed = config_json.describe_folder(folder)
        source = HuggingFaceSource(folder, parsed, parsed.model, tuple(args.drop))
        if source.has_mtp and "mtp" not in args.drop:
            source = HuggingFaceSource(folder, parsed, replace(parsed.model, mtp_depth=1, mtp_after_norm=True))
        source.check()
        return source

    weights = raise_on_all_ranks(group, open_weights)
    provenance = "upcycled from" if args.upcycle else "converted from"
    if args.from_dcp:
        provenance += f" {Path(args.source).absolute()} with the config.json of"
    size = convert.write_converted(args.out, weights, folder, provenance, args.overwrite, group)
    lines = [
        f"{args.out}: {len(weights.tensors)} tensors, {format_bytes(size)}",
        *(f"note: {note}" for note in weights.notes),
    ]
    return [*lines, *_recipe(args.out, weights.model)]


def _checkpoint_or_peft(args: argparse.Namespace) -> Path:
    """Return IN if it is a PEFT folder, which --to-peft refuses; else the checkpoint that it stands for."""
    from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
    from titanmoe.checkpoint.hf.peft_read import is_peft

    source = Path(args.source)
    if not is_peft(source):
        return latest_checkpoint(source)
    if args.to_peft:
        raise ConfigError(f"{source} is a folder of PEFT already")
    return source


def _to_hf(args: argparse.Namespace, source: Path, dtype: torch.dtype | None, group: Group) -> list[str]:
    from titanmoe.checkpoint.hf import convert
    from titanmoe.checkpoint.hf.safetensors_folder import total_bytes

    exported = convert.to_hf(
        source,
        args.out,
        shard_bytes=int((args.max_shard_gb or 5) * 10**9),
        tokenizer=args.tokenizer,
        dtype=dtype,
        overwrite=args.overwrite,
        group=group,
        base_name=args.base or "",
    )
    count, size = sum(map(len, exported.files.values())), format_bytes(total_bytes(*exported.files.values()))
    files = f"{len(exported.files)} file{'s' * (len(exported.files) != 1)}"
    lines = [f"{args.out}: {exported.export.map.hf.architecture}, {count} tensors in {files}, {size}"]
    if isinstance(merged := exported.export.weights, convert.MergedWeights):
        lines.append(f"adapters of {len(merged.matrices)} matrices merged into {merged.name}")
        lines += [f"note: {merged.compared}"] * bool(merged.compared)
    if exported.export.model.mtp_depth and not exported.export.model.mtp_after_norm:
        lines.append(
            "note: its multi-token prediction was trained on states before the final norm, and Megatron, vLLM and "
            "another --from-hf take it to see those after it (model.mtp_after_norm)"
        )
    if not any(name.startswith(("tokenizer", "tokenization")) for name in exported.other_files):
        lines.append("note: it has no tokenizer; --tokenizer DIR copies one")
    return lines


def _to_peft(args: argparse.Namespace, source: Path, dtype: torch.dtype | None, group: Group) -> list[str]:
    from titanmoe.checkpoint.hf import convert
    from titanmoe.checkpoint.hf.safetensors_folder import total_bytes

    made = convert.to_peft(
        source, args.out, dtype=dtype, drop=args.drop, overwrite=args.overwrite, group=group, base_name=args.base or ""
    )
    base = made.config["base_model_name_or_path"]
    contents = f"{len(made.tensors)} tensors, {format_bytes(total_bytes(*made.files.values()))}"
    lines = [f"{args.out}: adapters for {base or 'a model without a name'}, {contents}"]
    return lines if base else [*lines, "note: it names no base model; --base MODEL does"]


def _recipe(out: Path, model: object) -> list[str]:
    """Return lines of a recipe that trains from the checkpoint `out`: its [model] and [checkpoint]."""
    from titanmoe.checkpoint.hf.config_json import model_table
    from titanmoe.config.fields import toml_value

    begin = ["[checkpoint]", f"load = {toml_value(str(out))}", "model_only = true"]
    return ["", "# to train from it:", model_table(model), "", *begin]
