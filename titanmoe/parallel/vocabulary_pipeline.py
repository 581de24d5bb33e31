"""Run embedding and head over all stages of a pipeline: [parallelism] vocab = "pipeline" (arXiv 2411.05288).

Both layers are sharded over pp and tp together (titanmoe.models.vocabulary_shards). All ranks run the passes E, H, S,
L, T and D where titanmoe.fold.vocabulary_passes, which describes them, has put them into the schedule's table. A pass
starts a message, over pp or (S) pp x tp, and a later one waits for it. Multi-token prediction adds a second message to
E and D, for the embeddings of the next tokens; tensors that have both have 2 B samples, first those of the tokens.

Shapes: N numbers of the head for each label, B samples, S positions of the attention slice, s owned positions, T tokens
(B * S), D model, R ranks of pp x tp, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe import observe
from titanmoe.comm.collectives import launch_all_gather, launch_broadcast, launch_reduce, wait
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import PASSES, Cell
from titanmoe.models.logit_slices import merge_statistics
from titanmoe.models.transformer import MultiToken
from titanmoe.models.vocabulary_shards import VocabularyShards
from titanmoe.observe import region
from titanmoe.parallel.batch_slice import BatchSlice, MicrobatchLoss
from titanmoe.tokens import IGNORE

TorchAction = torch_schedules._Action
Pass = Enum("Pass", {name: name for name in PASSES}, type=str)
"""The kinds of passes, which torch's table has beside its own kinds of actions."""


def with_passes(
    table: Mapping[int, Sequence[TorchAction]], rows: Sequence[Sequence[Cell]]
) -> dict[int, list[TorchAction]]:
    """Return torch's table of actions with the passes, each after the messages of the action before it.

    A receive is between the same passes as the send, else a rank whose messages run one after the other would wait for
    it with a pass still to come on the other rank.

    Args:
        table: the actions of each pipeline rank, with sends, receives and what FSDP does.
        rows: the forwards, backwards and passes of each pipeline rank.
    """
    passes = [action for (action,) in rows[0] if action.does in PASSES]
    passes_before = {}
    """Number of passes before a forward or backward."""
    for row in rows:
        number = 0
        for (action,) in row:
            number += action.does in PASSES
            passes_before[str(action)] = number
    out = {}
    for rank, actions in table.items():
        number = 0
        keyed = [(i, 1, TorchAction(one.stage, Pass(one.does), one.microbatch)) for i, one in enumerate(passes)]
        for action in actions:
            stage, kind, m, _ = action
            sender = {"RECV_F": f"{stage - 1}F{m}", "RECV_B": f"{stage + 1}B{m}"}.get(kind.value)
            number = passes_before.get(str(action), number)
            keyed.append((passes_before[sender] if sender else number, 0, action))
        out[rank] = [action for _, _, action in sorted(keyed, key=lambda one: one[:2])]
    return out


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives `y` a gradient that is known already."""

    @staticmethod
    def forward(ctx, y, grad):
        ctx.save_for_backward(grad)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


class VocabularyPasses:
    """The passes of a rank in one step, and the tensors that they exchange with its stages.

    A pass is an action of its own in the table of torch's runtime, because a rank that blocked in a message next to a
    forward or backward might owe another rank its output.
    """

    def __init__(
        self,
        shards: VocabularyShards,
        ranks: Sequence[int],
        meshes: Meshes,
        hidden: Tensor,
        multi_token: Sequence[MultiToken],
        computing: Callable[[], AbstractContextManager[None]],
    ):
        """Keep what the passes of all steps need.

        Args:
            shards: this rank's rows of the embedding and the head.
            ranks: the pipeline rank of each stage.
            hidden: a meta tensor with the shape and dtype of a microbatch's hidden states on this rank.
            multi_token: multi-token prediction, on ranks of the last stage.
            computing: returns a context that tells observers that this rank does not wait for other stages.
        """
        self.shards, self.pp, self.pp_tp, self.hidden = shards, meshes.stages, meshes.vocabulary, hidden
        self.multi_token, self.computing, self.first, self.last = multi_token, computing, ranks[0], ranks[-1]
        self.is_first, self.is_last = self.pp.rank == self.first, self.pp.rank == self.last
        self.trains_embedding = shards.embed.weight.requires_grad
        self.functions = {
            Pass.E: self._embed,
            Pass.H: self._send_hidden,
            Pass.S: self._statistics,
            Pass.L: self._loss,
            Pass.T: self._gradients,
            Pass.D: self._embedding_gradient,
        }
        self.losses: list[Tensor] = []
        """Loss of each microbatch so far on ranks of the last stage."""
        # What passes hand to later ones or to the stages, by microbatch.
        self.summands: dict[int, Tensor] = {}
        """This rank's summand of the embeddings, until its backward."""
        self.inputs: dict[int, Callable[[], Tensor]] = {}
        """Functions that wait for the embeddings, the input of the first stage."""
        self.next_inputs: dict[int, Callable[[], Tensor]] = {}
        """Functions that wait for the embeddings of the next tokens, an input of the last stage."""
        self.outputs: dict[int, Tensor] = {}
        """Normed hidden states, the output of the last stage."""
        self.hidden_states: dict[int, Tensor] = {}
        """Hidden states of the last stage, being broadcast to all ranks."""
        self.scored: dict[int, tuple[Tensor, Tensor]] = {}
        """Hidden states, and statistics of this rank's logits, until their backward."""
        self.statistics: dict[int, Tensor] = {}
        """Statistics of all ranks, being gathered."""
        self.token_grads: dict[int, Tensor] = {}
        """Inputs of the backward of the statistics, being broadcast from the last stage."""
        self.output_grads: dict[int, Callable[[], Tensor]] = {}
        """Functions that wait for the gradients of the last stage's outputs."""
        self.input_grads: dict[int, Tensor] = {}
        """Gradients of the first stage's inputs."""
        self.next_grads: dict[int, Tensor] = {}
        """Gradients of the embeddings of the next tokens, on the last stage."""
        self.embedding_grads: dict[int, list[Tensor]] = {}
        """Gradients of the embeddings, being broadcast to all ranks."""
        self.by_microbatch = (
            *(self.summands, self.inputs, self.next_inputs, self.outputs, self.hidden_states, self.scored),
            *(self.statistics, self.token_grads, self.output_grads, self.input_grads, self.next_grads),
            self.embedding_grads,
        )
        self.readers = (self.first, self.inputs, self.input_grads), (self.last, self.next_inputs, self.next_grads)
        """Pipeline ranks that read embeddings, with what they get and what they return."""

    @contextmanager
    def step(self, slices: Sequence[BatchSlice], microbatch_loss: MicrobatchLoss, backward: bool) -> Iterator[None]:
        """Run passes within this context, for a step. Afterwards `losses` has each microbatch's on the last stage.

        The step's last backward sums the gradients over data ranks: the embedding's, when the context ends, or the last
        pass T if the embedding is frozen. Collective over the data ranks.

        Args:
            microbatch_loss: returns a microbatch's loss, from the head's numbers (N, B, S) and its slice.
            backward: whether backward passes follow; if not, no gradients are computed.
        """
        self.slices, self.microbatch_loss, self.backward = slices, microbatch_loss, backward
        self.device = slices[0].ids_BS.device
        self.predictions = 1 + self.shards.shape.mtp_depth * backward
        """Number of labels of each position: 2 in training with multi-token prediction."""
        self.losses = []
        self.backwards_left = len(slices) * (1 + self.trains_embedding)
        self.shards.unshard()
        try:
            yield
            for sent in (self.inputs, self.next_inputs, self.output_grads):
                self._finish(sent)
            self._embedding_backward()
            self.shards.reshard()
        finally:
            for tensors in self.by_microbatch:
                tensors.clear()

    def __call__(self, action: TorchAction, context: Any) -> None:
        """Run a pass. Called by torch's runtime within `step`; collective over pp and tp.

        Args:
            action: the action of the table, whose kind is one of `Pass`.
        """
        with self.computing(), region("head and loss"):
            self.functions[action.computation_type](action.microbatch_index)

    def _empty(self, predictions: int = 1) -> Tensor:
        """Return uninitialized hidden states of a microbatch, for one prediction of each position or more."""
        B, *rest = self.hidden.shape
        return torch.empty(predictions * B, *rest, dtype=self.hidden.dtype, device=self.device)

    def _labels(self, m: int) -> Tensor:
        batch_slice = self.slices[m]
        return torch.cat((batch_slice.labels_BS, batch_slice.tokens.later_BS)[: self.predictions])

    def _embed(self, m: int) -> None:
        for reader, inputs, _ in self.readers:
            if self.pp.rank != reader:
                self._finish(inputs)
        ids_BS, tokens = self.slices[m].ids_BS, self.slices[m].tokens
        summand_BsD = self.shards(torch.cat((ids_BS, tokens.next_BS)[: self.predictions]), tokens)
        for (reader, inputs, _), part_BsD in zip(self.readers, summand_BsD.detach().split(len(ids_BS)), strict=False):
            inputs[m] = launch_reduce(part_BsD.clone(), reader, self.pp)
        if self.backward and self.trains_embedding:
            self.summands[m] = summand_BsD
            summand_BsD.untyped_storage().resize_(0)  # its backward needs no values

    def _finish(self, sent: dict[int, Callable[[], Tensor]]) -> None:
        """Wait for sums that another rank gets, so that their memory is freed."""
        while sent:
            sent.popitem()[1]()

    def _send_hidden(self, m: int) -> None:
        x_BsD = self.outputs.pop(m).detach() if self.is_last else self._empty(self.predictions)
        self.hidden_states[m] = launch_broadcast(x_BsD, self.last, self.pp)

    def _statistics(self, m: int) -> None:
        x_BsD = wait(self.hidden_states.pop(m), self.pp).requires_grad_(self.backward)
        statistics_KT = self.shards(x_BsD, self.slices[m].tokens, self._labels(m))
        self.scored[m] = x_BsD, statistics_KT
        self.statistics[m] = launch_all_gather(statistics_KT.detach(), self.pp_tp)

    def _loss(self, m: int) -> None:
        batch_slice, numbers_KT = self.slices[m], torch.zeros_like(self.scored[m][1])
        if self.is_last:
            statistics_RKT = wait(self.statistics.pop(m), self.pp_tp).unflatten(0, (-1, len(numbers_KT)))
            has_label_BS = self._labels(m) != IGNORE
            log_total_T, *values = merge_statistics(statistics_RKT, has_label_BS.flatten())
            output_NBS = torch.stack([x_T.view_as(has_label_BS) for x_T in values if x_T is not None])
            own_NBS, *others_NBS = output_NBS.requires_grad_(self.backward).split(len(batch_slice.labels_BS), 1)
            for mtp, (loss_BS, *_) in zip(self.multi_token, others_NBS, strict=False):
                own_NBS = mtp.add_loss(own_NBS, loss_BS, batch_slice.tokens.microbatch)
            loss = self.microbatch_loss(own_NBS, batch_slice)
            self.losses.append(loss.detach())
            if self.backward:
                # A loss without a gradient is that of a pass that is forward only, whose kernels are loaded.
                grad_NBS = torch.autograd.grad(loss, output_NBS)[0] if loss.requires_grad else output_NBS.detach()
                grads = (grad_NBS * has_label_BS).flatten(1)
                entropy = [values[1], grads[1]] if len(grads) > 1 else []
                numbers_KT[: 2 + len(entropy)] = torch.stack([log_total_T, grads[0], *entropy])
        if self.backward:
            self.token_grads[m] = launch_broadcast(numbers_KT, self.last, self.pp)

    def _gradients(self, m: int) -> None:
        x_BsD, statistics_KT = self.scored.pop(m)
        if not self.is_last:
            wait(self.statistics.pop(m), self.pp_tp)
            self._finish(self.output_grads)
        if self.backward:
            self._run_backward(statistics_KT, wait(self.token_grads.pop(m), self.pp))
            self.output_grads[m] = launch_reduce(x_BsD.grad.contiguous(), self.last, self.pp)

    def _embedding_gradient(self, m: int) -> None:
        if not self.trains_embedding:
            return
        self._embedding_backward()
        self.embedding_grads[m] = [
            launch_broadcast(grads.pop(m) if self.pp.rank == reader else self._empty(), reader, self.pp)
            for reader, _, grads in self.readers[: self.predictions]
        ]

    def _embedding_backward(self) -> None:
        """Run the backward of the embedding for the microbatch whose gradient was sent last, if any."""
        while self.embedding_grads:
            m, sent = self.embedding_grads.popitem()
            grads = [wait(grad_BsD, self.pp) for grad_BsD in sent]
            self._run_backward(self.summands.pop(m), grads[0] if len(grads) == 1 else torch.cat(grads))

    def _run_backward(self, output: Tensor, grad: Tensor) -> None:
        """Add the gradients of this rank's rows to the step's; in the step's last backward FSDP sums them over ranks.

        Args:
            output: output of this rank's rows, with its graph.
            grad: gradient of `output`.
        """
        self.backwards_left -= 1
        is_last = self.backwards_left == 0
        self.shards.set_is_last_backward(is_last)
        self.shards.set_reshard_after_backward(is_last)
        self.shards.set_requires_gradient_sync(is_last)
        output.backward(grad)

    def warm_up(self, batch_slice: BatchSlice, microbatch_loss: MicrobatchLoss) -> None:
        """Load all kernels of the passes (titanmoe.parallel.warm_up), and leave gradients as they are.

        Collective over pp and tp and, as its backward is a step's last one, over the data ranks.

        Args:
            microbatch_loss: returns a microbatch's loss, from the head's numbers (N, B, S) and its slice.
        """
        grads = {parameter: parameter.grad for parameter in self.shards.parameters()}
        for parameter in grads:
            parameter.grad = None
        with observe.unheard(), torch.enable_grad(), self.step([batch_slice], microbatch_loss, True):
            self.outputs[0] = self._empty(self.predictions).zero_()
            self.input_grads[0] = self.next_grads[0] = self._empty().zero_()
            for run in self.functions.values():
                run(0)
        for parameter, grad in grads.items():
            parameter.grad = grad

    def input_of(self, m: int) -> Tensor:
        """Wait for the embeddings of a microbatch, and return them (B, s, D), the first stage's input.

        Called once per microbatch, after its pass E, on the first stage.
        """
        return self.inputs.pop(m)().requires_grad_(self.backward and self.trains_embedding)

    def next_input_of(self, m: int) -> Tensor | None:
        """Wait for and return embeddings of a microbatch's next tokens; None unless multi-token prediction is trained.

        Called once per microbatch, after its pass E, on the last stage. Backward leaves their gradient for the pass D.
        """
        if self.predictions == 1:
            return None
        next_BsD = self.next_inputs.pop(m)()
        if self.trains_embedding:  # a hook, because torch's stage takes the gradients of its inputs away
            next_BsD.requires_grad_().register_hook(partial(self.next_grads.__setitem__, m))
        return next_BsD

    def loss_of(self, m: int, output_BsD: Tensor) -> Tensor:
        """Return a scalar 0 whose backward gives the last stage's output the gradient that the pass T has computed.

        Waits for that gradient. Called once per microbatch, after its pass T, on the last stage.

        Args:
            m: index of the microbatch.
            output_BsD: output of the last stage for it, with its graph.
        """
        return _Seed.apply(output_BsD, self.output_grads.pop(m)())
