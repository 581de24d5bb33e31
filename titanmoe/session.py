"""A training run as an object: forward and backward, update, log-probabilities and checkpoints, called from your code.

    run = titanmoe.open("recipe.toml", {"training.steps": 100})     # on every rank, under torchrun
    run.forward_backward(run.batch(ids))                            # any number of times in a step
    metrics = run.optim_step()

All methods but `batch` are collective over the world: every rank calls them, in the same order.

Shapes: N samples of a call (in routes: MoE layers), L positions of a sample (training.seq_len), B samples of a
microbatch, S positions of the attention slice, T tokens that this rank owns, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint.hf.live_export import LiveExport, write_hf_folder
from titanmoe.checkpoint.hf.model_card import model_card
from titanmoe.checkpoint.on_all_ranks import from_rank
from titanmoe.checkpoint.relayout import Relayout
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.state import Targets
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_layers
from titanmoe.config.component_kinds import ComponentError
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.data.routes import Routes
from titanmoe.models.lora import without_adapters
from titanmoe.models.vocabulary import Head
from titanmoe.parallel.batch_slice import BatchSlice, check_alike
from titanmoe.parallel.data_parallel import free_gathered
from titanmoe.tokens import NO_EXPERT
from titanmoe.train.gradients import PassSums, StepWork, Totals, sum_together
from titanmoe.train.objectives.log_probs import NoSum, OfLogProbs, SampleLoss, WithLogProbs
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.objectives.objective_spec import OBJECTIVES
from titanmoe.train.runtime import stop
from titanmoe.train.trainer import update
from titanmoe.train.training import Training
from titanmoe.train.world_batch import DataRankBatch, Samples, data_rank_batch, make_batch

ObjectiveName = str | SampleLoss
"""A name of training.objective, or a function."""


@dataclass(frozen=True)
class Counts:
    """Divisors of the terms of a step, over all its calls and ranks. Counts of several batches can be added."""

    divisors: Mapping[ObjectiveName, Tensor]
    """Count of each objective over the samples that it is computed on."""
    tokens: Tensor
    samples: Tensor
    flops: Tensor

    def __add__(self, other: Counts) -> Counts:
        zero = torch.zeros_like(self.tokens)
        names = self.divisors | other.divisors
        divisors = {name: self.divisors.get(name, zero) + other.divisors.get(name, zero) for name in names}
        rest = (getattr(self, name) + getattr(other, name) for name in ("tokens", "samples", "flops"))
        return Counts(divisors, *rest)


@dataclass(frozen=True)
class PassResult:
    """Result of a forward_backward call. Its tensors are on the device; reading them waits for it."""

    loss: Tensor
    """The objective's sum over the call's samples, divided by the step's divisor."""
    metrics: dict[str, Tensor]
    """Metrics of the objective, likewise."""
    log_probs: Tensor | None
    """Log-probability of each label (N, L), 0 where there is none; None unless asked for."""
    entropy: Tensor | None = None
    """Entropy in nats of the distribution of each label (N, L), likewise."""
    routes: Routes | None = None
    """Experts that the routers choose by themselves, also if the batch gives others; None unless asked for."""


class _CallResult(NamedTuple):
    """Result of a call on this rank; tensors are in the order of the call's samples, None unless asked for."""

    sums: PassSums
    log_probs: Tensor | None
    entropy: Tensor | None
    routes: Routes | None


class Session:
    """A run on all ranks, without a loader and a loop. `open_session` makes it."""

    def __init__(self, config: Config, training: Training, owns_process_group: bool = False, ids: int = 0):
        size, mapping = config.model.vocab_size, config.parallelism
        axes, ranks = ("pp * tp", mapping.pp * mapping.tp) if mapping.vocab == "pipeline" else ("tp", mapping.tp)
        before_last = -(-size // ranks) * (ranks - 1)
        if ids and not before_last < ids <= size:
            raise ConfigError(
                f"ids = {ids} do not fit model.vocab_size = {size}, of which each rank of {axes} = {ranks} needs "
                f"one that exists: give more than {before_last} and at most {size}, or 0 for all"
            )
        self.config, self.training, self.owns_process_group = config, training, owns_process_group
        self.ids = ids or size
        """Number of ids that exist, by which batches are checked."""
        for head in (stage.head for stage in training.stages if isinstance(stage.head, Head)):
            head.ids = ids
        self.meshes, self.device = training.meshes, training.device
        self.group = dist.new_group(backend="gloo") if training.runtime.world > 1 else None
        """Process group for messages of CPU tensors."""
        self.wide = torch.promote_types(getattr(torch, config.training.mixed_precision_param), torch.float32)
        """Dtype of log-probabilities."""
        self._objectives: dict[ObjectiveName, Objective] = {}
        self._counts: Counts | None = None
        """Counts of the open step; None between steps."""
        self._results: list[tuple[Objective, PassSums]] = []
        """Results of the open step's calls on this rank."""
        self._samples = 0
        """Samples of the open step so far."""
        self._entropy = False
        """Whether the call that is being made returns entropies."""
        self._exports: dict[Any, LiveExport] = {}
        """Planned exports by their options."""
        self._moves: dict[int, tuple[Session, Relayout]] = {}
        """Planned moves of weights by the id of the run that they go to."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """Number of this rank in the world."""
        return self.training.runtime.rank

    @property
    def step(self) -> int:
        """Number of steps made; a step without its `optim_step` yet does not count."""
        return self.training.state.step - (self._counts is not None)

    # ---- batches

    def batch(
        self, ids: Samples, labels: Samples | None = None, *, documents: Samples | None = None, **columns: Any
    ) -> Batch:
        """Check samples and return them as a batch on the CPU, padded to training.seq_len. Not collective.

        Args:
            ids: token ids of any number of samples.
            labels: next token of each position, -100 where there is no loss; None: every next token of a document.
            documents: ascending number of the document of each position; None: each sample is one document.
            columns: further fields that the objective reads, by name: numbers per position, or a number per sample.
                "routes" are the experts to choose: Routes, or for each sample a tensor (positions, MoE layers, K).

        Raises:
            ConfigError: with every problem of the samples.
        """
        config = self.config
        model = replace(config.model, vocab_size=self.ids)
        return make_batch(
            ids, labels, documents=documents, columns=columns, seq_len=config.training.seq_len, model=model
        )

    def count(
        self,
        batch: Batch | None,
        objective: ObjectiveName = "",
        divisor: float | None = None,
        *,
        per_data_rank: bool = False,
    ) -> Counts:
        """Return the counts over all data ranks of a step that consists of this batch alone.

        They are the objective's count, which divides the loss, and tokens, samples and FLOPs. Collective.

        Args:
            batch: the samples, the same on all ranks or given on one with None on the others.
            objective: name of an objective, "" for the recipe's, or a function that returns the loss of samples.
            divisor: count of the objective over the batch; None: its own, which is the number of labels for a function.
            per_data_rank: whether each data rank gives samples of its own (every rank a batch, possibly empty, not
                None; the ranks of a data rank the same).

        Raises:
            ConfigError: `divisor` is not above 0, or there is no such objective or no batch.
        """
        if divisor is not None and not 0 < divisor < math.inf:
            raise ConfigError(f"divisor = {divisor} divides the loss: give more than 0, or leave the step out")
        return self._count(self._local(batch, per_data_rank), objective, divisor)

    def _count(self, local: DataRankBatch, name: ObjectiveName, divisor: float | None = None) -> Counts:
        totals = self.training.slicer.count(local.microbatches, self._objective(name))
        divided_by = totals.divisor if divisor is None else torch.full_like(totals.divisor, divisor)
        return Counts({name: divided_by}, totals.tokens, totals.samples, totals.flops)

    def _local(self, batch: Batch | None, per_data_rank: bool) -> DataRankBatch:
        local = data_rank_batch(
            batch,
            self.meshes,
            model=self.config.model,
            rows=self.config.training.local_batch_size,
            multiple=self.training.loader.microbatches if self.meshes.pp.size > 1 else 1,
            offset=self._samples,
            per_data_rank=per_data_rank,
        )
        check_alike(local.microbatches, self.meshes, self.device)
        return local

    def _objective(self, name: ObjectiveName) -> Objective:
        """Return an objective by name, "" for the recipe's, or from a function. Raises ConfigError if it cannot be."""
        if name not in self._objectives:
            self._objectives[name] = self._build_objective(name)
        return self._objectives[name]

    def _build_objective(self, name: ObjectiveName) -> Objective:
        config, default = self.config, self.config.training.objective
        if not name:
            return self.training.gradients.objective
        if not isinstance(name, str):
            if config.model.mtp_depth:
                raise ConfigError(
                    f"model.mtp_depth = {config.model.mtp_depth} is trained by cross-entropy alone: set "
                    "mtp_depth = 0 for an objective of your own"
                )
            if problems := getattr(name, "find_problems", lambda config: [])(config):
                raise ConfigError(problems, f"objective {type(name).__name__}")
            return OfLogProbs(self.meshes, self.training.slicer.placement, self.device, name)
        try:
            spec, has = OBJECTIVES.look_up(name), OBJECTIVES.look_up(default)
        except ComponentError as error:
            raise ConfigError(str(error)) from None
        wanted = (spec.reads_entropy, spec.teacher_top_k(config), spec.allows_mtp or not config.model.mtp_depth)
        if wanted != (has.reads_entropy and spec.reads_entropy, has.teacher_top_k(config), True) and name != default:
            raise ConfigError(
                f'the head of this model computes what "{default}" reads, and objective "{name}" reads more: set '
                f'training.objective = "{name}"'
            )
        return OBJECTIVES.implementation(name).build(config, self.meshes)

    # ---- a step

    def forward_backward(
        self,
        batch: Batch | None,
        objective: ObjectiveName = "",
        *,
        counts: Counts | None = None,
        temperature: float = 1.0,
        log_probs: bool = False,
        entropy: bool = False,
        routes: bool = False,
        per_data_rank: bool = False,
    ) -> PassResult:
        """Compute forward and backward of a batch, and add its gradients to those of the open step, or begin one.

        Args:
            batch: the samples, the same on all ranks or given on one with None on the others.
            objective: name of an objective, "" for the recipe's, or a function that takes log-probabilities (B, L) and
                the Batch of some samples, and returns the sum of their losses, a scalar.
            counts: what a step of several calls is divided by: run.count(a, objective) + run.count(b, objective) + ...,
                the same object in each call. None: the batch is the whole step.
            temperature: divides the logits, as in sampling; of log-probabilities, entropy and loss alike.
            log_probs: whether to return the log-probability of each label.
            entropy: whether to return the entropy of the distribution of each label.
            routes: whether to return the experts that the routers choose.
            per_data_rank: whether each data rank gives samples of its own (every rank a batch, possibly empty, not
                None; the ranks of a data rank the same), and gets the results of these alone.

        Returns:
            What the samples of all ranks add to the step's loss and the objective's metrics; where asked for,
                log-probabilities (N, L), entropies (N, L) and routes.

        Raises:
            ConfigError: the calls of a step have different objects as counts, `counts` lacks the objective, the run
                trains nothing, `temperature` is not above 0, a batch is missing, or the objective cannot be computed
                with the model.
        """
        local, computed = self._local(batch, per_data_rank), self._objective(objective)
        if self._counts is not None and counts is not self._counts:
            raise ConfigError(
                "this step has had a forward_backward call, which was divided by other counts: give all calls of a "
                "step counts=total, where total = run.count(a) + run.count(b) + ..."
            )
        if not self.training.gradients.trained:
            raise ConfigError("this run was opened with trains=False: it has log_probs alone")
        counts = counts or self._count(local, objective)
        if objective not in counts.divisors:
            raise ConfigError(f"counts has no objective {objective!r}: add run.count(batch, objective)")
        with self._head_options(temperature, entropy):  # a call that it refuses begins no step
            if self._counts is None:
                self._begin_step(counts)
            result = self._run(local, computed, counts.divisors[objective], log_probs or entropy, routes)
        sums = result.sums
        self._samples += local.samples
        self._results.append((computed, sums))
        world = sum_together({"loss": sums.loss, "metrics": sums.metrics}, self.meshes.world)
        tp = self.meshes.tp.size  # all ranks of a tp group have the same loss
        return PassResult(
            loss=world["loss"] / tp,
            metrics=dict(zip(computed.metrics, world["metrics"] / tp, strict=True)),
            log_probs=result.log_probs if log_probs else None,
            entropy=result.entropy,
            routes=result.routes,
        )

    def _begin_step(self, counts: Counts) -> None:
        self.training.state.step += 1
        self._counts = counts
        self.training.gradients.begin_step(self._totals(counts))

    def _totals(self, counts: Counts) -> Totals:
        return Totals(sum(counts.divisors.values()), counts.tokens, counts.samples, counts.flops)

    def _run(
        self,
        local: DataRankBatch,
        objective: Objective,
        divisor: Tensor,
        log_probs: bool,
        routes: bool,
        backward: bool = True,
    ) -> _CallResult:
        """Run the microbatches of a call, as many at a time as the recipe's step has; return their sums and results.

        The sums are this rank's alone; the results are gathered for this data rank's samples.

        Args:
            local: this data rank's microbatches.
            objective: what is computed from the head's output.
            divisor: count that the loss is divided by, over all ranks, a scalar.
            log_probs: whether to gather log-probabilities, and inside `_head_options(entropy=True)` entropies.
            routes: whether to gather the experts that routers choose.
            backward: whether to compute gradients, and add them to `.grad`.
        """
        training, most = self.training, self.training.loader.microbatches
        computed = WithLogProbs(objective) if log_probs else objective
        total: PassSums | None = None
        recorded: list[tuple[Tensor, Tensor | None]] = []
        chosen: list[Tensor] = []
        for first in range(0, len(local.microbatches), most):
            batches = local.microbatches[first : first + most]
            slices = training.slicer.slices(batches)
            if routes:
                slices = [self._with_routes(one) for one in slices]
                chosen += [one.tokens.routes_TNK for one in slices]
            if isinstance(objective, OfLogProbs):
                objective.batches = {id(one): batch for one, batch in zip(slices, batches, strict=True)}
            if self._results or first:
                training.gradients.begin_pass()
            sums = training.gradients.add(slices, computed, divisor, backward)
            if log_probs:
                recorded += [computed.recorded[id(one)] for one in slices if id(one) in computed.recorded]
                computed.recorded.clear()
            total = sums if total is None else _add(total, sums)
        where = self.meshes, training.slicer.placement
        routed = local.gather_routes(chosen, *where) if routes else None
        if not log_probs:
            return _CallResult(total, None, None, routed)
        log_probs_NL = local.gather([log_p_BS for log_p_BS, _ in recorded], *where, self.device).to(self.wide)
        entropy_NL = None
        if self._entropy:
            entropy_NL = local.gather([entropy_BS for _, entropy_BS in recorded], *where, self.device).to(self.wide)
        return _CallResult(total, log_probs_NL, entropy_NL, routed)

    @contextmanager
    def _head_options(self, temperature: float, entropy: bool = False) -> Iterator[None]:
        """Make the head divide logits by a temperature inside the context, and return entropies if asked for.

        Raises:
            ConfigError: the temperature is not above 0, or the head can do neither, because training.objective reads a
                teacher's top-k ids.
        """
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature = {temperature} divides the logits: give more than 0, or 1 for none")
        name = self.config.training.objective
        changed = temperature != 1 or entropy or self.ids < self.config.model.vocab_size
        if changed and OBJECTIVES.look_up(name).teacher_top_k(self.config)[0]:
            raise ConfigError(
                f'the head of objective "{name}" returns neither entropies nor a loss with a temperature or fewer ids'
            )
        heads = [stage.head for stage in self.training.stages if isinstance(stage.head, Head)]
        before = [(head.loss_temperature, head.with_entropy) for head in heads]
        for head in heads:
            head.loss_temperature, head.with_entropy = temperature, head.with_entropy or entropy
        self._entropy = entropy
        try:
            yield
        finally:
            for head, options in zip(heads, before, strict=True):
                head.loss_temperature, head.with_entropy = options
            self._entropy = False

    def _with_routes(self, batch_slice: BatchSlice) -> BatchSlice:
        """Return the slice with `tokens.routes_TNK`, a tensor of NO_EXPERT in which routers write what they choose."""
        model, tokens = self.config.model, batch_slice.tokens
        shape = len(tokens.index_T), moe_layers(model), model.top_k
        routes_TNK = torch.full(shape, NO_EXPERT, dtype=torch.int16, device=self.device)
        return batch_slice._replace(tokens=tokens._replace(routes_TNK=routes_TNK))

    def optim_step(self, rate: float | None = None) -> dict[str, Any]:
        """Sum the step's gradients over the ranks, clip them and update the weights; return the step's metrics by name.

        With optimizer.skip_spikes a step with a spike, or with a number that is not finite, makes no update.

        Args:
            rate: learning rate; None for the recipe's schedule.

        Raises:
            ConfigError: without a `forward_backward` call since the last step.
            NumericalFault: on all ranks, if the loss or the gradient norm is not finite; with optimizer.skip_spikes
                only after skip_limit skipped steps in a row.
        """
        if self._counts is None:
            raise ConfigError("there are no gradients: call forward_backward before optim_step")
        training, counts = self.training, self._counts
        by_name: dict[str, Tensor] = {}
        for objective, sums in self._results:
            for name, value in zip(objective.metrics, sums.metrics, strict=True):
                by_name[name] = by_name.get(name, 0) + value
        metrics = torch.stack([*by_name.values()]) if by_name else self._results[0][1].metrics
        total = reduce(_add, (replace(sums, metrics=metrics) for _, sums in self._results))
        constant = sum({id(objective): objective.constant for objective, _ in self._results}.values())
        totals = self._totals(counts)
        # Rewards move the loss of a function.
        training.state.skips.judges_loss = not any(isinstance(one, OfLogProbs) for one, _ in self._results)
        step = training.gradients.reduce(replace(total, metrics=metrics), totals, [*by_name], constant)
        self._counts, self._samples, self._results = None, 0, []
        rate = training.rate(training.state.step) if rate is None else rate
        return update(training, StepWork([], [], totals), step, rate)

    # ---- without gradients

    def log_probs(
        self, batch: Batch | None, *, temperature: float = 1.0, adapters: bool = True, per_data_rank: bool = False
    ) -> Tensor:
        """Return the log-probability of each label (N, L), 0 where there is none. Gradients of an open step stay.

        Args:
            batch: the samples, the same on all ranks or given on one with None on the others.
            temperature: divides the logits.
            adapters: False for the weights under LoRA's adapters, as a reference model.
            per_data_rank: whether each data rank gives samples of its own (every rank a batch, possibly empty, not
                None; the ranks of a data rank the same), and gets the results of these alone. Else every rank gets
                those of all samples.

        Raises:
            ConfigError: `temperature` is not above 0, a batch is missing, or training.objective reads a teacher's top-k
                ids, and `temperature` is not 1 or fewer ids exist than model.vocab_size.
        """
        with nullcontext() if adapters else without_adapters(self.training.stages):
            return self._forward(batch, temperature, per_data_rank, routes=False).log_probs

    def log_probs_and_routes(
        self, batch: Batch | None, *, temperature: float = 1.0, per_data_rank: bool = False
    ) -> tuple[Tensor, Routes]:
        """Return the log-probability of each label (N, L), and the routers' experts, a later batch's "routes".

        Args:
            batch: the samples, the same on all ranks or given on one with None on the others.
            temperature: divides the logits.
            per_data_rank: whether each data rank gives samples of its own (every rank a batch, possibly empty, not
                None; the ranks of a data rank the same), and gets the results of these alone. Else every rank gets
                those of all samples.

        Raises:
            ConfigError: `temperature` is not above 0, a batch is missing, or training.objective reads a teacher's top-k
                ids, and `temperature` is not 1 or fewer ids exist than model.vocab_size.
        """
        result = self._forward(batch, temperature, per_data_rank, routes=True)
        return result.log_probs, result.routes

    @torch.no_grad()
    def _forward(self, batch: Batch | None, temperature: float, per_data_rank: bool, routes: bool) -> _CallResult:
        local, objective = self._local(batch, per_data_rank), NoSum(self.meshes)
        with self._counts_set_aside(), self._head_options(temperature):
            if self._counts is None:
                self.training.gradients.begin_step(self._totals(self._count(local, "")))
            divisor = torch.ones((), dtype=torch.float64, device=self.device)
            result = self._run(local, objective, divisor, True, routes, backward=False)
        for stage in self.training.stages:
            free_gathered(stage)  # what a forward without backward leaves gathered, an update would not renew
        return result

    @contextmanager
    def _counts_set_aside(self) -> Iterator[None]:
        """Restore, when the context ends, what an open step has counted so far: the MoE layers' tokens and loads.

        Attention logits are not measured inside.
        """
        logits = self.training.gradients.logits
        measures = logits is not None and logits.measures
        balances = [moe.balance for moe in self.training.moe_layers.values()]
        buffers = [buffer for balance in balances for buffer in balance.buffers()]
        before = [buffer.clone() for buffer in buffers]
        if measures:
            logits.measures = False
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            if measures:
                logits.measures = True

    # ---- weights

    @property
    def shards(self) -> Targets:
        """This rank's shards of all weights and selection biases, adapters and frozen weights among them.

        By name: the stored tensor's name and a TensorShard, whose `tensor` is the weight itself. Not collective.
        """
        return self.training.shards

    def weights(
        self, *, ranks: Collection[int] | None = (0,), dtype: torch.dtype | None = None, merge_adapters: bool = True
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and tensor of each Hugging Face tensor of the model, in one order on all ranks.

        At most 256 MiB of tensors, or one, are on the device at a time. All ranks have to go on to the end.

        Args:
            ranks: the ranks that get the tensors; None for all. The others get None for each tensor.
            dtype: dtype of the tensors, selection biases apart; None for the weights' own.
            merge_adapters: whether to merge LoRA's adapters into their matrices; else they are left out.

        Raises:
            ConfigError: on all ranks, if transformers cannot represent the model.
        """
        yield from self._export(ranks, dtype, merge_adapters).tensors(self.shards)

    def _export(self, ranks: Collection[int] | None, dtype: torch.dtype | None, merge_adapters: bool) -> LiveExport:
        key = None if ranks is None else tuple(ranks), dtype, merge_adapters
        if key not in self._exports:
            lora = self.config.lora if merge_adapters and self.config.lora.rank else None
            try:
                carried = from_rank(self.group, 0, self.training.checkpoints.find_carried)
            except CheckpointError as error:
                raise ConfigError(str(error)) from None
            self._exports[key] = LiveExport(
                self.shards,
                self.config.model,
                merge=lora,
                ranks=ranks,
                dtype=dtype,
                carried=carried,
                seq_len=self.config.training.seq_len,
            )
        return self._exports[key]

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9) -> Path:
        """Write the model to a Hugging Face folder, with a model card, and the tokenizer if it began with one.

        LoRA's adapters are merged. Rank 0 writes the files. Returns the folder's path.

        Args:
            folder: where to write; a Hugging Face folder that exists is replaced.
            dtype: dtype of the tensors, selection biases apart; None for the weights' own.
            shard_bytes: most bytes of a safetensors file.

        Raises:
            ConfigError: on all ranks, if transformers cannot represent the model or the folder cannot be written.
        """
        folder = Path(folder)
        export, card = self._export((0,), dtype, True), model_card(self.training.checkpoints.record())
        write_hf_folder(export, self.shards, folder, shard_bytes, self.group, card)
        return folder

    def copy_weights(self, to: Session) -> None:
        """Copy all weights and selection biases to a run of the same model, under any mapping and in any dtype.

        By messages; the first call plans them. Moments are not copied.

        Args:
            to: a run in the same processes; it may lack the weights of multi-token prediction.

        Raises:
            ConfigError: on all ranks, if the other run's model differs, with names and shapes.
        """
        _, relayout = self._moves.get(id(to)) or (to, Relayout(self.shards, to.shards, leave_out=("model.mtp.",)))
        self._moves[id(to)] = to, relayout
        relayout.move(self.shards, to.shards)
        for stage in to.training.stages:
            free_gathered(stage)

    # ---- state

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint to a folder, from which any mapping can go on (checkpoint.load); return its path.

        A checkpoint that is there is replaced. It returns once all is on disk.

        Raises:
            ConfigError: on all ranks, between `forward_backward` and `optim_step`, or if it cannot be written.
        """
        if self._counts is not None:
            raise ConfigError("a step is open: call optim_step before save")
        folder = Path(folder)
        if self.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.training.checkpoints.save_to(folder, self.group)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return folder

    def close(self) -> None:
        """Leave the process groups, if `open_session` joined them. `save` has left nothing to wait for."""
        if self.owns_process_group:
            stop()


def _add(one: PassSums, other: PassSums) -> PassSums:
    return PassSums(**{name: value + getattr(other, name) for name, value in vars(one).items()})
