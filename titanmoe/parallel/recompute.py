"""Activation recomputation: choose what is dropped after forward and recomputed in backward.

A checkpointed region is a call of which torch.utils.checkpoint saves the inputs alone; backward recomputes it up to the
last tensor that autograd saved in it. These methods of a block are checkpointed regions:

    mode                    attend    feed      products of the experts
    moe                               region
    full                    region    region
    full_except_dispatch    region    region    region, its inputs saved outside of feed
    selective               none, but parts of them: below

`feed` has norm, router, dispatch, the experts and combine. What dispatch and combine save is small and saved outside of
the region. So the last tensors that `feed` saves are gate and up, and recomputation ends there: routed tokens are sent
a second time, but neither multiplied by the down projection nor sent back. Where products are a region of their own,
whose inputs, the routed tokens that arrived, are saved outside of `feed`, the last tensors that `feed` saves are the
router's or the shared expert's, and nothing is dispatched a second time. Of other messages only those of `attend`, over
tp and cp, and those of a shared expert, over tp, are sent twice, and the host never waits a second time:
titanmoe.comm.recomputation.

In a MoE layer that is compiled as one graph, which has its routed tokens saved, the products are a region inside the
graph, and `feed` is none: of the rest the compiler saves what is small.

`selective` recomputes what takes little time for its memory. The modules list it (titanmoe.models.layers):

    FeedForward         of dense layers and shared experts: `down` is a region, of the activation, which is the input of
                        the down projection
    LatentAttention     by `use_recomputable`: queries, keys and values of all heads, from the latents
    GatedDelta          by `use_recomputable`: queries, keys and values, by the convolution; `convolve` and `down` are
                        regions, of what the convolution saves, and of the gated norm before the last projection

Norms only save their input. No collective runs twice, and the only matrix products that do are those of the latents.

Every mode recomputes the activation of routed experts: `titanmoe.moe.expert_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titanmoe import observe
from titanmoe.comm.recomputation import cached_tensor, leave_checkpointed_region, recomputing, region_contexts
from titanmoe.config.schema import ActivationCheckpoint
from titanmoe.models.transformer import Block, Transformer
from titanmoe.moe.layer import MoE
from titanmoe.tokens import Tokens

Remember = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that computes what the given one would compute now, when it is called later."""


def _remember_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# Randomness is counted, so there is no generator state to restore.
_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _checkpoint_method(owner: nn.Module, name: str, remember: Remember = _remember_nothing) -> None:
    """Make a method of this module a checkpointed region, in place: backward calls it a second time, messages too.

    Args:
        owner: the module.
        name: the method's name.
        remember: wraps the method in each forward, so that its second call computes what the first one did, although
            state outside of its arguments has changed.
    """
    plain = getattr(owner, name)

    def run(*args: Any) -> Any:
        return _checkpointed(plain if torch.compiler.is_compiling() else remember(plain), *args)

    setattr(owner, name, run)


def _checkpoint_feed(block: Block) -> None:
    plain = block.feed

    def run(x_BsD: Tensor, tokens: Tokens, attend: Callable[[], Tensor] | None = None) -> Tensor:
        if attend is not None:  # attention of a second half is not recomputed here
            attend = partial(cached_tensor, attend)
        return _checkpointed(plain, x_BsD, tokens, attend, context_fn=region_contexts)

    block.feed = run


def _checkpoint_products(moe: MoE) -> None:
    plain = moe.experts.products

    def run(*routed: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _checkpointed(plain, *routed)
        with leave_checkpointed_region():
            return _checkpointed(plain, *routed, context_fn=region_contexts)

    moe.experts.products = run


def _dispatch_once(moe: MoE) -> None:
    """Exclude a layer's dispatch from the checkpointed region around it, in place.

    Backward, which recomputes the region, sends no routed tokens then.
    """
    plain = moe.dispatcher.dispatch

    def run(*inputs: Any) -> Any:
        if recomputing():
            return _NotDispatched()
        with leave_checkpointed_region():
            return plain(*inputs)

    moe.dispatcher.dispatch = run


class _NotDispatched:
    """A placeholder for what a layer's dispatch returns, in a recomputation that ends before it is used."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_RECOMPUTED_TOO_MUCH)


def _end_at_products(moe: MoE) -> None:
    """Make backward's recomputation of a MoE layer end after the experts' products, before combine, in place."""
    experts, plain = moe.experts, moe.experts.forward

    def run(*inputs: Any) -> Any:
        if not recomputing():
            return plain(*inputs)
        with observe.region("experts"):
            # Of a microbatch in halves the experts take two exchanges (titanmoe.moe.halves).
            for routed in (
                [inputs] if isinstance(inputs[0], Tensor) else (exchange.receive_routed() for exchange in inputs)
            ):
                experts.products(*routed)
        # Reached only if backward needs more than what the products save: else torch stops recomputing in them.
        raise RuntimeError(_RECOMPUTED_TOO_MUCH)

    experts.forward = run


_RECOMPUTED_TOO_MUCH = (
    "backward would recompute a layer past its experts: what a dispatcher saves for backward has to be saved inside "
    "titanmoe.comm.recomputation.save_tensors()"
)


class _UnsavedTensors:
    """Tensors that autograd does not save: backward recomputes them and drops them after the last use.

    Of each tensor that autograd would save in their storages, only the shape and strides are saved.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], tensors: tuple[Tensor, ...]):
        self.compute = compute
        self.index_of = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
        self.uses = self.uses_left = 0
        self.recomputed: tuple[Tensor, ...] = ()

    def pack(self, x: Tensor) -> Tensor | tuple:
        i = self.index_of.get(x.untyped_storage()._cdata)
        if i is None:
            return x
        self.uses += 1
        return i, x.shape, x.stride(), x.storage_offset()

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.uses_left:
            with torch.no_grad():
                self.recomputed, self.uses_left = self.compute(), self.uses
        i, *strided = packed
        view = self.recomputed[i].as_strided(*strided)
        self.uses_left -= 1
        if not self.uses_left:
            self.recomputed = ()
        return view


def _use_unsaved(remember: Remember, compute: Callable[[], tuple[Tensor, ...]], use: Callable[..., Tensor]) -> Tensor:
    """Return `use(*compute())`, where backward recomputes the tensors of `compute` instead of saving them."""
    tensors = compute()
    if torch.compiler.is_compiling():  # the compiler chooses what to save
        return use(*tensors)
    unsaved = _UnsavedTensors(remember(compute), tensors)
    with torch.autograd.graph.saved_tensors_hooks(unsaved.pack, unsaved.unpack):
        return use(*tensors)


def _recompute_selected(block: Block) -> None:
    """Let backward recompute what a block's modules name for selective recomputation, in place.

    They name methods by `recomputable_methods`, or call `use_recomputable`. A block whose modules read more than their
    arguments (titanmoe.models.lora_dropout) has a `remember`.
    """
    remember = getattr(block, "remember", _remember_nothing)
    for module in block.modules():
        for name in getattr(module, "recomputable_methods", ()):
            _checkpoint_method(module, name, remember)
        if hasattr(module, "use_recomputable"):
            module.use_recomputable = partial(_use_unsaved, remember)


def apply_recomputation(model: Transformer, options: ActivationCheckpoint, in_one_graph: bool = False) -> None:
    """Make the methods of blocks that the recipe recomputes checkpointed regions, in place.

    Must be called after compilation, which wraps methods too.

    Args:
        model: a pipeline stage.
        options: the recipe's [activation_checkpoint].
        in_one_graph: whether a MoE layer is compiled as one graph.
    """
    for number, block in model.blocks().items():
        mode, moe = options.mode, block.moe
        if mode == "none" or number % options.every:
            continue
        if mode == "selective":
            _recompute_selected(block)
        if mode in ("full", "full_except_dispatch"):
            _checkpoint_method(block, "attend")
        if mode in ("full", "full_except_dispatch") and moe is None:
            _checkpoint_feed(block)
        if mode in ("moe", "full", "full_except_dispatch") and moe is not None:
            _recompute_layer(block, moe, mode == "full_except_dispatch", in_one_graph)


def _recompute_layer(block: Block, moe: MoE, saves_dispatched: bool, in_one_graph: bool) -> None:
    if saves_dispatched:
        _checkpoint_products(moe)
    if in_one_graph:
        return
    _checkpoint_feed(block)
    (_dispatch_once if saves_dispatched else _end_at_products)(moe)
