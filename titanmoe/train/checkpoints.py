"""Checkpoints of a run: what it starts from, when it saves, and when a signal stops it.

The training loop enters `in_folder(path)`, calls `begin` once, `after_step` after each step and `finish` at the end;
these three are collective over the world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titanmoe import observe
from titanmoe.checkpoint import layout, state
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, save
from titanmoe.checkpoint.choose_checkpoint import StartPoint, checkpoints_folder, choose_start
from titanmoe.checkpoint.manifest import Manifest, flatten_record
from titanmoe.checkpoint.move_in_blocks import fill_in_blocks
from titanmoe.checkpoint.on_all_ranks import from_rank, on_all_ranks, raise_on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.saver import Saver
from titanmoe.config import ConfigError
from titanmoe.config.schema import Checkpoint as Options
from titanmoe.config.schema import LoRA, Model
from titanmoe.data.loader import Loader
from titanmoe.data.token_shards import StoredTokenizer
from titanmoe.train.best import BestStep
from titanmoe.train.evaluation import Validation
from titanmoe.train.learning_rate import LearningRate, describe_rate_change
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.run_state import RunState
from titanmoe.train.runtime import Runtime, Signals, print_rank_0

REFERENCE = "reference"
"""Key of a record with the digest of the run's reference model (titanmoe.train.reference)."""
WEIGHTS_ALONE = "start a new run with checkpoint.model_only = true"
OLD_SOURCES = f"give the run the data sources that it had, or {WEIGHTS_ALONE}"
"""Advice of messages about a checkpoint whose state does not fit the run."""


@dataclass(eq=False, kw_only=True)
class Checkpoints:
    """Loading and saving of a run's state. Inside `in_folder` signals are caught, so that a run ends with a save."""

    options: Options
    model: Model
    run_record: dict[str, Any]
    """Facts of the run that every checkpoint's record contains: config, mapping (`checkpoint.state.run_record`)."""
    runtime: Runtime
    state: RunState
    loader: Loader
    validation: Validation | None
    optimizer: Optimizer
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    rate: LearningRate
    lora: LoRA
    best: BestStep | None = None
    start_step: int = 0
    """Number of steps that the run had made when this process started."""
    saver: Saver | None = None
    origin: Path | None = None
    """Checkpoint that the run has started from."""

    find_carried: Callable[[], Mapping[str, Path]] = dict
    """Function that returns the files to copy into a checkpoint (config.json, tokenizer), by the name of the copy."""

    def __post_init__(self) -> None:
        self.group = dist.group.WORLD if self.runtime.world > 1 else None
        self.signals = Signals()

    @contextlib.contextmanager
    def in_folder(self, run: Path) -> Iterator[Checkpoints]:
        """Set the run's folder, yield self, and catch signals until the context ends if checkpoints are saved.

        With checkpoint.enable the checkpoints' folder is created, and files of interrupted saves are removed from it.
        Collective over the world.

        Raises:
            ConfigError: checkpoints are saved, and their folder cannot be written to.
        """
        self.run, self.signals = run, Signals()
        try:
            self.saver = (
                Saver(checkpoints_folder(run, self.options), self.options, print_rank_0)
                if self.options.enable
                else None
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        with self.signals if self.saver else contextlib.nullcontext():
            yield self

    # ---- loading

    def begin(self) -> dict[str, str]:
        """Load the checkpoint or weights that the config asks for, if any, in place. Collective over the world.

        Config and tokenizer files, the data's tokenizer in place of the model's, are copied for this run's checkpoints.

        Returns:
            Lines for the header that is printed at the start, by label: what was loaded, and warnings.

        Raises:
            ConfigError: they cannot be read or do not fit the run.
        """
        beginning = self.choose_start(lambda: choose_start(self.options, self.run, self.find_damage))
        for line in beginning.notes:
            print_rank_0(f"checkpoint: {line}")
        if self.saver:
            self.saver.passed_over = [path for path in beginning.passed_over if path.parent == self.saver.folder]
        notes = self._start_from_checkpoint(beginning) if beginning.path else self._start_without_checkpoint()
        if note := self._context_note():
            notes["context"] = note
        self.start_step = self.state.step
        if self.saver and (tokenizer := self.loader.mix.tokenizer):
            self._copy_files(partial(_tokenizer_files, tokenizer))
        return notes

    def _start_without_checkpoint(self) -> dict[str, str]:
        """Load checkpoint.initial_hf if it is set; return header lines by label, else {}. Collective over the world."""
        return self.begin_from_hf() if self.options.initial_hf else {}

    def _start_from_checkpoint(self, beginning: StartPoint) -> dict[str, str]:
        """Load a checkpoint, or with `beginning.model_only` its weights alone; return lines of the header by label.

        The checkpoint's config and tokenizer files are copied for this run's checkpoints. `beginning.path` must be set.
        Collective over the world.
        """
        self.origin = beginning.path
        changes = self.load(Checkpoint(beginning.path), beginning.model_only)
        self._copy_files(lambda: layout.carried_files(beginning.path))
        step = self.state.step
        if self.saver and beginning.path.parent == self.saver.folder:
            self.saver.begun_step = step  # it is on disk already
        origin = f"weights of {beginning.path}" if beginning.model_only else f"{beginning.path}, after step {step}"
        return {"begins from": origin} | ({"changed since": "\n".join(changes)} if changes else {})

    def _context_note(self) -> str:
        """Return a note if samples are longer than the context that the loaded Hugging Face model supports; else ""."""
        from titanmoe.checkpoint.hf.config_json import CONFIG, context_note
        from titanmoe.checkpoint.hf.fetch import local_folder

        folder = local_folder(self.options.initial_hf) if self.options.initial_hf else None
        if folder is None and self.origin is not None:
            with contextlib.suppress(CheckpointError):
                file = layout.carried_files(self.origin).get(CONFIG)
                folder = file.parent if file else None
        if folder is None:
            return ""
        return context_note(folder, self.model, self.run_record["config"]["training"]["seq_len"])

    def _copy_files(self, find: Callable[[], Mapping[str, Path]]) -> None:
        """Copy config and tokenizer files into the checkpoints' folder, from where each checkpoint gets a copy.

        Collective over the world. A run that saves no checkpoints only stores `find`, for exports.

        Args:
            find: called on rank 0; returns the path of each file by the name of the copy.

        Raises:
            ConfigError: on all ranks, if `find` raises a CheckpointError or OSError, or a file cannot be copied.
        """
        self.find_carried = find
        try:
            if self.saver:
                self.saver.carry(find)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None

    def begin_from_hf(self) -> dict[str, str]:
        """Load the weights of checkpoint.initial_hf in place; return lines of the header by label.

        A model on the hub is fetched first. The model's config and tokenizer files are copied for this run's
        checkpoints. Collective over the world.

        Raises:
            ConfigError: the model cannot be fetched or does not fit [model].
        """
        from titanmoe.checkpoint.hf.huggingface_source import open_checked_hf
        from titanmoe.checkpoint.hf.safetensors_folder import config_and_tokenizer_files

        folder = self._find_hf_folder(self.options.initial_hf)
        source = open_checked_hf(folder, self.model)
        for name, (_, shard) in self._targets(with_moments=False, base=True).items():
            fill_in_blocks(shard.tensor, shard.offset, partial(source.read, name.removeprefix("model.")))
        self._copy_files(lambda: config_and_tokenizer_files(folder))
        return {"begins from": "\n".join([f"weights of {self.options.initial_hf}", *source.notes])}

    def _find_hf_folder(self, name: str) -> Path:
        """Return this machine's folder of a Hugging Face model, fetched if need be. Collective over the world.

        Args:
            name: a folder, OWNER/MODEL[@REVISION] on the hub, or a URL.

        Raises:
            ConfigError: on all ranks, if it cannot be fetched, or its revision, config.json or tensor index differs
                between ranks. Weights are not compared.
        """
        from titanmoe.checkpoint.hf.fetch import fingerprint, weights_folder

        folder = raise_on_all_ranks(self.group, lambda: weights_folder(name))
        prints = raise_on_all_ranks(self.group, lambda: on_all_ranks(self.group, lambda: fingerprint(name, folder)))
        if len(set(prints)) > 1:
            rank = next(rank for rank, other in enumerate(prints) if other != prints[0])
            raise ConfigError(
                f"{name} is not the same on all machines: ranks 0 and {rank} have different files "
                f"({prints[0]}, {prints[rank]}): name a revision of the hub, {name.partition('@')[0]}@REVISION, or "
                "make the folders the same"
            )
        return folder

    def choose_start(self, choose: Callable[[], StartPoint]) -> StartPoint:
        """Return the checkpoint that rank 0 chooses to start from, on all ranks. Collective over the world.

        Args:
            choose: called on rank 0; it may call `find_damage`, for which each rank verifies some of the files.

        Raises:
            ConfigError: on all ranks, if `choose` raises a CheckpointError or OSError.
        """
        try:
            while isinstance(choice := from_rank(self.group, 0, choose), Path):  # not on rank 0, which is in choose()
                self._check_together(choice)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return choice

    def find_damage(self, path: Path) -> list[str]:
        """Return one line for each damaged file of a checkpoint; [] if it is intact.

        Only rank 0 calls it, in the `choose` of `choose_start`, where the other ranks wait to verify some of the files.
        With checkpoint.verify = false only sizes are compared.

        Raises:
            CheckpointError: the folder is no checkpoint.
        """
        layout.read_manifest(path)  # raises before the other ranks are involved if this is not a checkpoint
        from_rank(self.group, 0, lambda: path)
        return self._check_together(path)

    def _check_together(self, path: Path) -> list[str]:
        """Verify a checkpoint's files, each rank some of them; return all ranks' lines on damage, [] if none.

        Sizes are compared, with checkpoint.verify also contents. If a rank cannot see the files, the one line says so.
        Collective over the world.
        """
        runtime, contents = self.runtime, self.options.verify
        try:
            by_rank = on_all_ranks(self.group, lambda: layout.find_damage(path, contents, runtime.rank, runtime.world))
            return [line for lines in by_rank for line in lines]
        except CheckpointError as error:  # a rank cannot see the files
            return [error.problem]

    def load(self, saved: Checkpoint, model_only: bool = False) -> list[str]:
        """Fill the run from a checkpoint, which may have another mapping, in place. Collective over the world.

        Without `model_only` these are also the moments, step and tokens, the positions in the data, the skipped steps,
        and the best values so far.

        Args:
            model_only: whether to load the weights alone, and start at step 0 with a new optimizer.

        Returns:
            One line for each option that differs from the checkpoint's config, those of [checkpoint], [job] and
                [metrics] apart, and notes on the effects; [] with `model_only`.

        Raises:
            ConfigError: the checkpoint does not fit the run, its model or its data, or cannot be read.
        """
        before, now = (flatten_record(record.get("config", {})) for record in (saved.record, self.run_record))
        problems = self._refusals(saved, now, model_only)
        if not model_only and "loader" in saved.record:
            try:
                self.loader.load_state_dict(saved.record["loader"])
            except ConfigError as error:
                problems += error.problems
            except (KeyError, IndexError, TypeError, ValueError) as error:
                why = f"{type(error).__name__} {error}"
                problems.append(f"the data position (record.loader) cannot be used: {why}: {OLD_SOURCES}")
            try:
                self.state.skips.load_state_dict(saved.record.get("skips", {}))
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                why = f"{type(error).__name__} {error}"
                problems.append(f"the skipped steps (record.skips) cannot be used: {why}: {WEIGHTS_ALONE}")
        if problems:
            raise ConfigError(problems, str(saved.path))
        targets = self._targets(with_moments=not model_only, base="base" not in saved.record)
        try:
            self._check_names(saved, targets, model_only)
            on_all_ranks(self.group, lambda: saved.fill(targets))
        except CheckpointError as error:
            raise ConfigError(str(error), str(saved.path)) from None
        if model_only:
            return []
        self.state.step, self.state.tokens = saved.record["step"], saved.record["tokens"]
        if REFERENCE in saved.record:
            self.run_record[REFERENCE] = saved.record[REFERENCE]
        if self.validation:
            self.validation.load_state_dict(saved.record.get("validation", {}))
        if self.best:
            self.best.load_state_dict(saved.record.get("best", {}))
        self.optimizer.resume(self.state.updates)
        return state.changed_fields(before, now) + describe_rate_change(self.state.step, before, self.rate)

    def _check_names(self, saved: Checkpoint, targets: state.Targets, model_only: bool) -> None:
        """Raise a CheckpointError unless a checkpoint has exactly the tensors that all ranks together load.

        Collective over the world.

        Args:
            model_only: whether moments in the checkpoint may remain unused.
        """
        names = {
            name for theirs in on_all_ranks(self.group, lambda: {s for s, _ in targets.values()}) for name in theirs
        }
        stored = {name for name in saved.tensors if name.startswith("model.") or not model_only}
        lines = []
        for what, some in (("lacks", names - stored), ("has tensors that this model does not have:", stored - names)):
            if some:
                shown = ", ".join(sorted(some)[:8]) + (f" and {len(some) - 8} more" if len(some) > 8 else "")
                lines.append(f"the checkpoint {what} {shown}")
        if lines:
            raise CheckpointError("; ".join(lines), "set [model] and [lora] as the checkpoint has them")

    def _refusals(self, saved: Checkpoint, now: Mapping[str, Any], model_only: bool) -> list[str]:
        """Return one message for each reason in a checkpoint's manifest not to start from it; data is not compared.

        Args:
            now: fields of the run's config by path, such as "model.dim".
            model_only: whether only the weights are loaded.
        """
        trains_adapters, initial = self.lora.rank > 0, self.options.initial_adapter
        return state.refused_record(saved.record, now, saved.path, trains_adapters, model_only, initial)

    def _targets(self, with_moments: bool, base: bool = False) -> state.Targets:
        """Return this rank's shards of all tensors that a checkpoint of this run contains, in the live tensors' memory.

        Args:
            with_moments: whether to add the optimizer's moments.
            base: in a run that trains adapters, whether to return the base weights instead of these; unused in others.

        Returns:
            By "model.NAME" or "optimizer.MOMENT.NAME": the stored tensor's name, and a TensorShard.
        """
        moments = self.optimizer.moments() if with_moments else None
        return state.shards_to_load(self.parameters, self.buffers, moments, self.model.tie_embeddings)

    # ---- saving

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants to stop; the loop then stops all ranks. Not collective.

        It does after a signal, or if a save has failed or exceeded checkpoint.timeout_s.
        """
        return bool(self.signals.number or (self.saver and self.saver.failed_or_late))

    @property
    def is_due(self) -> bool:
        """True if checkpoint.interval or keep_best asks for a save after the step just made, which is not saved yet."""
        if self.saver and self.state.step in (self.start_step, self.saver.begun_step):
            return False  # the loop has been stopped before it made a step
        is_best = self.best is not None and self.best.keeps and self.best.step == self.state.step
        at_interval = self.options.interval and self.state.step % self.options.interval == 0
        return bool(self.saver and (is_best or at_interval))

    @property
    def has_saved(self) -> bool:
        """True if a checkpoint is on disk, or being written, from which the run can continue after a NumericalFault."""
        return bool(self.saver and self.saver.begun_step >= 0)

    def after_step(self) -> dict[str, float]:
        """Save if checkpoint.interval or keep_best asks for it after this step. Collective over the world.

        Returns:
            The metric checkpoint_blocked_s, the seconds for which the save paused training; {} without a save.

        Raises:
            CheckpointError: the save before has failed, or with checkpoint.save = "sync" this one. With "async" it goes
                on in a thread.
        """
        return {"checkpoint_blocked_s": self._save()} if self.is_due else {}

    @property
    def long_timeout_groups(self) -> list[dist.ProcessGroup]:
        """Process groups whose collectives wait for disks, and therefore keep the long time-out of the start."""
        return [self.saver.group] if self.saver and self.saver.group else []

    def wait(self) -> None:
        """Wait until the last save, if any, is on disk. Collective over the world.

        Raises:
            CheckpointError: on all ranks, if it fails or takes longer than checkpoint.timeout_s.
        """
        if self.saver:
            self.saver.wait()

    def finish(self) -> int:
        """Save the last step unless it is saved already, wait until it is on disk, and print where it is.

        Nothing is saved if this process made no step. Collective over the world.

        Returns:
            The number of the signal that any rank has received, or 0; always 0 with checkpoint.enable = false.

        Raises:
            CheckpointError: on all ranks, if a save fails.
        """
        if not self.saver:
            return 0
        if self.state.step != self.start_step:
            self.saver.wait()
            if self.saver.begun_step != self.state.step:
                self._save()
                self.saver.wait()
            folder = self.saver.folder
            print_rank_0(f"saved      {folder / layout.folder_name(self.state.step)}")
            if self.options.keep_best and self.best.step >= 0:
                print_rank_0(f"best       {folder / layout.folder_name(self.best.step)}: {self.best.describe()}")
        return max(on_all_ranks(self.group, lambda: self.signals.number))

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest stores besides tensors, by name.

        These are "step", "tokens", "loader" (its position), "skips", what `run_record` contains, and "validation" and
        "best" if the run has them.
        """
        record = {"step": self.state.step, "tokens": self.state.tokens, "loader": self.loader.state_dict()}
        record |= self.run_record | {"skips": self.state.skips.state_dict()}
        if self.validation:
            record["validation"] = self.validation.state_dict()
        if self.best:
            record["best"] = self.best.state_dict()
        return record

    def save_to(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write a checkpoint into a folder of any name, and wait until it is on disk. Collective over the world.

        Args:
            folder: the checkpoint's folder; one that exists is replaced.
            group: a process group of CPU tensors of all ranks; None for a single rank.

        Raises:
            CheckpointError: on all ranks, if it cannot be written or a tensor has NaN or infinite elements.
        """
        shards, step = state.shards_to_save(self._targets(with_moments=True)), self.state.step
        record, carried = self.record(), from_rank(group, 0, self.find_carried)
        save(folder, shards, lambda sums: Manifest(step, 1, sums, record), group=group, carried=carried, finite=True)

    def _save(self) -> float:
        """Start a save, write an event, and return the seconds for which training paused. Collective over the world.

        Raises:
            CheckpointError: the save before has failed, or with checkpoint.save = "sync" this one.
        """
        step = self.state.step
        blocked = self.saver.save(step, state.shards_to_save(self._targets(with_moments=True)), self.record())
        name = layout.folder_name(step)
        observe.active.event(step, "save", f"{name}, which paused training for {blocked:.2f} s")
        return blocked


def _tokenizer_files(tokenizer: StoredTokenizer) -> dict[str, Path]:
    try:
        return tokenizer.files()
    except ConfigError as error:
        raise CheckpointError("; ".join(error.problems)) from None
