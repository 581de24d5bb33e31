"""The transformer: embedding, blocks, head. A pipeline stage is a transformer that lacks some of them.

titanmoe.parallel.apply builds it on meta and lays it on the meshes. `rope` has cos and sin of RoPE's angles for the
attention slice, (B, S, 1, rotated width) each; `tokens` is the metadata of this rank's tokens.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model, M microbatches of a step,
N values of the head for each label, K candidate ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from titanmoe import observe
from titanmoe.config.blocks import has_experts, rotary_width
from titanmoe.config.schema import Config
from titanmoe.models.families import mixers
from titanmoe.models.layers import FeedForward, Linear, RMSNorm, SharedExpert, rope_angles
from titanmoe.models.mixers.mixer_spec import MixerSpec
from titanmoe.models.vocabulary import LOSS_ONLY, Embedding, Head, HeadOptions
from titanmoe.models.vocabulary_shards import FinalNorm
from titanmoe.moe.halves import forward_in_halves
from titanmoe.moe.layer import MoE
from titanmoe.observe import region
from titanmoe.tokens import Tokens


class Block(nn.Module):
    """A block: norm and mixer, then norm and a dense network or experts, each added to the residual stream."""

    def __init__(self, config: Config, mixer: MixerSpec, layer: int, microbatches: int, dtype: torch.dtype):
        super().__init__()
        model, options, seed = config.model, config.moe, config.training.seed
        norm = model.dim, model.norm_eps, dtype, model.norm_adds_one, options.kernels
        self.attention_norm = RMSNorm(*norm)
        self.attention = mixer.build(model, layer, dtype, options.kernels)
        self.ffn_norm = RMSNorm(*norm)
        self.moe = self.ffn = None
        if has_experts(model, layer):
            shared = None
            if model.shared_hidden:
                shared = SharedExpert(model.dim, model.shared_hidden, model.shared_gate, dtype)
            self.moe = MoE(
                model, options, shared=shared, seed=seed, layer=layer, microbatches=microbatches, dtype=dtype
            )
        else:
            self.ffn = FeedForward(model.dim, model.dense_hidden, dtype)
        self.in_halves = self.moe is not None and options.overlap == "halves"

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        """Return the residual stream (B, s, D) after the block, for the tokens that this rank owns.

        With moe.overlap = "halves", experts and two samples or more, the mixer takes the samples in two halves.
        Collective over the groups of the mixer, of the experts and, in training, of the balance losses.
        """
        if not self.in_halves or len(x_BsD) < 2:
            return self.feed(self.attend(x_BsD, rope, tokens), tokens)
        halves = zip(*(x.split(-(-len(x) // 2)) for x in (x_BsD, *rope)), tokens.halves(), strict=True)
        first, second = (partial(self.attend, x_BsD, rope, half) for x_BsD, *rope, half in halves)
        return self.feed(first(), tokens, second)

    # Both are methods so that recomputation can wrap either of them.
    def attend(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        """Return the residual stream x + mixer(norm(x)), (B, s, D). Collective over tp and cp.

        `tokens` is the metadata of x's tokens, which may be half of the samples; its mask is used.
        """
        y_BsD = self.attention_norm(x_BsD)
        with region("attention"):
            y_BsD = self.attention(y_BsD, rope, tokens.mask)
        return x_BsD + y_BsD

    def feed(self, x_BsD: Tensor, tokens: Tokens, attend: Callable[[], Tensor] | None = None) -> Tensor:
        """Return the residual stream of all samples, (B, s, D), after the norm and the dense network or the experts.

        Collective over tp; with experts over ep, etp and the balance losses' groups too, and with `attend` over cp.

        Args:
            x_BsD: the residual stream after the mixer, of the first half of the samples if there is `attend`.
            tokens: metadata of the tokens of all samples.
            attend: runs the mixer on the second half of the samples, and returns the residual stream after it
                (titanmoe.moe.halves); None to take all samples at once.
        """
        if attend is not None:
            return forward_in_halves(self.moe, self.ffn_norm, x_BsD, attend, tokens)
        y_BsD = self.ffn_norm(x_BsD)
        with region("dense FFN" if self.moe is None else "MoE layer"):
            y_BsD = self.ffn(y_BsD) if self.moe is None else self.moe(y_BsD, tokens)
        return x_BsD + y_BsD


class _AddGradient(torch.autograd.Function):
    """An identity on the head's output (N, B, S), whose backward gives `other_loss_BS` the gradient of output[0]."""

    @staticmethod
    def forward(ctx, output_NBS, other_loss_BS):
        return output_NBS.clone()  # on a view, FSDP would lose its hooks

    @staticmethod
    def backward(ctx, grad_NBS):
        return grad_NBS, grad_NBS[0]


class MultiToken(nn.Module):
    """Multi-token prediction (arXiv 2412.19437, section 2.2): an extra block that predicts the token after next.

    At position i it sees the hidden state of i, before the final norm or after it (`model.mtp_after_norm`), and the
    embedding of token i + 1; its output goes through the model's own head. In the published checkpoints the embedding
    comes first in `project`'s columns. It is trained along with the model: its cross-entropy, times
    training.mtp_weight, adds its gradient to that of the loss.
    """

    def __init__(self, config: Config, block: nn.Module, microbatches: int, dtype: torch.dtype):
        super().__init__()
        model, dim = config.model, config.model.dim
        norm = dim, model.norm_eps, dtype, model.norm_adds_one, config.moe.kernels
        self.hidden_norm = RMSNorm(*norm)
        self.embed_norm = RMSNorm(*norm)
        self.project = Linear(2 * dim, dim, dtype=dtype)
        self.block = block
        self.norm = RMSNorm(*norm)
        self.weight = config.training.mtp_weight
        # Indexed by microbatch, whatever order a schedule runs them in; this rank's sums over labels.
        self.register_buffer("loss_M", torch.zeros(microbatches, dtype=torch.float64), persistent=False)

    def forward(self, x_BsD: Tensor, next_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        """Return the normed hidden states (B, s, D) that predict the token after next. Collective as its block is.

        Args:
            x_BsD: hidden states of the last layer; with model.mtp_after_norm, after the final norm.
            next_BsD: embeddings of the next tokens.
        """
        both = torch.cat((self.embed_norm(next_BsD), self.hidden_norm(x_BsD)), -1)
        return self.norm(self.block(self.project(both), rope, tokens))

    def add_loss(self, output_NBS: Tensor, mtp_loss_BS: Tensor, microbatch: Tensor) -> Tensor:
        """Return the head's output unchanged, but let its backward train multi-token prediction as well.

        Its losses are multiplied by training.mtp_weight and get the gradient of the loss, output_NBS[0]. Their sum, not
        multiplied, is written into `loss_M`, at the index `microbatch`, a scalar.

        Args:
            output_NBS: the head's output, of which the first is the loss.
            mtp_loss_BS: cross-entropy of multi-token prediction at each position.
        """
        with torch.no_grad():
            self.loss_M.index_copy_(0, microbatch.view(1), mtp_loss_BS.sum().view(1).to(torch.float64))
        return _AddGradient.apply(output_NBS, self.weight * mtp_loss_BS)


class Transformer(nn.Module):
    """A transformer, or one pipeline stage of it."""

    summed_over: dict[str, str]
    """The ranks that sum the gradient of each replicated parameter, by name: "tp", "etp" or "stage".

    Set where the stage is distributed over ranks (titanmoe.parallel.parallel_plan).
    """

    def __init__(
        self,
        config: Config,
        microbatches: int,
        dtype: torch.dtype,
        *,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
        head_options: HeadOptions = LOSS_ONLY,
    ):
        """Build a stage on the current device, which is meta in training. Its parameters have no values yet.

        Ties head and embedding if the model does. A last stage with multi-token prediction has a copy of the embedding,
        unless it is the first too or all stages share the embedding.

        Args:
            config: the recipe.
            microbatches: number of microbatches in a step.
            dtype: of the stored parameters.
            layers: numbers of the stage's layers; None for all.
            first: whether the stage begins with the embedding, unless all stages share it.
            last: whether the stage ends with multi-token prediction, if any, and the head, or its norm alone if all
                stages share the head.
            head_options: what the head returns.
        """
        super().__init__()
        self.shape, self.dtype = config.model, dtype
        model = config.model
        of_blocks = mixers(model)

        def block(layer: int) -> Block:
            return Block(config, of_blocks[layer], layer, microbatches, dtype)

        shared = config.parallelism.vocab == "pipeline"
        self.embed = Embedding(model.vocab_size, model.dim, dtype) if first and not shared else None
        # Keyed by the layer's global number, so that names do not depend on the stage.
        self.layers = nn.ModuleDict({str(i): block(i) for i in (range(model.num_layers) if layers is None else layers)})
        chunks, kernels = config.training.loss_chunks, config.moe.kernels
        self.head = Head(model, chunks=chunks, dtype=dtype, kernels=kernels, options=head_options) if last else None
        if last and shared:
            self.head = FinalNorm(self.head.norm)
        self.mtp = self.embed_copy = None
        if last and model.mtp_depth:
            self.mtp = nn.ModuleList([MultiToken(config, block(model.num_layers), microbatches, dtype)])
            if not first and not shared:
                self.embed_copy = Embedding(model.vocab_size, model.dim, dtype)
        self.tie()

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        labels_BS: Tensor | None = None,
        candidates_BSK: Tensor | None = None,
        next_BsD: Tensor | None = None,
    ) -> Tensor:
        """Return the stage's output: hidden states (B, s, D), HeadOutput (N, B, S), or logits without labels.

        Collective over the groups of its layers. If all stages share the head, the last one returns normed hidden
        states (B, s, D), in training with those of multi-token prediction behind them, (2 B, s, D). Else, in training,
        multi-token prediction writes its loss to its `loss_M`, and trains by the output's backward.

        Args:
            x: ids (B, S) if the stage has the embedding, else hidden states (B, s, D) of the stage before, or
                embeddings.
            labels_BS: ids to predict, IGNORE where there is none.
            candidates_BSK: ids whose log-probabilities the HeadOutput has.
            next_BsD: embeddings of the next tokens for multi-token prediction, if all stages share the embedding.
        """
        with_mtp = self.mtp is not None and labels_BS is not None and torch.is_grad_enabled()
        if self.embed is not None and with_mtp:  # in one call, because each call gathers the weights
            x, next_BsD = self.embed(torch.cat((x, tokens.next_BS))).chunk(2)
        elif self.embed is not None:
            x = self.embed(x)
        elif with_mtp and self.embed_copy is not None:
            next_BsD = self.embed_copy(tokens.next_BS)
        rope = rope_angles(tokens.position_BS, self.shape, rotary_width(self.shape), x.dtype)
        for number, block in self.layers.items():
            observe.active.layer(int(number))
            x = block(x, rope, tokens)
            if x.requires_grad and observe.active is not observe.NOBODY:
                x.register_hook(partial(_note_backward, int(number)))
        if self.head is None:
            return x
        if not with_mtp:
            with region("head and loss"):
                return self.head(x, labels_BS, candidates_BSK=candidates_BSK)
        (mtp,) = self.mtp
        inputs = {"next_BsD": next_BsD, "rope": rope, "tokens": tokens}
        mtp_hidden = partial(mtp, **inputs) if self.shape.mtp_after_norm else mtp(x, **inputs)
        with region("head and loss"):
            output = self.head(x, labels_BS, (mtp_hidden, tokens.later_BS))
        return output if isinstance(self.head, FinalNorm) else mtp.add_loss(*output, tokens.microbatch)

    def tie(self) -> None:
        """Make embedding and head one parameter, if the model ties them and this stage has both."""
        if self.shape.tie_embeddings and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def blocks(self) -> dict[int, Block]:
        """Return the stage's blocks by number: layers from 0, and after the last that of multi-token prediction."""
        blocks = {int(i): block for i, block in self.layers.items()}
        return blocks if self.mtp is None else blocks | {self.shape.num_layers: self.mtp[0].block}

    def moe_layers(self) -> dict[int, MoE]:
        """Return the stage's MoE layers by the number of their block in the model.

        With that of multi-token prediction on the last stage, whose number is model.num_layers.
        """
        return {i: block.moe for i, block in self.blocks().items() if block.moe is not None}


def _note_backward(number: int, _: Tensor) -> None:
    """Note that the backward pass has reached the end of the block with this number. A hook of its output."""
    observe.active.layer(number)
