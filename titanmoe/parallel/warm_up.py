"""Run a forward and backward of a stage that leaves no trace, before a pipeline's first message: it loads all kernels.

To load a kernel at its first launch CUDA may wait for all kernels that run (CUDA C++ Programming Guide, "Lazy
Loading"). A receive of NCCL runs until its message has come, so two ranks that load and receive could wait for each
other.

Shapes: B samples, S positions of the attention slice, s owned positions, D model, K candidates of each position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe import observe
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head
from titanmoe.parallel.batch_slice import BatchSlice, MicrobatchLoss
from titanmoe.parallel.data_parallel import free_gathered


def warm_up(
    model: Transformer, hidden: Tensor, batch_slice: BatchSlice, device: torch.device, microbatch_loss: MicrobatchLoss
) -> None:
    """Load all kernels of a stage: run forward and backward on a microbatch, then restore buffers and gradients.

    Stages other than the first begin with random hidden states. Collective over the ranks of the stage.

    Args:
        hidden: a meta tensor with the shape and dtype of a microbatch's hidden states on this rank.
        microbatch_loss: returns the microbatch's loss from the last stage's output and the slice.
    """
    memories = [moe.dispatcher.memory for moe in model.moe_layers().values()]
    state = [*model.buffers(), *(memory.needs_repeat for memory in memories if memory is not None)]
    state_before = [x.clone() for x in state]
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in grads:
        parameter.grad = None
    x = batch_slice.ids_BS
    if model.embed is None:  # random, so that tokens go to different experts
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype, device=device).requires_grad_()
    with observe.unheard(), torch.enable_grad():
        y = model(x, batch_slice.tokens, batch_slice.labels_BS, batch_slice.candidates_BSK, next_BsD=x)
        seed = y.detach()
        if isinstance(model.head, Head) and (loss := microbatch_loss(y, batch_slice)).requires_grad:
            y, seed = loss, None  # losses of passes that are forward only have no gradient
        if y.requires_grad:  # not in a frozen model's first stage, nor in a teacher
            y.backward(seed)
    free_gathered(model)
    with torch.no_grad():
        for now, before in zip(state, state_before, strict=True):
            now.copy_(before)
    for parameter, grad in grads.items():
        parameter.grad = grad
