"""`titanmoe train`: check a recipe on this machine and start its ranks, or print one message that says why not.

prepare() reads the recipe, chooses the number of ranks and checks mapping, memory and files; start() runs torch's
elastic agent (agent.py) and turns the outcome into an exit code and a last message.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import titanmoe
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load, other_names
from titanmoe.config.command_line import split_words
from titanmoe.config.fields import with_values
from titanmoe.config.load import Draft, read_draft
from titanmoe.config.schema import Config
from titanmoe.config.world_size import recipe_ranks
from titanmoe.fold.degrees import FoldError
from titanmoe.fold.legality import violations
from titanmoe.launcher import fit_ranks, memory_check
from titanmoe.launcher.failure_message import count_oom_kills, failure_message, first_failure
from titanmoe.train.launch_messages import (
    CONFIG_FILE,
    CheckedConfig,
    exit_code_of,
    notes_in_memory,
    pass_config,
    show_status,
)
from titanmoe.train.run_folder import COMMAND
from titanmoe.train.runtime import port_problem

if TYPE_CHECKING:
    from titanmoe.launcher.agent import LaunchResult

OUR_OPTIONS = {
    "ranks": "N|auto: ranks of all nodes together. Default: the recipe's own number, job.ranks; auto: one per GPU, or "
    "per core without GPUs",
    "fit": "if the mapping does not fit that many ranks, take the nearest one that does",
    "memory": "ignore: start even if the planner finds that the run needs more memory than there is",
    "logs": "FOLDER: where the ranks' logs go. Default: {job.dump_folder}/launch/NAME-DATE-TIME",
}
TORCHRUN_OPTIONS = {
    "nnodes": "N or MIN:MAX: machines; give the same command on each",
    "node-rank": "N: this machine's number, with --master-addr",
    "master-addr": "HOST: the machine of node rank 0",
    "master-port": "PORT: a free port there (default 29500)",
    "rdzv-backend": "NAME: c10d lets nodes come and go, and needs no node ranks",
    "rdzv-endpoint": "HOST:PORT: where they meet",
    "rdzv-id": "NAME: the same on all nodes, different for each run",
    "rdzv-conf": "KEY=VALUE,...: see torchrun",
    "local-addr": "HOST: this machine's address, if it cannot be found",
    "max-restarts": "N: restart all ranks when one fails, at most N times (default 0)",
}
"""Options that mean what they mean for torchrun."""
OPTION_PATTERNS = {"nnodes": r"[1-9]\d{0,6}(:[1-9]\d{0,6})?", "ranks": r"[1-9]\d{0,6}|auto", "max-restarts": r"\d{1,6}"}
OPTION_PATTERNS |= {"memory": "ignore", "node-rank": r"\d{1,6}", "master-port": r"\d{1,5}"}


@dataclass
class Request:
    """The command line of `titanmoe train`, parsed."""

    recipe: str = ""
    """A recipe's file, or the name of one that comes with titanmoe; "" if none is given."""
    options: dict[str, str] = field(default_factory=dict)
    """The values, as typed, of the launcher's options and torchrun's, by name without dashes ("rdzv-endpoint")."""
    rest: list[str] = field(default_factory=list)
    """Overrides, and anything else that the config's loader parses."""
    fitted: list[str] = field(default_factory=list)
    """Overrides that --fit adds."""
    problems: list[str] = field(default_factory=list)
    """Error messages about the command line; `prepare` raises them."""
    scores: str = ""
    """Log-probabilities that the ranks compute in place of training: "labels" or "top-k"; "" to train."""
    typed: list[str] = field(default_factory=list)
    """The full command line, as typed."""

    def get(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)

    @property
    def words(self) -> list[str]:
        """Command line of the ranks: recipe and overrides, without the launcher's options."""
        return [*(["--config", self.recipe] if self.recipe else []), *self.rest, *self.fitted]

    @property
    def command(self) -> str:
        """The recipe and its overrides as one line of a shell, to be put into the command of another subcommand."""
        return shlex.join([*([self.recipe] if self.recipe else []), *self.rest])

    @property
    def checks_memory(self) -> bool:
        """Whether to refuse a run that needs more memory than there is: without --memory ignore and --print-config."""
        return "memory" not in self.options and not split_words(self.words).print_config

    @property
    def nodes(self) -> int:
        """Number of nodes, or the largest of --nnodes MIN:MAX."""
        return int(self.get("nnodes", "1").rpartition(":")[2])


def add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser("train", add_help=False, help="train a recipe here, or on several machines")
    train.set_defaults(run=lambda args: run_train(args.overrides), overrides=[])


def run_train(words: Sequence[str]) -> int:
    request = parse_words(words)
    if request.get("help"):
        print(usage(), end="", flush=True)
        load([*request.words, "--help"], COMPONENTS, lambda config: [])  # prints every field, and exits
    return exit_code_of(lambda: start(prepare(request)))


def parse_words(words: Sequence[str]) -> Request:
    """Parse the words after `titanmoe train`; errors are collected in the request's `problems`. Reads no file.

    The recipe comes first, or after an option of the launcher; after an override it would be read as the value of that.
    Overrides and unknown options are not looked at: they go into `rest`.
    """
    request, rest, override = Request(typed=list(words)), list(words), False
    old: dict[str, int | str] = {}
    launcher_options = OUR_OPTIONS | TORCHRUN_OPTIONS
    while rest:
        word = rest.pop(0)
        option, attached, value = word.partition("=")
        name = option[2:].replace("_", "-") if word.startswith("--") else ""
        if not attached and name in ("config", *launcher_options, *other_names.RANKS):
            value = "yes" if name == "fit" else rest.pop(0) if rest else ""
        if word in ("--help", "-h"):
            request.options["help"] = "yes"
        elif name == "config":
            request.recipe = value
        elif name in launcher_options:
            override = False
            if re.fullmatch(OPTION_PATTERNS.get(name, r"[^-].*"), value):
                request.options[name] = value
            else:
                request.problems.append(
                    f"command line: --{name} {value!r} is not {launcher_options[name].partition(':')[0]}"
                )
        elif name in other_names.RANKS:
            old[name] = int(value) if value.isdecimal() else value
        elif override or request.recipe or word.startswith("-"):
            request.rest.append(word)
            override = True
        else:
            request.recipe = word
    for name, count in old.items():
        ranks = count if name in ("world", "world-size") or isinstance(count, str) else count * request.nodes
        request.problems.append(f"command line: --{name} is now --ranks {ranks}, the ranks of all nodes together")
    return request


def take_options(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Take options with a value out of a command line, such as --top and --temperature.

    Returns their values as text, by the option's name without dashes, "" for a missing one and the last of several; and
    the other words.
    """
    options, rest, words = {}, [], iter(words)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in names:
            options[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    return options, rest


class MappingMisfit(ConfigError):
    """The error of a recipe whose mapping does not fit the number of ranks."""

    config: Config
    """The recipe's config, with the mapping that does not fit."""
    offer: str = ""
    """A sentence that suggests a mapping that fits."""

    def __str__(self) -> str:
        return super().__str__() + f"\n\n{self.offer}" * bool(self.offer)


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed all checks and can be started."""

    request: Request
    config: Config
    """The config that the ranks will have."""
    checked: CheckedConfig
    """The checked config that is passed to the ranks."""
    nproc: int
    """Ranks on this machine."""
    machine: fit_ranks.Machine


def prepare(request: Request) -> PreparedRun:
    """Read the recipe, choose the number of ranks, check mapping, memory and files. Starts no ranks.

    With training.epochs, tokenizes the data into its cache. With --fit, a mapping that does not fit is replaced by the
    nearest that does. With --print-config, prints the config and exits. With several nodes, each calls it for itself.
    Raises ConfigError with all problems; a MappingMisfit, which suggests a mapping, if this one does not fit the ranks.
    """
    if not request.recipe and not request.rest:
        request.problems.append("command line: which recipe? For example: titanmoe train train_configs/debug.toml")
    several_nodes = request.get("nnodes", "1") not in ("1", "1:1")
    if several_nodes and not (request.get("rdzv-endpoint") or request.get("master-addr")):
        request.problems.append(
            f"command line: --nnodes {request.get('nnodes')}: where do the nodes meet? --master-addr HOST "
            "--node-rank K, or --rdzv-endpoint HOST:PORT (docs/launch.md)"
        )
    if request.problems:
        raise ConfigError(request.problems)
    show_status("reading the recipe")
    draft = read_draft(request.words, COMPONENTS)
    config, prints = draft.config, draft.command_line.print_config
    machine = fit_ranks.this_machine(config.training.device if config else "auto")
    requested_ranks = request.get("ranks")
    recipe_world = recipe_ranks(draft) if not requested_ranks else 0
    if prints and not recipe_world and not requested_ranks.isdecimal():
        draft.finish(lambda config: [])  # and exits: what follows from the number of ranks stays open
    world = fit_ranks.choose_ranks(requested_ranks, request.nodes, recipe_world, machine)
    nproc = -(-world // request.nodes)

    def shortage(config: Config, world: int) -> str:
        if not request.checks_memory:
            return ""
        return memory_check.describe_shortage(config, world, -(-world // request.nodes), machine, request.command)

    def shortage_if_fitted() -> str:
        smaller = machine.ranks * request.nodes
        if config is None:
            return ""
        changed = with_values(config, fit_ranks.new_values(fit_ranks.nearest_changes(config, smaller)))
        return "" if violations(changed, smaller) else shortage(changed, smaller)

    if prints:
        nproc = min(nproc, machine.gpus or 8)
    elif reason := fit_ranks.why_too_many(
        world, request.nodes, machine, request.recipe if recipe_world else "", shortage_if_fitted
    ):
        raise draft.error(reason)
    try:
        return PreparedRun(request, *final_config(request, draft, world, nproc, machine), nproc, machine)
    except MappingMisfit as misfit:
        change = fit_ranks.nearest_changes(misfit.config, world) if request.get("fit") else {}
        if not change:
            misfit.offer = fit_ranks.suggest_mapping(misfit.config, world, request.nodes, shortage)
            raise
    request = replace(request, fitted=[f"--{path}={value}" for path, value in fit_ranks.new_values(change).items()])
    config, checked = final_config(request, draft.with_words(request.fitted), world, nproc, machine)
    show_status("")
    print(f"fitted to {world} rank{'s' * (world > 1)}: {fit_ranks.changes_text(change)}", file=sys.stderr, flush=True)
    return PreparedRun(request, config, checked, nproc, machine)


def final_config(
    request: Request, draft: Draft, world: int, nproc: int, machine: fit_ranks.Machine
) -> tuple[Config, CheckedConfig]:
    """Return the config that the ranks will have, and the checked config in the form in which it is passed to them.

    Reads the files that the recipe names, asks the hub for the commits of its data sets, and may tokenize the data.
    With --print-config, prints the config and exits. Raises MappingMisfit if the mapping does not fit the number of
    ranks, ConfigError with all problems if something else cannot run. With several nodes the folder of a live run is
    not refused.

    Returns:
        The resolved config; and the one to pass, without what `resolve` derives, which each rank derives itself.

    Args:
        request: the parsed command line.
        draft: the recipe with its overrides.
        world: ranks of all nodes.
        nproc: ranks on this machine.
        machine: this machine, for the check of memory.
    """
    from titanmoe.checkpoint.choose_checkpoint import record_to_resume
    from titanmoe.data.hub_datasets import pin_datasets
    from titanmoe.train.launch import fit_to_world, resolve, scoring_config
    from titanmoe.train.refusals import check_inputs_and_resolve, refusals
    from titanmoe.train.run_folder import refuse_live_folder

    misfits: list[Config] = []

    def check(config: Config) -> list[str]:
        try:
            config, _ = fit_to_world(config, nproc, world)
            problems = refusals(config, world)
            if problems and violations(config, world):
                misfits.append(config)
            if not problems and request.checks_memory:
                shortage = memory_check.describe_shortage(config, world, nproc, machine, request.command)
                problems = [f"{shortage}; --memory ignore starts it all the same"] if shortage else []
            return problems
        except FoldError as error:
            return error.problems

    def finish(config: Config) -> Config:
        nonlocal checked
        config = pin_datasets(config, record_to_resume)
        checked = CheckedConfig(config, world, draft.source, request.scores)
        if request.nodes == 1:  # with several, a node may join a run that is going
            refuse_live_folder(config)
        config, _ = fit_to_world(config, nproc, world)
        if draft.command_line.print_config:
            return resolve(config, world)
        used = scoring_config(config) if request.scores else config
        return check_inputs_and_resolve(config, lambda config: resolve(config, world), used)

    checked = None
    try:
        return draft.finish(check, finish), checked
    except ConfigError as error:
        if misfits:
            misfit = MappingMisfit(error.problems, error.source)
            misfit.config = misfits[0]
            raise misfit from None
        raise


# ---- the run


@notes_in_memory()
def start(prepared: PreparedRun) -> int:
    """Start a prepared run's ranks on this machine, wait for them, and print why they failed, if they did.

    Called on every node, in the main thread. Sets environment variables of this process. Raises ConfigError, before
    ranks are started, if the port is taken or the folder of the logs cannot be made.

    Returns:
        The exit code: 0, that of the rank that failed first, 128 + the number of a signal, or 1 if the launcher failed.
    """
    from torch.distributed.run import parse_args

    from titanmoe.launcher.agent import RankLogs, launch

    request = prepared.request
    _environment(prepared)
    options = parse_args([*_torchrun_options(request), f"--nproc-per-node={prepared.nproc}", "-m", "titanmoe.rank"])
    host, port = options.master_addr, options.master_port
    if options.rdzv_backend == "static" and options.node_rank == 0 and (why := port_problem(port)):
        raise ConfigError(f"--master-port {port} {why} on {host}: give another one, the same on every node")
    logs, before = RankLogs(_folder(prepared)), count_oom_kills()
    try:
        logs.make_folder()
    except OSError as error:
        fix = "give --logs FOLDER, or another job.dump_folder"
        raise ConfigError(f"cannot write the ranks' logs to {logs.folder}: {error.strerror}: {fix}") from None
    ranks_text = f"{prepared.nproc} rank{'s' * (prepared.nproc > 1)}"
    print(
        f"{ranks_text}{f' on each of {request.nodes} nodes' * (request.nodes > 1)}; logs in {logs.folder}", flush=True
    )
    show_status(f"starting {ranks_text}")
    try:
        with pass_config(prepared.checked) as file:
            logs.environment = {CONFIG_FILE: str(file)}
            if Path(titanmoe.__file__).parents[1] != Path.cwd():  # there titanmoe is perhaps not installed
                logs.environment["PYTHONSAFEPATH"] = "1"  # do not search the current folder for modules first
            result = launch(options, request.words, logs)
    except Exception as error:  # a rendezvous raises many kinds
        logging.getLogger("torch.distributed").exception("titanmoe train")
        what = "the nodes did not meet, or lost each other" if request.nodes > 1 else "the launcher failed"
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"error: {what}: {why}\nits log: {logs.folder}/agent.log", file=sys.stderr, flush=True)
        return 1
    code, text = exit_status(result, request.nodes, prepared.config.checkpoint.enable, count_oom_kills() > before)
    if text:
        # The panel of rank 0 may have left the cursor in the middle of the screen.
        print(f"{chr(10) * sys.stdout.isatty()}{text}", file=sys.stderr, flush=True)
    refused = logs.attempt == 1 and bool(result.failures) and first_failure(result.failures).is_refusal
    if code == 0 or not result.failures or result.signal or refused:
        logs.tidy(refused)
    return code


def exit_status(result: LaunchResult, nodes: int, saves: bool, out_of_memory: bool) -> tuple[int, str]:
    """Return the exit code of `titanmoe train` and the last message to print; "" if there is nothing to say.

    After a signal the code is 128 + its number, unless a rank left a note on a failure of its own.

    Args:
        result: how the launch ended.
        nodes: number of nodes.
        saves: whether the run writes checkpoints.
        out_of_memory: whether the kernel has killed a process for lack of memory meanwhile.
    """
    if not result.failures and not result.signal:
        return 0, ""
    culprit = first_failure(result.failures) if result.failures else None
    if culprit is None or (result.signal and not culprit.has_own_cause):
        if result.killed:
            return 128 + result.signal, "ended at once; checkpoints that were complete are there"
        return 128 + result.signal, "" if saves else "stopped; nothing was saved, because checkpoint.enable = false"
    text = failure_message(culprit, result.world, out_of_memory)
    if nodes > 1 and culprit.is_consequence:
        text += "\nthis rank only lost its connection to another: look for the cause in the logs of the other nodes"
    return culprit.code, text


def _environment(prepared: PreparedRun) -> None:
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ[COMMAND] = shlex.join(["titanmoe", "train", *prepared.request.typed])
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    if not prepared.machine.gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, prepared.machine.cores // prepared.nproc)))
    if prepared.request.nodes > 1:
        # Otherwise a node that joins later never learns where the ranks meet (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _torchrun_options(request: Request) -> list[str]:
    options = {name: request.options[name] for name in TORCHRUN_OPTIONS if name in request.options}
    if "rdzv-endpoint" in options and "node-rank" not in options:
        options.setdefault("rdzv-backend", "c10d")
    elif request.nodes == 1 and "master-port" not in options:
        # Like torchrun --standalone; the address keeps it from looking up this machine's name.
        options |= {"rdzv-backend": "c10d", "rdzv-endpoint": "localhost:0", "local-addr": "127.0.0.1"}
        options["rdzv-id"] = uuid.uuid4().hex
    options.setdefault("master-port", "29500")
    return [f"--{name}={value}" for name, value in options.items()]


def _folder(prepared: PreparedRun) -> Path:
    if requested := prepared.request.get("logs"):
        return Path(requested)
    name = f"{prepared.config.job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, n = Path(prepared.config.job.dump_folder, "launch", name), 1
    while folder.exists():
        n += 1
        folder = folder.with_name(f"{name}-{n}")
    return folder


def usage() -> str:
    lines = ["usage: titanmoe train RECIPE.toml [options] [--TABLE.FIELD VALUE ...]", ""]
    lines += ["RECIPE.toml is a file, or the name of a recipe that comes with titanmoe, such as debug.", ""]
    for name, text in (OUR_OPTIONS | TORCHRUN_OPTIONS).items():
        kind, _, what = text.partition(": ")
        lines += [f"  --{name} {kind}".rstrip() if what else f"  --{name}", f"      {what or text}"]
    end = "Ctrl-C once: the ranks save, if the run saves, and end. Twice: they are killed."
    return "\n".join([*lines, "", end, "", ""])
