"""The command `titanmoe eval`: benchmarks of lm-evaluation-harness on a run's checkpoint, without an export.

Called by titanmoe.cli, also under torchrun. Data ranks divide up the requests of the harness.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout, safe_files
from titanmoe.config.allowed_code import add_allow_code
from titanmoe.config.load import ConfigError
from titanmoe.generate.generate_command import DEGREES, add_placement, check_vocab_size
from titanmoe.this_process import is_rank_0
from titanmoe.train.launch_messages import exit_code_of

EPILOG = """\
Under torchrun (torchrun --no-python --nproc-per-node 4 titanmoe eval ...) --tp, --ep and --etp split the model, and
data ranks divide up the requests. docs/generate.md says more.
"""


def add_eval(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `eval` and its options to the parser of `titanmoe`."""
    evaluate = commands.add_parser(
        "eval",
        help="score a checkpoint on the tasks of lm-evaluation-harness",
        description="Runs lm-evaluation-harness on the model of a checkpoint as it is, under any mapping.",
        epilog=EPILOG,
    )
    evaluate.set_defaults(run=lambda args: exit_code_of(lambda: _run(args)))
    evaluate.add_argument(
        "RUN", type=Path,
        help="a run's folder (its latest checkpoint), RUN:best, RUN:STEP, a checkpoint, or a Hugging Face folder",
    )  # fmt: skip
    evaluate.add_argument("--adapter", type=Path, metavar="RUN", help="adapters on RUN, as in titanmoe generate")
    add_allow_code(evaluate)
    evaluate.add_argument(
        "--tasks", required=True, metavar="A,B", help="names of tasks or groups; lm_eval ls tasks lists them"
    )
    evaluate.add_argument("--include-path", metavar="FOLDER", help="folder with more tasks, as YAML")
    evaluate.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task, for a try")
    evaluate.add_argument("--batch-size", type=int, default=16, metavar="N", help="texts at a time on a data rank (16)")
    evaluate.add_argument("--tokenizer", metavar="T", help="as in titanmoe generate (default: the run's)")
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="also write all results as JSON")
    add_placement(evaluate)


def _run(args: argparse.Namespace) -> int:
    if find_spec("lm_eval") is None:
        raise ConfigError(
            'titanmoe eval runs lm-evaluation-harness, which is not installed: pip install "titanmoe[eval]"'
        )
    if problems := [
        f"--{name.replace('_', '-')} = {value} is below {low}: use {low} or more, or leave it out"
        for name, low in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0))
        if (value := getattr(args, name)) is not None and value < low
    ]:
        raise ConfigError(problems)
    from titanmoe.generate.build_model import open_generator
    from titanmoe.generate.model import config_to_run, find_model, tokenizer_of
    from titanmoe.train.runtime import start, stop, world_size

    trained = find_model(*_weights_and_adapters(args.RUN, args.adapter))
    tokenizer = tokenizer_of(trained, args.tokenizer)
    check_vocab_size(tokenizer, trained)
    degrees = {name: getattr(args, name) for name in ("pp", "cp", *DEGREES)}
    config = config_to_run(trained.config, world_size(), degrees, args.dtype, args.device)
    tasks, manager = _find_tasks(args.tasks.split(","), args.include_path)
    runtime = start(config)
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.utils import make_table

        from titanmoe.generate.harness import RunModel
        from titanmoe.generate.log_likelihood import Scorer

        generator = open_generator(config, trained, runtime, tokenizer, {tokenizer.eos})
        results = simple_evaluate(
            model=RunModel(Scorer(generator, trained.config.training.seq_len), tokenizer, args.batch_size),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            batch_size=args.batch_size,
            log_samples=args.output is not None,
        )
        if is_rank_0():
            model = (trained.adapters or trained).path
            print(f"{model}\n{make_table(results)}", flush=True)
            if "groups" in results:
                print(make_table(results, "groups"), flush=True)
            if args.output:
                _write(args.output, results)
        return 0
    finally:
        stop()


def _weights_and_adapters(run: Path, adapter: Path | None) -> tuple[Path | None, Path | None]:
    """Return (weights, adapters) for `find_model`: `run` with any `adapter`; or (None, run) if it has adapters alone.

    Weights of None mean those that the adapters were trained on. `run` may also be a Hugging Face or PEFT folder.
    """
    from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
    from titanmoe.checkpoint.hf.peft_read import is_peft
    from titanmoe.checkpoint.hf.weight_sources import is_hf

    if adapter is not None or is_hf(str(run)):
        return run, adapter
    if is_peft(run) or "base" in layout.read_manifest(latest_checkpoint(run)).record:
        return None, run
    return run, None


def _find_tasks(names: list[str], folder: str | None) -> tuple[list[str], Any]:
    """Return the names of the harness's tasks that match, and its task manager; ConfigError if a name matches none.

    `names` may have wildcards. `folder` has more tasks; None for the harness's alone.
    """
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--include-path {folder} is not a folder: name the one with the YAML files of tasks")
    manager = TaskManager(include_path=folder)
    problems = [
        f"--tasks {name}: there is no such task: lm_eval ls tasks lists all, and --include-path adds a folder with more"
        for name in names
        if not manager.match_tasks([name])
    ]
    if problems:
        raise ConfigError(problems)
    return manager.match_tasks(names), manager


def _write(file: Path, results: Any) -> None:
    text = json.dumps(results, default=str, indent=1)
    try:
        safe_files.write(file.parent, file.name, text.encode())
    except OSError as error:
        print(f"error: cannot write {file}: {error.strerror}", file=sys.stderr)
