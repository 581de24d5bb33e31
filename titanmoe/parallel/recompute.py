"""Activation recomputation: what is dropped after forward and computed again in backward.

full            whole blocks, in two parts
full_but_rows   the same, but the rows that experts got are kept, and none is sent again
moe             the MoE part of a block: router, dispatch and experts, which have most of the activations
selective       what is cheap for its size: the activation up to the input of each down projection, and the queries,
                keys and values of all heads that latent attention computes from its latents, or linear attention by
                its convolution. Norms only keep their input. Recomputation stops before the down projection and does
                not include attention itself, so no collective runs twice, and the only matrix products that do are
                those of the latents.

Recomputation of the MoE part sends rows a second time at most, and nothing else: titanmoe.comm.recomputation.
Every mode recomputes the activation of routed experts: `titanmoe.moe.expert_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titanmoe.comm.recomputation import contexts
from titanmoe.config.schema import ActivationCheckpoint
from titanmoe.models.transformer import Block, Transformer


def _checkpointed(owner: nn.Module, name: str, **more: Any) -> None:
    # Randomness is counted, so there is no generator state to restore.
    function = getattr(owner, name)
    setattr(owner, name, partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, **more))


def _feed_again(block: Block, with_rows: bool = False) -> None:
    _checkpointed(block, "feed", context_fn=partial(contexts, with_rows))


class _Recomputed:
    """Tensors that autograd does not keep. Of each tensor that it saves in their storages, only the shape and strides
    are kept; backward computes the values again and drops them after the last use.
    """

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], tensors: tuple[Tensor, ...]):
        self.make = make
        self.index_of = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
        self.uses = self.uses_left = 0
        self.again: tuple[Tensor, ...] = ()

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
                self.again, self.uses_left = self.make(), self.uses
        i, *strided = packed
        view = self.again[i].as_strided(*strided)
        self.uses_left -= 1
        if not self.uses_left:
            self.again = ()
        return view


def _use_and_drop(make: Callable[[], tuple[Tensor, ...]], use: Callable[..., Tensor]) -> Tensor:
    tensors = make()
    if torch.compiler.is_compiling():  # the compiler chooses what to save
        return use(*tensors)
    recomputed = _Recomputed(make, tensors)
    with torch.autograd.graph.saved_tensors_hooks(recomputed.pack, recomputed.unpack):
        return use(*tensors)


def _selective(block: Block) -> None:
    for module in block.modules():
        for name in getattr(module, "cheap", ()):
            _checkpointed(module, name)
        if hasattr(module, "make_and_use"):
            module.make_and_use = _use_and_drop


def recompute(model: Transformer, options: ActivationCheckpoint) -> None:
    for number, block in model.blocks().items():
        if options.mode == "none" or number % options.every:
            continue
        if options.mode == "selective":
            _selective(block)
        elif options.mode in ("full", "full_but_rows"):
            _checkpointed(block, "attend")
            _feed_again(block, options.mode == "full_but_rows")
        elif block.moe is not None:
            _feed_again(block)
