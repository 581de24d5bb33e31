"""`titanmoe score`: write a model's log-probabilities of data beside its shards, computed on the recipe's ranks.

Called by titanmoe.cli. It starts ranks as `titanmoe train` does, which run titanmoe.train.reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from titanmoe.launcher.train_command import parse_words, prepare, start, take_options
from titanmoe.train.launch_messages import exit_code_of

USAGE = """\
usage: titanmoe score RECIPE.toml [--data PATH ...] [--top K] [--temperature T] [options] [--TABLE.FIELD VALUE ...]

Computes the log-probability of every label of the recipe's data under the model that the recipe begins from, with the
recipe's mapping, and writes it to scores/DIGEST beside the token shards; DIGEST is the model's. A run whose objective
needs log-probabilities finds them there. Data that has them is skipped.

  --data PATH ...
      data to score, in place of the recipe's data.paths
  --top K
      write the top-K ids and log-probabilities of each position instead, to distil this model into a student
      (docs/fine-tuning.md): scores/DIGEST-topK, with 8 K + 4 bytes for each token in float32
  --temperature T
      temperature of these distributions; the student's recipe has to have the same. Default: 1
Other options are those of titanmoe train.
"""


def add_score(commands: argparse._SubParsersAction) -> None:
    score = commands.add_parser(
        "score", add_help=False, help="write a model's log-probabilities of data, for preferences or a student"
    )
    score.set_defaults(run=lambda args: run_score(args.overrides), overrides=[])


def run_score(words: Sequence[str]) -> int:
    paths, rest = _data(words)
    options, rest = take_options(rest, "top", "temperature")
    request = parse_words(rest)
    request.rest += [f"--distillation.{name}={value}" for name, value in options.items()]
    if request.get("help"):
        print(USAGE, end="", flush=True)
        return 0
    # Scoring needs no gradients and no moments, and writes to no run's folder.
    request.options["memory"] = "ignore"
    request.rest += ["--checkpoint.enable=false"] if request.recipe or request.rest else []
    if paths is not None:
        request.rest += ["--data.source=files", "--data.paths", *paths, "--data.weights=", "--data.fields="]
        if not paths:
            request.problems.append("command line: --data is empty: give token shards, files or folders")
    what = "top-k" if "top" in options else "labels"
    if what == "labels" and options:
        request.problems.append("command line: --temperature scales the distributions of --top K: give --top K too")
    return exit_code_of(lambda: start(prepare(replace(request, scores=what))))


def _data(words: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Split a command line at its option --data.

    Returns the paths of --data PATH ... or --data=PATH ..., up to the next word that begins with --, and the other
    words; None and all words without --data.
    """
    at = next((n for n, word in enumerate(words) if word.partition("=")[0] == "--data"), None)
    if at is None:
        return None, list(words)
    end = next((n for n in range(at + 1, len(words)) if words[n].startswith("--")), len(words))
    paths = [words[at].partition("=")[2], *words[at + 1 : end]]
    return list(filter(None, paths)), [*words[:at], *words[end:]]
