"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanmoe import observe
from titanmoe.checkpoint.finite import first_nonfinite
from titanmoe.checkpoint.state import persistent_buffers
from titanmoe.comm.collectives import all_reduce
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.data_laws import steps_in
from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import stage_ranks
from titanmoe.models.count import flops_per_token, parameters
from titanmoe.models.transformer import Transformer
from titanmoe.moe.balance_losses.rules import switched_on
from titanmoe.moe.dispatchers.protocol import Dispatcher, SharedBuffers
from titanmoe.moe.dispatchers.symm_mem import SymmetricBuffers
from titanmoe.moe.layer import layer_metrics, move_biases, sum_statistics
from titanmoe.observe import named
from titanmoe.parallel.apply import build, make_engine, make_meshes
from titanmoe.parallel.batch_slice import Slice, check_alike, take_slice, to_device
from titanmoe.parallel.context import placement
from titanmoe.parallel.expert import reserve_buffers
from titanmoe.parallel.norm import clip, grad_norm, local_grad
from titanmoe.parallel.tensor import sum_replicated
from titanmoe.parallel.tied import TiedEnds
from titanmoe.tokens import IGNORE
from titanmoe.train.checkpoints import Checkpoints
from titanmoe.train.checks import Checks, NumericalFault, Restore
from titanmoe.train.clock import Clock
from titanmoe.train.header import header_notes
from titanmoe.train.learning_rate import rate
from titanmoe.train.metrics import Metrics
from titanmoe.train.optimizer import Optimizer
from titanmoe.train.profile import Profiler
from titanmoe.train.run_folder import claim, command, removed_if_refused, rewind
from titanmoe.train.runtime import GarbageCollection, Runtime, say
from titanmoe.train.skips import USUAL, Skips
from titanmoe.train.validation import Validation

RESTORES = 3
"""How often a process goes back to a checkpoint because ranks differ; after that a machine is at fault."""


class NonFinite(NumericalFault):
    """Loss or gradient norm is not a finite number."""


@dataclass
class Totals:
    """Counts of a step's batch over all ranks."""

    labels: Tensor  # tokens with a loss
    tokens: Tensor  # tokens that are not padding


@dataclass
class StepScalars:
    """What the host learns of a step, between its gradients and its update."""

    loss: float
    mtp_loss: float
    stop: float
    overflowed: float
    norm: float
    tokens: float
    layers: dict[int, list[float]]
    """Of each MoE layer: rows per expert, then its `titanmoe.moe.balance.statistics`."""


@dataclass
class StepWork:
    """What a rank's forward and backward of a step are made of."""

    batches: list[Batch]
    slices: list[Slice]
    totals: Totals


class Sums(NamedTuple):
    scalars: StepScalars
    norm: Tensor
    experts: dict[int, Tensor]
    """Each MoE layer's row of statistics."""


class Trainer:
    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        loader: Callable[[Config, int, int], Loader] = Loader,
        on_gradients: Callable[[int, dict[str, nn.Parameter]], None] | None = None,
        garbage: Callable[[int], GarbageCollection] = GarbageCollection,
        optimizer: Callable[[dict[str, nn.Parameter], Options], Optimizer] = Optimizer,
        checks: Callable[[Trainer], Checks] = lambda trainer: Checks(),
        build: Callable[[Config, Meshes, int, torch.device], list[Transformer]] = build,
        reserve_buffers: Callable[[Config, Meshes, torch.device], SharedBuffers | None] = reserve_buffers,
    ):
        """loader: called with the config, the data rank and the number of data ranks. on_gradients: called with the
        step and the parameters when the gradients are summed and known to be finite, before they are clipped.
        garbage: called with training.gc_every. optimizer: called with the parameters and [optimizer]. checks: called
        with the Trainer when all else is there. build: makes this rank's parts of the model. reserve_buffers: makes
        what a step attaches to its dispatchers.
        """
        self.config, self.runtime, self.device = config, runtime, runtime.device
        self.step, self.tokens, self.overflow_reruns = 0, 0.0, 0
        self.stopping, self.wants_to_stop = False, lambda: False
        self._lock: TextIO | None = None
        self.folder: Path | None = None  # the run's, once it is claimed
        self.skips, self.passed_over = Skips(config.optimizer), steps_in(config.data.skip_steps)

        self.fold = derive(runtime.world, config.parallelism)
        self.meshes = make_meshes(self.fold, config.parallelism, config.moe, config.training, self.device)
        self.loader = loader(config, self.meshes.data.rank, self.meshes.data.size)
        microbatches = self.loader.microbatches

        self.stages = build(config, self.meshes, microbatches, self.device)
        self.engine = make_engine(self.stages, config, self.meshes, microbatches, self.device)
        self.placement = placement(config.parallelism)
        self.tied = TiedEnds(self.stages, config.model, stage_ranks(config.pipeline, self.fold.pp), self.meshes)
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.buffers = {name: b for stage in self.stages for name, b in persistent_buffers(stage).items()}
        self.moe_layers = {i: moe for stage in self.stages for i, moe in stage.moe_layers().items()}
        self.shared_buffers = reserve_buffers(config, self.meshes, self.device)

        self.optimizer, self.on_gradients = optimizer(self.parameters, config.optimizer), on_gradients
        self.validation = Validation(self) if config.validation.interval else None
        self.garbage = garbage(config.training.gc_every)
        self.clock, self.checks = Clock(self.device), checks(self)

    def train(self) -> int:
        """Train until the last step or a signal; returns the signal, or 0."""
        for _ in range(RESTORES):
            try:
                return self._train()
            except Restore:
                self.drop_gradients()
        return self._train()

    def _train(self) -> int:
        check_alike(self.loader.peek(), self.meshes, self.device)
        run = self.folder = self.claim()
        refused = removed_if_refused(self.config, run, self._lock, self.runtime.rank)
        with refused, Checkpoints(self, run) as checkpoints, ExitStack() as listening:
            notes = checkpoints.begin() | header_notes(self.config, self.fold.pp, self.loader, self.engine)
            metrics = self.metrics(run, notes)
            for observer in (self.checks, *((metrics, self.clock) if metrics.writes else ())):
                listening.enter_context(observe.listening(observer))
            profiler = Profiler(self.config.profile, run, self.runtime, all_threads=self.engine.pairs is not None)
            self.wants_to_stop = lambda: checkpoints.wants_to_stop
            first, paused = self.step + 1, {}
            if self.step >= self.config.training.steps:
                say(
                    f"nothing is left to do: the run in {run} has made {self.step} steps, and training.steps = "
                    f"{self.config.training.steps}\n"
                    f"  to go on:       {command('--training.steps')} --training.steps {2 * self.step}\n"
                    f"  to begin anew:  {command()} --checkpoint.load none   (in a folder of its own)"
                )
            try:
                while not self.ends:
                    with profiler.step(self.step + 1):
                        report = self.train_step()
                    observe.active.phase("validation" if self.validation else "checkpoint", self.step)
                    for line in self.loader.epoch_messages:
                        say(line)
                    if report:
                        report |= self.loader.report() | self.checks.report()
                        if self.validation:
                            report |= self.validation.after_step()
                            observe.active.phase("checkpoint", self.step)
                        # Before saving: a run that resumes from this step then has its line, whenever it was killed.
                        metrics.log(self.step, report | paused)
                        paused = {}
                    self.checks.after_step(saves=self.ends or checkpoints.due)
                    paused |= checkpoints.after_step()
                    observe.active.phase("other", self.step)
                    self.garbage.collect(self.step)
                    if self.step == first:
                        self.runtime.steady_timeout(self.config.training.timeout_s, checkpoints.patient)
                return checkpoints.finish()
            except NumericalFault as error:
                restores = isinstance(error, Restore) and checkpoints.has_saved
                observe.active.event(self.step, "restore" if restores else "stop", str(error))
                checkpoints.wait()
                if isinstance(error, Restore) and not restores:
                    raise NumericalFault(f"{error}. There is no checkpoint to restore") from None
                raise
            finally:
                self.loader.close()
                metrics.close()
                if self._lock:
                    self._lock.close()

    @property
    def ends(self) -> bool:
        return self.step >= self.config.training.steps or self.stopping

    def claim(self) -> Path:
        """Claims the run's folder on rank 0 and returns it on all ranks."""
        box: list[Any] = [None]
        if self.runtime.rank == 0:
            try:
                box[0], self._lock = claim(self.config)
            except ConfigError as error:
                box[0] = error
        dist.broadcast_object_list(box, 0)
        if isinstance(box[0], ConfigError):
            raise box[0]
        return box[0]

    def metrics(self, run: Path, notes: dict[str, str]) -> Metrics:
        if self.runtime.rank == 0:
            rewind(run, self.step)
        count = parameters(self.config.model)
        return Metrics(
            self.config, self.runtime, self.fold, count, self.flops_per_token, run, notes, self.step, self.clock
        )

    @property
    def dispatchers(self) -> list[Dispatcher]:
        return [moe.dispatcher for moe in self.moe_layers.values()]

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.config.model, self.config.training.seq_len)

    def train_step(self) -> dict[str, Any]:
        """What to report of the step; nothing if its batch is passed over."""
        self.step += 1
        observe.active.phase("data", self.step)
        batches = self.loader.next_step()
        if any(self.step in steps for steps in self.passed_over):
            self.skips.skipped += 1
            observe.active.event(self.step, "skip", "its batch is passed over (data.skip_steps)")
            return {}
        totals = self.count(batches)

        observe.active.phase("forward_backward", self.step)
        work = StepWork(batches, self.slices(batches), totals)
        scalars, norm, experts = self.sums(work)
        self.stopping = bool(scalars.stop)
        lr = rate(self.step, self.config)
        sigmas = self.config.optimizer.skip_spikes
        why = self.skips.why(scalars.loss, scalars.norm, sigmas or USUAL)
        if why and (again := self.checks.suspect(why, work, math.isfinite(scalars.loss + scalars.norm))):
            scalars, norm, experts = again
            why = self.skips.why(scalars.loss, scalars.norm, sigmas or USUAL)
        if why and sigmas:
            self.skip(why, batches)
            return self.report(scalars, lr)
        self.check_finite(scalars.loss, scalars.norm)
        self.skips.accept(scalars.loss, scalars.norm)
        if self.on_gradients:
            self.on_gradients(self.step, self.parameters)
        if self.config.optimizer.max_grad_norm > 0:
            clip(self.parameters.values(), norm, self.config.optimizer.max_grad_norm)
        self.optimizer.step(lr)
        move_biases(self.moe_layers, experts, self.config.model.num_experts, self.config.moe.bias_update_rate)
        self.tokens += scalars.tokens
        observe.active.updated(self.step)
        return self.report(scalars, lr)

    def sums(self, work: StepWork) -> Sums:
        """The gradients of the step, and what is known of it."""
        sums = self.gradients(work, self.shared_buffers)
        if self.shared_buffers and self.shared_buffers.were_too_small(sums.scalars.overflowed):  # the pass is void
            self.overflow_reruns += 1
            self.drop_gradients()
            sums = self.gradients(work, None)
        return sums

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def skip(self, why: str, batches: list[Batch]) -> None:
        """Make no update, and write down whose step it was."""
        self.drop_gradients()
        self.skips.skip()
        everyone: list[Any] = [None] * self.runtime.world
        dist.all_gather_object(everyone, self.loader.identify(batches))
        samples = sorted({number: digest for theirs in everyone for number, digest in theirs.items()}.items())
        text = f"no update, because of {why}; samples {samples[0][0]} to {samples[-1][0]} of the run"
        observe.active.event(self.step, "skip", text, samples=[list(sample) for sample in samples])
        self.skips.check_limit(self.step, why)

    def count(self, batches: list[Batch]) -> Totals:
        mine = [torch.stack(((b.labels_BS != IGNORE).sum(), b.valid_BS.sum())) for b in batches]
        total = to_device(torch.stack(mine).sum(0).double(), self.device)
        labels, tokens = all_reduce(total, self.meshes.data)
        return Totals(labels, tokens)

    def slices(self, batches: list[Batch]) -> list[Slice]:
        where = (self.meshes, self.placement, self.device)
        return [take_slice(batch, m, *where, self.config.model.mtp_depth > 0) for m, batch in enumerate(batches)]

    def gradients(self, work: StepWork, symmetric: SharedBuffers | None) -> Sums:
        """Sums the gradients of the step. What the host has to know of it comes in one transfer, the only one of the
        Trainer in a step; the norm and each MoE layer's row of statistics are returned as tensors too.
        """
        observe.active.phase("forward_backward", self.step)
        own, sums = self.forward_backward(work.slices, work.totals, symmetric)
        self.finish_gradients()
        observe.active.gradients(work, own)
        observe.active.phase("optimizer", self.step)
        norm = grad_norm(self.parameters, self.meshes.world, self.tied.names)
        blocks = moe_blocks(self.config.model)
        experts = sum_statistics(self.moe_layers, blocks, self.config, self.meshes.world, self.device)
        loss, mtp_loss, stop, overflowed, norm_now, tokens, *rest = torch.cat(
            (sums.double(), torch.stack((norm.double(), work.totals.tokens)), experts.flatten())
        ).tolist()
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        loss, mtp_loss = loss / self.meshes.tp.size, mtp_loss / self.meshes.tp.size
        width = experts.shape[1]
        layers = {number: rest[i * width : (i + 1) * width] for i, number in enumerate(blocks)}
        scalars = StepScalars(loss, mtp_loss, stop, overflowed, norm_now, tokens, layers)
        return Sums(scalars, norm, dict(zip(blocks, experts, strict=True)))

    @named("forward backward")
    def forward_backward(
        self, slices: list[Slice], totals: Totals, symmetric: SharedBuffers | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's losses. And summed over all, in one message: the losses, whether any rank wants to stop, and
        whether a receive buffer was too small.

        symmetric: what to attach to the layers' dispatchers, which are exact without it.
        """
        layers = self.moe_layers.values()
        for moe in layers:
            moe.begin_step(self.step, totals.tokens, self.loader.global_batch_size)
        # The only division: sums over labels by their global count. Every reduction is a sum.
        labels = totals.labels.clamp(min=1)
        with symmetric.attach(self.dispatchers) if symmetric else nullcontext():
            loss = self.engine.run(slices, labels)
        mtp_loss = sum(
            (mtp.loss_M.sum() / labels for stage in self.stages for mtp in stage.mtp or ()), loss.new_zeros(())
        )
        stop = torch.full_like(loss, self.wants_to_stop())
        overflowed = symmetric.overflowed.to(loss.dtype) if symmetric else torch.zeros_like(loss)
        mine = torch.stack((loss, mtp_loss, stop, overflowed))
        return mine[:2], all_reduce(mine, self.meshes.world)

    @named("finish gradients")
    def finish_gradients(self) -> None:
        """Sums the gradients that FSDP does not: those of replicated parameters and of copies of the embedding."""
        sum_replicated(self.parameters.values(), (self.meshes.sequence, self.meshes.data), self.meshes.tp)
        self.tied.add_gradients()

    def check_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        grads = first_nonfinite({name: local_grad(p) for name, p in self.parameters.items()})
        weights = first_nonfinite(self.optimizer.local_shards | self.buffers)
        names: list[Any] = [None] * self.runtime.world
        dist.all_gather_object(names, (grads, weights))
        grads = next((name for name, _ in names if name), "")
        culprit = f"first parameter with a non-finite gradient: {grads}" if grads else "all gradients are finite"
        rank, weights = next(((rank, name) for rank, (_, name) in enumerate(names) if name), (0, ""))
        before = f"The weights are still those of step {self.step - 1}"
        if weights:
            before = f"The weights were already not finite after step {self.step - 1}: on rank {rank} {weights}"
        raise NonFinite(
            f"step {self.step}: loss {loss}, gradient norm {norm}; {culprit}. {before}. {self.checks.explained()}"
            "Lower optimizer.lr or raise lr_schedule.warmup_steps; moe.z_loss keeps router logits small."
        )

    def report(self, scalars: StepScalars, lr: float) -> dict[str, Any]:
        values = {"loss": scalars.loss, "grad_norm": scalars.norm, "lr": lr, "tokens": scalars.tokens}
        if self.config.model.mtp_depth:
            values["mtp_loss"] = scalars.mtp_loss
        layers = {number: layer_metrics(row, self.config) for number, row in scalars.layers.items()}
        if self.config.optimizer.skip_spikes:
            values["skipped_steps"] = self.skips.skipped
        if isinstance(self.shared_buffers, SymmetricBuffers):
            values["overflow_reruns"] = self.overflow_reruns
        if layers:
            for term in switched_on(self.config.moe):
                values[term.metric] = sum(layer[term.metric] for layer in layers.values())
            values["imbalance"] = max(layer["imbalance"] for layer in layers.values())
            for name in ("router_entropy", "dropped_fraction"):
                values[name] = sum(layer[name] for layer in layers.values()) / len(layers)
        for number, layer in layers.items():
            values |= {f"layers.{number}.{name}": value for name, value in layer.items()}
        return values
