"""The `titanmoe` command and its subcommand `fold`.

Each subcommand has a function that adds its parser and one that runs it; the others are in their own rooms.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text

import titanmoe
from titanmoe.checkpoint.checkpoint_command import add_checkpoint
from titanmoe.checkpoint.hf.convert_command import add_convert
from titanmoe.components import COMPONENTS
from titanmoe.config.load import ConfigError, format_problems, read_draft
from titanmoe.config.schema import Config, Parallelism
from titanmoe.config.world_size import add_ranks, world_of
from titanmoe.data.tokenize_command import add_tokenize
from titanmoe.data.tokenizer_command import add_tokenizer
from titanmoe.data.verify_command import add_data
from titanmoe.files import format_ranges
from titanmoe.fold.degrees import DEGREE_PATHS, DERIVED, Fold, derive, resolve_degrees, with_degrees
from titanmoe.fold.legal_mappings import changes, legal_stages, nearest
from titanmoe.fold.legality import violations
from titanmoe.fold.picture import draw, list_mappings
from titanmoe.fold.pipeline_schedules import stage_ranks
from titanmoe.fold.rank_groups import View, groups
from titanmoe.generate.eval_command import add_eval
from titanmoe.generate.generate_command import add_generate
from titanmoe.launcher.finetune_command import add_finetune
from titanmoe.launcher.score_command import add_score
from titanmoe.launcher.show_command import add_show
from titanmoe.launcher.slurm import add_slurm
from titanmoe.launcher.train_command import add_train
from titanmoe.models.stages import split_layers
from titanmoe.plan.plan_command import add_plan
from titanmoe.rehearse.rehearse_command import add_rehearse
from titanmoe.report.report_command import add_report
from titanmoe.text_report import columns
from titanmoe.train.runtime import exit_now

ASCII = str.maketrans("─├┤", "-[]")


def command() -> NoReturn:
    """Run the command, and exit with its code without the interpreter's shutdown."""
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    exit_now(code)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the subcommand and return its exit code; 0 if the reader of a pipe has closed it.

    SystemExit is raised after --help, --version and mistakes that argparse finds.

    Args:
        argv: words after the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="titanmoe", description="Trains Mixture-of-Experts models, and plans, checks, converts and watches runs."
    )
    parser.add_argument("--version", action="version", version=f"titanmoe {titanmoe.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    add_train(commands)
    add_finetune(commands)
    add_slurm(commands)
    add_fold(commands)
    add_checkpoint(commands)
    add_convert(commands)
    add_tokenizer(commands)
    add_tokenize(commands)
    add_show(add_data(commands))
    add_score(commands)
    add_generate(commands)
    add_eval(commands)
    add_report(commands)
    add_rehearse(commands)
    add_plan(commands)
    args, rest = parser.parse_known_args(argv)
    if rest and "overrides" not in args:
        commands.choices[args.subcommand].error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe has closed it (`| head`). Nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def add_fold(commands: argparse._SubParsersAction) -> None:
    """Add the parser of the subcommand `fold` to the command's subparsers."""
    fold = commands.add_parser(
        "fold",
        help="draw, check or list mappings of attention and experts onto ranks",
        description="Draws how attention and experts are mapped onto the same ranks, or says why a mapping is illegal.",
    )
    fold.set_defaults(run=run_fold)
    add_ranks(fold)
    fold.add_argument("--node", type=int, default=8, metavar="N", help="ranks per node (default 8)")
    degrees = fold.add_argument_group("degrees", "1 unless set; those marked (derived) follow from the others")
    for name, text in (
        ("pp", "pipeline stages"),
        ("dp_replicate", "replicas of the sharded state"),
        ("dp_shard", "data parallel ranks that shard the state (derived)"),
        ("cp", "ranks that each sequence is sharded over"),
        ("tp", "ranks that every matrix is sharded over"),
        ("edp_replicate", "replicas of the experts' sharded state (derived)"),
        ("edp", "ranks with the same experts that shard their state (derived)"),
        ("ep", "ranks that the experts are divided among"),
        ("etp", "ranks that every expert is sharded over"),
    ):
        degrees.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=text)
    model = fold.add_argument_group(
        "model", "with a model, its constraints apply too; without one, degrees only have to divide the ranks"
    )
    model.add_argument("--family", metavar="NAME", help="a model family, with --size")
    model.add_argument("--size", metavar="NAME", help="a size of the family")
    model.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample (default the recipe's, or 4096)")
    output = fold.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print rank groups (or with --list degrees) as JSON")
    output.add_argument("--svg", type=Path, metavar="FILE", help="also write the picture as SVG")
    output.add_argument("--plan", action="store_true", help="print how each module of the model is sharded")
    output.add_argument("--list", action="store_true", help="list every legal mapping with the degrees that are set")


def run_fold(args: argparse.Namespace) -> int:
    """Run `titanmoe fold`, which draws or lists mappings onto ranks; return 0, or 2 after an error.

    An illegal mapping is an error, and the nearest legal ones are shown with it.
    """
    degrees = {name: getattr(args, name) for name in DEGREE_PATHS if getattr(args, name) is not None}
    try:
        world = world_of(args.ranks, args.overrides, COMPONENTS)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    config, problems, source = _read_model(args)
    parallelism = with_degrees(config.parallelism if config else Parallelism(), degrees)
    if parallelism.node == -1:
        parallelism = replace(parallelism, node=args.node)
    if config is not None:
        config = replace(config, parallelism=parallelism)
    if args.node < 1:
        problems.append(f"--node = {args.node} is not a number of ranks: use 1 or more")
    if args.plan and not source and config is None:
        problems.append("--plan needs a model: give a recipe, or --family and --size")
    if args.list:
        broken_laws = []
    elif config is not None:
        broken_laws = violations(config, world)
    else:
        broken_laws = resolve_degrees(world, parallelism)[1]
    if problems or broken_laws:
        print(format_problems(problems + broken_laws, source), file=sys.stderr)
        if broken_laws:
            print(_describe_nearest(world, parallelism, config), file=sys.stderr)
        return 2

    if args.list:
        return _print_mappings(args, world, degrees, config)
    fold = derive(world, parallelism)
    if args.json:
        print(json.dumps(_rank_groups(fold)))
    elif args.plan:
        print("\n".join(_describe_sharding(config, fold)))
    else:
        picture = draw(fold, args.node, config.model if config else None)
        _print_texts([picture])
        if args.svg:
            try:
                args.svg.write_text(_svg(picture, f"titanmoe fold --ranks {world}"), encoding="utf-8")
            except OSError as error:
                print(f"error: cannot write {args.svg}: {error.strerror}", file=sys.stderr)
                return 2
    return 0


def _read_model(args: argparse.Namespace) -> tuple[Config | None, list[str], str]:
    """Read the recipe, or the model of --family and --size, that the command line names.

    Returns:
        The config (None if no model is named or the recipe cannot be read), one message for each problem, and the name
            of the recipe for these messages; "" without messages.
    """
    options = {"model.family": args.family, "model.size": args.size, "training.seq_len": args.seq_len}
    options = {path: value for path, value in options.items() if value is not None}
    if args.overrides:
        argv = args.overrides
    elif args.family is None and args.size is None:
        problem = f"--seq-len = {args.seq_len} has no effect without a model: give --family and --size too, or a recipe"
        return None, [problem] if options else [], ""
    else:
        # A missing name is passed as "", and refused with the list of known names.
        # Batch and schedule are unknown: GPipe runs with any number of microbatches.
        defaults = {"model.family": "", "model.size": "", "training.seq_len": 4096, "pipeline.schedule": "GPipe"}
        argv, options = [], defaults | options
    draft = read_draft([*argv, *(f"--{path}={value}" for path, value in options.items())], COMPONENTS)
    return draft.config, draft.problems, draft.source if draft.problems else ""


def _describe_nearest(world: int, parallelism: Parallelism, config: Config | None) -> str:
    """Return text on the legal mappings nearest to an illegal one: changes and all degrees, or that there is none.

    Args:
        world: number of ranks.
        parallelism: the illegal mapping.
        config: the config, whose model and batch restrict mappings; None without a model.
    """
    lines = []
    for fold in nearest(world, parallelism, config):
        change = []
        for name, (old, new) in changes(parallelism, fold).items():
            change.append(f"{name} {'derived' if old == -1 and name in DERIVED else old} -> {new}")
        lines.append("  " + ", ".join(change))
        for view, axes in ("attention", fold.attention_axes), ("experts", fold.expert_axes):
            lines.append(f"      {view:<9} = " + " x ".join(f"{name} {n}" for name, n in axes.items()))
    if not lines:
        return f"\nNo mapping of {world} ranks is legal for this model and batch: change the world size."
    return "\n".join(["\nNearest legal mappings:", *lines])


def _print_mappings(args: argparse.Namespace, world: int, degrees: dict[str, int], config: Config | None) -> int:
    """Print every legal mapping that has the degrees of the command line; return 0, or 2 if there is none.

    Args:
        args: the command line, with --json and --node.
        world: number of ranks.
        degrees: number of ranks by name of the axis, such as "tp"; -1 for any.
        config: the config, whose model and batch restrict mappings; None without a model.
    """

    def fits(mapping: dict[str, int]) -> bool:
        return all(degrees.get(name, -1) in (-1, n) for name, n in mapping.items())

    stages = []
    for stage in legal_stages(world, config):
        attention, experts = (list(filter(fits, views)) for views in (stage.attention, stage.experts))
        if fits({"pp": stage.pp}) and attention and experts:
            stages.append(replace(stage, attention=attention, experts=experts))
    if not stages:
        text = ", ".join(f"{name} {n}" for name, n in degrees.items())
        problem = f"no mapping of {world} ranks{f' with {text}' if degrees else ''} is legal: use another world"
        print(format_problems([problem + " or fewer degrees" * bool(degrees)]), file=sys.stderr)
        return 2
    if args.json:
        _print_json_rows({"pp": stage.pp, **left, **right} for stage in stages for left, right in stage.pairs())
    else:
        _print_texts(list_mappings(stages, args.node))
    return 0


def _rank_groups(fold: Fold) -> dict[str, dict[str, list[tuple[int, ...]]]]:
    """Return the groups of ranks by view ("attention", "experts") and axis; each group is a tuple of ranks.

    dp_replicate and dp_shard are one axis, "dp", and so are edp_replicate and edp, "edp".
    """
    axes: dict[View, dict[str, str | tuple[str, ...]]] = {
        "attention": {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"},
        "experts": {"etp": "etp", "ep": "ep", "edp": ("edp_replicate", "edp"), "pp": "pp"},
    }
    return {view: {name: groups(fold, view, of) for name, of in names.items()} for view, names in axes.items()}


def _describe_sharding(config: Config, fold: Fold) -> list[str]:
    """Return lines on how the model is sharded (`titanmoe fold --plan`).

    One for each module, with its style, mesh and sharded dims, and with a pipeline one on the layers of its stages.
    """
    from titanmoe.parallel.parallel_plan import make_plan, vocabulary_plan

    meshes = {"tp": f"tp {fold.tp}", "ep x etp": f"ep {fold.ep} x etp {fold.etp}", "stage": f"stage of {fold.stage}"}
    meshes["pp x tp"] = f"pp {fold.pp} x tp {fold.tp}"
    plan, shared = make_plan(config, range(config.model.num_layers)), config.parallelism.vocab == "pipeline"
    rows: dict[str, list[tuple[str, ...]]] = {}
    for path, style in ((vocabulary_plan() if shared else {}) | plan).items():
        block, module = re.fullmatch(r"(layers\.[^.]+|mtp\.0\.block|)\.?(.+)", path).groups()
        dims = ", ".join(f"{name} {'-' if dim is None else dim}" for name, dim in style.dims.items())
        cells = ("  " * bool(block) + module, type(style).__name__, meshes[style.mesh], dims)
        rows.setdefault(block, []).append((*cells, f"up to tp {style.max_tp}" if style.max_tp else ""))
    body = iter(columns([cells for group in rows.values() for cells in group], ()))
    lines = ["Each module, its style, its mesh, and the dim of each parameter that is sharded (-: replicated)"]
    for block, group in rows.items():
        numbers = re.sub(r"\{(.*)\}", lambda match: f"{{{format_ranges(map(int, match[1].split(',')))}}}", block)
        lines += [f"    {numbers}"] * bool(block) + [next(body) for _ in group]
    if fold.pp > 1:
        stages = len(stage_ranks(config.pipeline, fold.pp))
        explicit = config.pipeline.layers_per_stage
        layers = split_layers(config.model, config.training.seq_len, stages, explicit, shared)
        shown = "; ".join(map(format_ranges, layers))
        shown = f"layers {shown}; embed and head over all" if shared else f"embed and layers {shown} and head"
        lines.append(f"{stages} pipeline stages: {shown}")
    return lines


def _print_texts(texts: Iterable[Text]) -> None:
    """Print texts one after the other, in colour on a terminal, else plain; in ASCII if the output is not UTF."""
    console = Console(highlight=False, soft_wrap=True)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for text in texts:
        if console.is_terminal and not console.options.ascii_only:
            console.print(text)
        else:
            plain = "\n".join(line.rstrip() for line in text.plain.split("\n"))
            print(plain if encoding.lower().startswith("utf") else plain.translate(ASCII))


def _svg(text: Text, title: str) -> str:
    """Render a text as an SVG picture of a terminal; return the SVG without rich's links to fonts."""
    width = max(len(line) for line in text.plain.split("\n"))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, highlight=False)
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title, unique_id="fold"), flags=re.DOTALL)


def _print_json_rows(rows: Iterator[dict[str, int]]) -> None:
    """Print dicts, at least one, as a JSON list, each as soon as it is generated: a large world has millions."""
    start = "["
    for row in rows:
        print(f"{start}{json.dumps(row)}", end="")
        start = ",\n"
    print("]")
