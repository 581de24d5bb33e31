"""`titanmoe checkpoint`: list, inspect, verify and compare a run's checkpoints, or open them to PyTorch's own tools.

Called by titanmoe.cli. `verify` compares files with the sizes and CRC-32 in the manifest, `dcp` adds the metadata by
which torch.distributed.checkpoint reads the files. Other commands find the checkpoint that a path stands for here.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.files import format_bytes

PATH_HELP = "a run's folder, its checkpoints' folder, or one checkpoint"


def add_checkpoint(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, inspect, verify or compare a run's checkpoints; dcp: let torch.distributed.checkpoint read one",
        description="Look at a run's checkpoints, or let the tools of torch.distributed.checkpoint read one.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, run: Any, text: str, paths: dict[str, str]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for path, what in paths.items():
            action.add_argument(path, type=Path, help=what)
        action.set_defaults(run=lambda args: _run_or_error(run, args))
        return action

    add("ls", _list, "steps, sizes and mappings of a run's checkpoints", {"RUN": PATH_HELP})
    inspect = add(
        "inspect", _inspect, "the run that made a checkpoint, and its tensors", {"RUN": f"{PATH_HELP}: the latest"}
    )
    inspect.add_argument(
        "--match", metavar="GLOB", default="*", help='only tensors with matching names, e.g. "model.*router*"'
    )
    inspect.add_argument("--no-norms", action="store_true", help="do not read the tensors to show their norms")
    verify = add("verify", _verify, "read every file and compare its checksum", {"RUN": f"{PATH_HELP}: all of them"})
    verify.add_argument("--latest", action="store_true", help="only the one that a run would start from")
    diff = add(
        "diff", _diff, "what differs between two checkpoints", {"A": f"{PATH_HELP}: the latest", "B": "the same"}
    )
    diff.add_argument("--match", metavar="GLOB", default="*", help="only tensors with matching names")
    diff.add_argument("--all", action="store_true", help="also name tensors that are equal")
    add(
        "dcp",
        _add_metadata,
        "add .metadata, which tools of torch.distributed.checkpoint need",
        {"RUN": f"{PATH_HELP}: the latest"},
    )


def _run_or_error(run: Any, args: argparse.Namespace) -> int:
    """Run an action and return its exit code: 2 after a CheckpointError, whose text goes to stderr."""
    try:
        return run(args)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def latest_checkpoint(path: Path) -> Path:
    """Return the path of a checkpoint, or of the last one written in a run's folder whose manifest can be read.

    RUN:best and RUN:STEP name one checkpoint of a run. If no manifest can be read, it is the one that the file `latest`
    names, else that of the highest step. Files other than manifests are not looked at: it may be damaged.

    Raises:
        CheckpointError: the folder holds no checkpoint, or the latest is a symbolic link.
    """
    path = layout.resolve_step(path)
    checkpoints = layout.checkpoints_in(path)
    if checkpoints == [path]:
        return path
    candidates = layout.newest_first(checkpoints[0].parent)
    return safe_files.refuse_link(
        next((path for path in candidates if layout.save_number(path) < math.inf), candidates[0])
    )


def _list(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint, on its manifest alone, or what is wrong with that. Return 0 in either case."""
    checkpoints = layout.checkpoints_in(args.RUN)
    newest = latest_checkpoint(args.RUN)
    best = layout.best_step(newest)
    rows = [("step", "made", "size", "tokens", "attention", "experts", "")]
    for path in checkpoints:
        try:
            manifest = layout.read_manifest(path if path == args.RUN else safe_files.refuse_link(path))
        except CheckpointError as error:
            rows.append((path.name, "", "", "", "", "", error.problem))
            continue
        written_at = datetime.fromtimestamp((path / layout.MANIFEST).stat().st_mtime)
        record, mapping = manifest.record, manifest.record.get("mapping", {})
        rows.append(
            (
                str(manifest.step),
                f"{written_at:%Y-%m-%d %H:%M:%S}",
                format_bytes(sum(s.bytes for s in manifest.files.values())),
                f"{record['tokens']:,.0f}" if "tokens" in record else "",
                _axes(mapping.get("attention", {})),
                _axes(mapping.get("experts", {})),
                ", ".join(["latest"] * (path == newest) + ["best"] * (manifest.step == best)),
            )
        )
    _print(rows)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    """Print the latest checkpoint's record and the matching tensors, which are read in full unless --no-norms."""
    from titanmoe.checkpoint.checkpoint_folder import Checkpoint

    path = latest_checkpoint(args.RUN)
    checkpoint = Checkpoint(path)
    record, files = checkpoint.record, checkpoint.manifest.files
    model, mapping = record.get("config", {}).get("model", {}), record.get("mapping", {})
    rows = [
        ("checkpoint", str(path)),
        ("step", str(checkpoint.manifest.step)),
        ("tokens", f"{record['tokens']:,.0f}" if "tokens" in record else ""),
        ("model", f"{model.get('family', '')} {model.get('size', '')}".strip()),
        ("attention", _axes(mapping.get("attention", {}))),
        ("experts", _axes(mapping.get("experts", {}))),
        ("loader", ", ".join(f"{name} {value}" for name, value in record.get("loader", {}).items())),
        ("versions", ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())),
        ("size", f"{format_bytes(sum(s.bytes for s in files.values()))} in {len(files)} files"),
    ]
    _print([row for row in rows if row[1]])
    print()
    rows, count = [("tensor", "shape", "dtype", "" if args.no_norms else "norm")], 0
    for name, (shape, dtype) in sorted(checkpoint.tensors.items(), key=lambda item: _natural_order(item[0])):
        if fnmatch.fnmatch(name, args.match):
            count += 1
            norm = "" if args.no_norms else f"{checkpoint.read(name).double().norm().item():.6g}"
            rows.append((name, " x ".join(map(str, shape)) or "1", str(dtype).removeprefix("torch."), norm))
    _print(rows)
    print(f"{count} of {len(checkpoint.tensors)} tensors")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Compare the files of a run's checkpoints with the sizes and CRC-32 in manifests; return 1 if one is damaged."""
    damaged = 0
    for path in [latest_checkpoint(args.RUN)] if args.latest else layout.checkpoints_in(args.RUN):
        try:
            broken = layout.find_damage(path if path == args.RUN else safe_files.refuse_link(path))
            read = format_bytes(sum(s.bytes for s in layout.read_manifest(path).files.values()))
        except CheckpointError as error:
            broken, read = [error.problem], ""
        print(f"{path}  {'; '.join(broken) if broken else f'intact, {read} read'}")
        damaged += bool(broken)
    return 1 if damaged else 0


def _diff(args: argparse.Namespace) -> int:
    """Print what differs between two checkpoints: records, and tensors named by --match. Return 1 if anything does.

    Tensors of different shape or dtype are not read. Relative differences are to the largest absolute value in A.
    """
    from titanmoe.checkpoint.checkpoint_folder import Checkpoint
    from titanmoe.checkpoint.manifest import flatten_record

    a, b = (Checkpoint(latest_checkpoint(path)) for path in (args.A, args.B))
    before, after = flatten_record(a.record), flatten_record(b.record)
    differ = False
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            differ = True
            print(f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}")
    rows = [("tensor", "largest difference", "relative to the largest value")]
    names = {name for name in a.tensors.keys() | b.tensors.keys() if fnmatch.fnmatch(name, args.match)}
    equal = 0
    for name in sorted(names, key=_natural_order):
        in_a, in_b = a.tensors.get(name), b.tensors.get(name)
        if in_a is None or in_b is None:
            rows.append((name, f"only in {'B' if in_a is None else 'A'}", ""))
        elif in_a != in_b:
            rows.append((name, f"{_kind(in_a)} -> {_kind(in_b)}", ""))
        else:
            x, y = a.read(name).double(), b.read(name).double()
            difference = (x - y).abs().max().item() if x.numel() else 0.0
            equal += difference == 0
            if difference or args.all:
                rows.append((name, f"{difference:.3g}", f"{difference / max(x.abs().max().item(), 1e-300):.3g}"))
    if len(rows) > 1:
        _print(rows)
    print(f"{equal} of {len(names)} tensors are equal")
    return 1 if differ or equal < len(names) else 0


def _add_metadata(args: argparse.Namespace) -> int:
    from titanmoe.checkpoint.dcp_metadata import write_dcp_metadata

    path = latest_checkpoint(args.RUN)
    count = write_dcp_metadata(path)
    print(f"{path / layout.DCP_METADATA}: {count} tensors, for torch.distributed.checkpoint and its tools")
    return 0


def _kind(tensor: tuple[tuple[int, ...], Any]) -> str:
    """Return a tensor's shape and dtype as text, such as "(4, 8) bfloat16"."""
    return f"{tuple(tensor[0])} {str(tensor[1]).removeprefix('torch.')}"


def _axes(axes: dict[str, int]) -> str:
    """Return the axes of more than one rank as text, such as "tp 2 x pp 4"; "one rank" if none has; "" without axes."""
    return " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or ("one rank" if axes else "")


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for a tensor's name that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    # Not truncated to the terminal: names are there to be copied, and a pipe has no width.
    Console(highlight=False, markup=False, soft_wrap=True, width=400).print(table)
