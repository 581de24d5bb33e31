"""Activation recomputation: what is forgotten after forward and computed again in backward.

full        whole blocks, in two halves
moe         the MoE half of a block: router, dispatch and experts, where most activations are
selective   what is cheap beside its size: the norms' wide intermediates, and the activation up to the input of each
            down projection. Recomputation stops before the projection itself, so no matrix product and no
            collective runs twice.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from titanmoe.config.schema import ActivationCheckpoint
from titanmoe.models.layers import FeedForward, RMSNorm
from titanmoe.models.transformer import Block, Transformer


def _again(owner: nn.Module, name: str) -> None:
    # Randomness is counted, so there is no generator state to restore.
    function = getattr(owner, name)
    setattr(owner, name, partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False))


def _selective(block: Block) -> None:
    for module in block.modules():
        if type(module) is RMSNorm:  # one over split heads would send its message again
            _again(module, "forward")
        elif isinstance(module, FeedForward):
            _again(module, "down")


def recompute(model: Transformer, options: ActivationCheckpoint) -> None:
    for number, block in model.blocks().items():
        if options.mode == "none" or number % options.every:
            continue
        if options.mode == "selective":
            _selective(block)
        elif options.mode == "full":
            _again(block, "attend")
            _again(block, "feed")
        elif block.moe is not None:
            _again(block, "feed")
