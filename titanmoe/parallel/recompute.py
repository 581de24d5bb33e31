"""Activation recomputation: choose what is dropped after forward and recomputed in backward.

    mode                    saved of a block                          recomputed
    none                    all that backward reads                   nothing (*)
    selective               all but what its modules name             what they name
    moe                     all of `attend`; input of `feed`          `feed` (**)
    full_except_dispatch    inputs of both; received routed tokens    `attend`; `feed` without dispatch
    full                    inputs of both                            `attend`; `feed`

(*) The experts' act(gate) * up * weight is recomputed in every mode (titanmoe.moe.expert_products). `selective` does so
for dense networks, MLA and linear attention (`recomputable_methods`, `use_recomputable` of their modules).
(**) In every mode, a MoE layer is recomputed as far as its experts' products: within them torch ends a recomputation,
as soon as it has all tensors that backward needs. Combine is not sent again.

Methods of a block: `attend` (norm, mixer), `feed` (norm, MoE or dense layer). B samples, s owned positions, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titanmoe import observe
from titanmoe.comm.recomputation import cached_tensor, leave_checkpointed_region, recomputing, region_contexts
from titanmoe.config.schema import ActivationCheckpoint
from titanmoe.models.transformer import Block, Transformer
from titanmoe.moe.layer import MoE
from titanmoe.tokens import Tokens


class RecomputedParts(NamedTuple):
    """The parts of a block that backward recomputes. Of each, forward saves the inputs alone."""

    selected: bool = False
    """Tensors that the modules name as cheap to recompute."""
    attend: bool = False
    """Norm and mixer."""
    dense_feed: bool = False
    """Norm and dense network, of a block without experts."""
    moe_feed: bool = False
    """Norm, router, and the experts' products."""
    dispatch: bool = False
    """Dispatch, which is then sent twice; otherwise the received routed tokens are saved."""


RECOMPUTED_PARTS = {
    "none": RecomputedParts(),
    "selective": RecomputedParts(selected=True),
    "moe": RecomputedParts(moe_feed=True, dispatch=True),
    "full_except_dispatch": RecomputedParts(attend=True, dense_feed=True, moe_feed=True),
    "full": RecomputedParts(attend=True, dense_feed=True, moe_feed=True, dispatch=True),
}
"""The values of activation_checkpoint.mode."""


def apply_recomputation(model: Transformer, options: ActivationCheckpoint, in_one_graph: bool = False) -> None:
    """Make the methods that the recipe recomputes, in every `options.every`-th block, checkpointed regions, in place.

    Must be called after compilation, which wraps methods too. A MoE layer is compiled as one graph only in a mode that
    saves its routed tokens; then its products are a region inside the graph, and `feed` is none.

    Args:
        in_one_graph: whether a MoE layer is compiled as one graph.
    """
    parts = RECOMPUTED_PARTS[options.mode]
    for number, block in model.blocks().items():
        if number % options.every:
            continue
        if parts.selected:
            _recompute_selected(block)
        if parts.attend:
            _checkpoint_method(block, "attend")
        if parts.dense_feed and block.moe is None:
            _checkpoint_feed(block)
        if parts.moe_feed and block.moe is not None:
            _recompute_moe(block, block.moe, parts.dispatch, in_one_graph)


def _recompute_moe(block: Block, moe: MoE, dispatches_twice: bool, in_one_graph: bool) -> None:
    """Make regions of a block's `feed` with experts, in place.

    moe, full               `feed` with its dispatch, to the end of the experts' products
    full_except_dispatch    `feed` without its dispatch, to the products, which are a region of their own
    the same, if compile makes the layer one graph: the products alone
    """
    if not dispatches_twice:
        _checkpoint_products(moe)
    if in_one_graph:
        return
    _checkpoint_feed(block)
    (_end_at_products if dispatches_twice else _dispatch_once)(moe)


# ---- what is a checkpointed region, and where it ends

Remember = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Decorator: the returned function computes, whenever it is called, what the given one would compute now."""


def _remember_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# Randomness is counted, so there is no generator state to restore.
_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _checkpoint_method(owner: nn.Module, name: str, remember: Remember = _remember_nothing) -> None:
    """Make a method of this module a checkpointed region, in place: backward calls it a second time, messages too.

    Args:
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

    Backward, which recomputes the region, sends no routed tokens then. It needs none: the products, which are a region
    of their own, saved them, and torch ends the recomputation before anything reads the exchange.
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
    """Return `use(*compute())`; backward recomputes the tensors of `compute` instead of saving them.

    In torch.compile the compiler chooses what to save.

    Args:
        remember: wraps `compute` so that a later call computes the same, though state that it reads has changed.
        compute: returns the tensors; called again in backward.
        use: gets the tensors as arguments; called once.
    """
    tensors = compute()
    if torch.compiler.is_compiling():
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
