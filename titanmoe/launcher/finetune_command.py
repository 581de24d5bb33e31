"""`titanmoe finetune`: write the recipe that fine-tunes a model on some data on this machine, and train it.

The recipe is a file to keep and to edit: `titanmoe train` runs it again. Its numbers follow from the machine, the model
and the lengths of the data, which is tokenized into the cache that the run reads.

Shapes: D documents.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanmoe.checkpoint.hf.config_json import context_length, describe_folder
from titanmoe.checkpoint.hf.fetch import describing_folder
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.command_line import split_words, to_words
from titanmoe.config.fields import flatten, toml_value
from titanmoe.config.load import read_draft
from titanmoe.config.schema import Config
from titanmoe.launcher.fit_ranks import Machine, this_machine
from titanmoe.launcher.memory_check import similar_device
from titanmoe.launcher.train_command import Request, parse_words, prepare, start, take_options
from titanmoe.plan.links import Factors
from titanmoe.plan.search import fits, search
from titanmoe.train.launch_messages import exit_code_of, show_status

USAGE = """\
usage: titanmoe finetune MODEL DATA ... [--lora] [--dpo] [--name NAME] [options] [--TABLE.FIELD VALUE ...]

Writes NAME.toml, a recipe that fine-tunes the model on the data with what this machine has, shows it and trains it. The
same command again, or titanmoe train NAME.toml, goes on.

  MODEL       a Mixture-of-Experts model in Hugging Face's format: a folder, or its name on the hub
  DATA ...    chats, or with --dpo preference pairs: JSONL, Parquet, token shards, or hf:OWNER/NAME:SPLIT on the hub
              (docs/data.md)
  --full      train all weights (the default)
  --lora      train adapters of rank 16 beside attention and experts
  --dpo       prefer the chosen completions of pairs to the rejected ones; without it, learn the assistant's
              messages of chats
  --name NAME the recipe's and the run's name. Default: MODEL-DATA
Options of fields go into the recipe. Other options are those of titanmoe train.
"""
UNIT, MOST_POSITIONS = 64, 8192
"""seq_len is a multiple of UNIT and at most MOST_POSITIONS, unless an option sets it."""
PLANNED = "of the fastest mapping that fits, by titanmoe plan"
"""Comment on what the planner chose, before the device that it planned for."""
MAPPING = "parallelism.", "pipeline.", "activation_checkpoint.", "moe.dispatcher", "moe.overlap", "training.local_batch"
"""Options of which the planner is not asked if one is given."""
MOST_GPUS = 1024
"""The most GPUs that are tried for a model that does not fit."""
FITTING = 0.99
"""Fraction of the chats or pairs that have to fit in seq_len."""
MOST_SAMPLES, MICROBATCH_TOKENS = 64, 8192
"""Most samples of a step, and most tokens of a microbatch of several samples."""


class Length(NamedTuple):
    """Lengths of the data's chats, or of its pairs: of both completions, each with the prompt."""

    tokens_D: np.ndarray
    """Tokens of each."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all chats or pairs."""
        return int(self.tokens_D.sum())

    @property
    def longest(self) -> int:
        """Number of tokens of the longest chat or pair."""
        return int(self.tokens_D.max())

    def seq_len(self, context: int | None) -> int:
        """Return the smallest multiple of UNIT tokens in which the fraction FITTING of the chats or pairs fits.

        It is at most MOST_POSITIONS and, unless that is None, the model's context.
        """
        needed = int(np.quantile(self.tokens_D, FITTING, method="higher"))
        return min(-(-needed // UNIT) * UNIT, MOST_POSITIONS, context or MOST_POSITIONS)


Setting = tuple[Any, str]
"""A field's value, and a comment on it or ""."""


def add_finetune(commands: argparse._SubParsersAction) -> None:
    finetune = commands.add_parser("finetune", add_help=False, help="fine-tune a model on chats or preferences")
    finetune.set_defaults(run=lambda args: run_finetune(args.overrides), overrides=[])


def run_finetune(words: Sequence[str]) -> int:
    """Run `titanmoe finetune`: write the recipe NAME.toml into the current folder and train it; return the exit code.

    The code is 2 for a refused request, as when that file exists with another text. With --help (code 0), or without
    words (2), only the usage is printed.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    flags = {word for word in words if word in ("--lora", "--full", "--dpo")}
    request = parse_words([word for word in words[len(names) :] if word not in flags])
    if request.get("help") or not words:
        print(USAGE, end="", flush=True)
        return 0 if words else 2
    return exit_code_of(lambda: _finetune(names, flags, request))


def _finetune(names: list[str], flags: set[str], request: Request) -> int:
    """Write the recipe NAME.toml into the current folder and train it; return the exit code.

    Raises ConfigError with every problem; also if the file exists with another text.

    Args:
        names: the model, then the data's paths.
        flags: those of --lora, --full and --dpo that are given.
        request: the rest of the command line, from which --name is removed.
    """
    options, request.rest = take_options(request.rest, "name")
    name = options.get("name", "")
    if options and (not name or "/" in name):
        raise ConfigError(f"command line: --name {name!r} is not a name: the recipe's, without a folder")
    if {"--lora", "--full"} <= flags:
        raise ConfigError("command line: --lora trains adapters and --full all weights: give one of them")
    if len(names) < 2:
        got = f"only {names[0]!r}" if names else "neither"
        example = "titanmoe finetune models/small chats.jsonl"
        raise ConfigError(f"command line: a model and its data are needed, and there is {got}: {example}")
    model, *paths = names
    file = Path(f"{name.removesuffix('.toml') or default_name(model, paths[0])}.toml")
    text = write_recipe(model, paths, request, "--lora" in flags, "--dpo" in flags)
    show_status("")
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{file} exists and is another recipe: run it with `titanmoe train {file}`, or give --name NAME"
        )
    file.write_text(text, encoding="utf-8")
    print(f"{file}:\n\n{text}", flush=True)
    prepared = prepare(replace(request, recipe=str(file)))
    code = start(prepared)
    if not code:
        run = Path(prepared.config.job.dump_folder, prepared.config.job.name)
        flag = "--adapter" if "--lora" in flags else "--checkpoint"
        print(f"ask it:    titanmoe generate {flag} {run} --chat\nexport it: titanmoe convert --to-hf {run} FOLDER")
    return code


def default_name(model: str, path: str) -> str:
    """Return the name of a recipe for a model and its data: "small-chats" for "models/Small" and "data/chats.jsonl"."""
    data = path.removeprefix("hf:").partition(":")[0].rstrip("/")
    return f"{Path(model.rstrip('/')).name.partition('@')[0]}-{Path(data).stem}".lower()


# ---- the recipe


def write_recipe(model: str, paths: list[str], request: Request, lora: bool, dpo: bool) -> str:
    """Return the text of the recipe, in TOML; the data is tokenized into the cache on the way. Writes no recipe.

    Args:
        model: a Hugging Face folder or hub name.
        paths: data.paths: files, folders or hf:OWNER/NAME:SPLIT.
        request: the command line, whose `rest` has the user's options of fields, which are taken over as they are.
        lora: whether to train adapters; if not, all weights.
        dpo: whether the data are preference pairs; if not, chats.

    Raises:
        ConfigError: with every problem of the model, the data and the options.
    """
    about = _model_and_data(model, paths, dpo)
    # What is held out follows from the lengths; without validation, options about it would be refused.
    provisional: dict[str, Setting] = {"validation.held_out": (20, ""), "validation.interval": (1, "")}
    config, given = _read(about | provisional, request)
    length = measure(config)
    context = context_length(describe_folder(describing_folder(model)))
    settings = about | _sizes(config, given, length, context, dpo) | _usual(lora, dpo)
    settings |= {path: (value, settings.get(path, ("", ""))[1]) for path, value in given.items()}
    config = _read(settings | provisional, request)[0]
    machine = this_machine(config.training.device)
    if machine.gpus and not any(path.startswith(MAPPING) for path in given):
        settings |= _planned_mapping(config, machine)
    settings |= _steps(config, length, given)
    kind = "adapters (LoRA)" if lora else "all weights"
    what = "preferences (DPO)" if dpo else "chats (SFT)"
    count = f"{len(length.tokens_D):,} {'pairs' if dpo else 'chats'}, {length.tokens:,} tokens"
    return f"# Fine-tuning of {model} on {what}, {kind}: {count}.\n\n{to_text(settings)}"


def _read(settings: dict[str, Setting], request: Request) -> tuple[Config, dict[str, Any]]:
    """Return the config of these settings and the user's options in `request.rest`, and the options' values by path.

    The options override the settings. Raises ConfigError with every problem.
    """
    words = to_words({path: value for path, (value, _) in settings.items()})
    draft = read_draft([*words, *request.rest], COMPONENTS)
    config = draft.finish(lambda config: [])
    values = flatten(config)
    return config, {path: values[path] for path in split_words(request.rest).overrides}


def _model_and_data(model: str, paths: list[str], dpo: bool) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "model.hf": (model, "its sizes, its weights, its tokenizer"),
        "data.source": ("files", ""),
        "data.paths": (paths, ""),
        "data.format": ("preference" if dpo else "chat", ""),
    }
    if dpo:
        settings["training.objective"] = "dpo", ""
    return settings


def measure(config: Config) -> Length:
    """Tokenize the entries of config.data.paths into the cache, unless they are there; return each chat's length.

    That of a preference pair is the sum of its completions', each with the prompt. Raises ConfigError if an entry
    cannot be read or tokenized.
    """
    from titanmoe.data.open_documents import open_documents

    lengths = []
    for path in config.data.paths:
        documents = open_documents(config, path)
        tokens_D = np.diff(np.asarray(documents.starts[:]))
        lengths.append(tokens_D.reshape(-1, documents.completions_per_prompt).sum(1))
    return Length(np.concatenate(lengths))


def _sizes(config: Config, given: dict[str, Any], length: Length, context: int | None, dpo: bool) -> dict[str, Setting]:
    """Return the settings, by path, that follow from the machine, the model and the lengths of the data.

    They are ranks, ep, seq_len and batch sizes; recomputation on GPUs, float32 on CPUs; for SFT what long chats become.
    A step has at most MOST_SAMPLES samples and a fiftieth of an epoch, but at least a sample per rank.

    Args:
        config: the config so far: the model, the device and the data.
        given: the user's values by path; of them job.ranks and training.seq_len replace what would follow.
        length: lengths of the data.
        context: the longest sequence that the model takes, in tokens; None if unknown.
        dpo: whether the data are preference pairs.
    """
    machine = this_machine(config.training.device)
    ranks = given.get("job.ranks", machine.ranks)
    seq_len = given.get("training.seq_len", length.seq_len(context))
    kind, fitting = "pairs" if dpo else "chats", float((length.tokens_D <= seq_len).mean())
    rounds = max(1, min(MOST_SAMPLES, length.tokens // seq_len // 50) // ranks)
    local = max(n for n in range(1, rounds + 1) if rounds % n == 0 and (n == 1 or n * seq_len <= MICROBATCH_TOKENS))
    settings: dict[str, Setting] = {
        "job.ranks": (ranks, f"processes: one for each {'GPU' if machine.gpus else 'core'}"),
        "parallelism.experts.ep": (math.gcd(ranks, config.model.num_experts), "processes that share the experts"),
        "training.seq_len": (
            seq_len,
            f"positions of a sample: {fitting:.1%} of the {kind} fit, the longest has {length.longest:,} tokens",
        ),
        "training.local_batch_size": (local, "samples of a process in memory at a time"),
        "training.global_batch_size": (rounds * ranks, "samples of a step"),
    }
    if not dpo:
        settings["data.long_chats"] = "cut", "after the last assistant message that fits"
    if machine.gpus:
        settings["activation_checkpoint.mode"] = "full", "takes the least memory; moe and none are faster"
    else:
        settings["training.mixed_precision_param"] = "float32", "CPUs gain nothing from bfloat16"
    return settings


def _planned_mapping(config: Config, machine: Machine) -> dict[str, Setting]:
    """Return the settings, by path, in which the planner's fastest mapping that fits differs from the config.

    Expert parallelism, microbatch and recomputation are always among them. The config has job.ranks and a global batch
    size, the machine GPUs. Raises ConfigError if none fits, with remedies, such as a number of GPUs on which one does.
    """
    ranks, (device, figures), factors = config.job.ranks, similar_device(machine), Factors()
    if best := search(config, ranks, device, factors, count=1).best:
        before, after = flatten(config), flatten(best[0].config)
        shown = "parallelism.experts.ep", "training.local_batch_size", "activation_checkpoint.mode"
        changed = [path for path in after if after[path] != before[path] or path in shown]
        return {path: (after[path], f"{PLANNED} ({figures})") for path in changed}

    def fits_on(gpus: int) -> bool:
        training = replace(config.training, global_batch_size=max(gpus, config.training.global_batch_size))
        return fits(replace(config, training=training), gpus, device, factors)

    doubled = (ranks << n for n in range(1, MOST_GPUS.bit_length()))
    gpus = next((n for n in doubled if n <= MOST_GPUS and fits_on(n)), 0)
    remedies = [f"{gpus} GPUs like these are enough"] * bool(gpus) + ["--lora needs less"] * (not config.lora.rank)
    what = ", and ".join(remedies) or "give a smaller --training.seq_len"
    raise ConfigError(f"no mapping of {machine} fits {config.checkpoint.initial_hf} into memory: {what}")


def _usual(lora: bool, dpo: bool) -> dict[str, Setting]:
    """Return the settings, by path, that are usual for this kind of fine-tuning, each a value and a comment.

    They are epochs, learning rate, weight decay and checkpoints; beta of DPO; rank of LoRA, or else a balance loss.
    `lora` trains adapters, not all weights; `dpo` trains on preference pairs.
    """
    rate = {(False, False): 1e-5, (True, False): 2e-4, (False, True): 1e-6, (True, True): 5e-6}[lora, dpo]
    settings: dict[str, Setting] = {
        "training.epochs": (1 if dpo else 3, f"{'1 is' if dpo else '1 to 3 are'} usual for a pretrained model"),
        "optimizer.lr": (rate, f"{rate:g} is usual for {'adapters' if lora else 'a pretrained model'}"),
        "optimizer.weight_decay": (0.0, ""),
        "lr_schedule.min_ratio": (0.0, "of the rate at the end"),
        "checkpoint.enable": (True, "the same command then resumes"),
        "checkpoint.keep_last": (2, ""),
    }
    if dpo:
        settings["dpo.beta"] = 0.1, "larger keeps the model closer to the reference, which it begins from"
    if lora:
        settings |= {"lora.rank": (16, ""), "lora.alpha": (32.0, "adapters count by alpha / rank")}
    else:
        settings["moe.aux_loss"] = 0.001, "balances the experts' load"
    return settings


def _steps(config: Config, length: Length, given: dict[str, Any]) -> dict[str, Setting]:
    """Return the settings, by path, that follow from the number of steps and documents, without those in `given`.

    They are warm-up and the interval of checkpoints, and from 40 chats or pairs on validation and the best checkpoint.
    The config has seq_len, global batch size and epochs; epochs = 0 counts as one.
    """
    training, documents = config.training, len(length.tokens_D)
    samples = -(-length.tokens // training.seq_len)
    epoch = max(1, samples // training.global_batch_size)
    total = epoch * max(1, training.epochs)
    often = max(1, epoch // 4, total // 20)
    settings: dict[str, Setting] = {
        "lr_schedule.warmup_steps": (min(50, total // 20), ""),
        "checkpoint.interval": (often, "steps"),
    }
    if documents >= 40:
        held_out = max(20, documents // 500)
        settings |= {
            "validation.interval": (often, "steps"),
            "validation.steps": (max(1, samples // held_out // training.global_batch_size), "batches"),
            "validation.held_out": (held_out, f"every {held_out}th is kept out of training"),
            "checkpoint.keep_best": ("val_loss", "the best is kept as well, as RUN:best"),
        }
    return {path: setting for path, setting in settings.items() if path not in given}


TABLES = ("job", "model", "data", "training", "dpo", "lora", "optimizer", "lr_schedule", "validation", "checkpoint")
"""The tables that a recipe begins with, in this order."""


def to_text(settings: dict[str, Setting]) -> str:
    """Return settings, (value, comment or "") by path, as TOML: a [table] for each, those of TABLES first.

    Comments are in one column.
    """
    tables: dict[str, list[tuple[str, str]]] = {table: [] for table in TABLES}
    for path, (value, comment) in settings.items():
        table, _, name = path.rpartition(".")
        tables.setdefault(table, []).append((f"{name} = {toml_value(value)}", comment))
    column = max((len(line) for lines in tables.values() for line, comment in lines if comment), default=0)
    return "\n".join(
        f"[{table}]\n"
        + "".join(f"{line:<{column}}  # {comment}\n" if comment else f"{line}\n" for line, comment in lines)
        for table, lines in tables.items()
        if lines
    )
