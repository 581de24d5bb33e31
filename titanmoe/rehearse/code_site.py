"""The code site of an operation: its line of code, layer, region, and phase of the step.

Recorders ask `CodeSites.current_site` for every message and operation. In forward the Python stack shows all of it. In
backward most operations have no Python stack, but belong to a node of autograd's graph. Under anomaly detection torch
stores on every node the stack that created it; here it stores the site instead.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import NamedTuple

import torch
from torch.fx import traceback

import titanmoe
from titanmoe.moe.dispatchers import symmetric_buffers
from titanmoe.observe import Observer, listening
from titanmoe.replace import replaced

OURS = os.path.dirname(titanmoe.__file__) + os.sep
HERE = os.path.dirname(__file__) + os.sep
COMM = os.path.join(OURS, "comm") + os.sep
LAUNCH = os.path.join(OURS, "ops", "kernels", "kernel_launch.py")
"""The file that launches every kernel."""
SENDERS = tuple(
    f.__code__ for f in (symmetric_buffers.exchange, symmetric_buffers.ExchangeRows.forward, symmetric_buffers.send)
)
"""Functions outside titanmoe.comm that also communicate for their callers."""
TORCH = os.path.dirname(torch.__file__) + os.sep
BLOCK_METHODS = ("attend", "feed", "forward", "whole")
"""Methods of a block. Any operation of the block has one of them on the stack."""
TRACEBACK_KEY = "traceback_"
"""The key of a node's metadata that holds what `traceback.format_stack` returned when the node was created."""
GATHER, REDUCE, RECEIVE = "gather weights", "reduce gradients", "receive buffers"
"""Names for what torch does by itself, like the regions of our code."""
TORCH_REGIONS = {"unshard": GATHER, "wait_for_unshard": GATHER, "post_backward": REDUCE, "finalize_backward": REDUCE}
FORWARD_BACKWARD = "forward backward"


class CodeSite(NamedTuple):
    """The place of an operation in the program and in the step."""

    file: str = ""
    """The file, relative to the package."""
    line: int = 0
    layer: str = ""
    """The block's name, such as "layers.3"; "" outside of all blocks."""
    region: str = ""
    """The innermost region; "" for norms, residual sums and whatever else is in none."""
    phase: str = ""
    """"forward", "backward", "recomputed" (forward recomputed during backward) or "update" (the rest of the step)."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _kind(code: CodeType) -> str:
    """Return the role of a stack frame that runs this code; "" if the frame tells nothing about the operation.

    Roles are "step", "block", "ours" (other code of titanmoe), "recompute", "engine" (of autograd), "sharded" (FSDP)
    and "receive" (a pipeline's buffer).
    """
    file, name = code.co_filename, code.co_name
    if file.startswith(OURS):
        if file.startswith((HERE, COMM)) or file == LAUNCH or code in SENDERS:
            return ""
        if name == "train_step":
            return "step"
        if name == "unpack" and file.endswith(os.path.join("parallel", "recompute.py")):
            return "recompute"
        return "block" if name in BLOCK_METHODS else "ours"
    if not file.startswith(TORCH):
        return ""
    if name == "_engine_run_backward":
        return "engine"
    if file.endswith(os.path.join("utils", "checkpoint.py")):
        return "recompute"
    if "_fully_shard" in file and name in TORCH_REGIONS:
        return "sharded"
    return "receive" if name == "_make_tensor_from_meta" else ""


class CodeSites(Observer):
    """Finds the code site of the operation that runs, for recorders that ask during the operation."""

    def __init__(self, layers: dict[int, str]):
        """Take the names of blocks by the id of their module; the caller may add to them later."""
        self.layers = layers
        self._kinds: dict[CodeType, str] = {}
        self._thread = threading.local()  # the regions that a thread is in
        self._in_forward_backward = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Track regions of code, and store each operation's code site on its autograd node, within this context.

        Backward then finds the line of forward that an operation belongs to. Turns torch's anomaly detection on, but
        not its check for NaN.
        """
        with ExitStack() as stack:
            stack.enter_context(listening(self))
            stack.enter_context(replaced(traceback, "format_stack", self._format_site))
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            yield

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        if name == FORWARD_BACKWARD:
            self._in_forward_backward = True
            try:
                yield
            finally:
                self._in_forward_backward = False
            return
        stack = self._regions()
        stack.append(name)
        try:
            yield
        finally:
            stack.pop()

    def is_in_region(self, name: str) -> bool:
        """Return whether this thread is inside a region of that name, such as "dispatch". Call within `recording()`.

        In backward the region of the forward operation does not count.
        """
        return name in self._regions()

    def _regions(self) -> list[str]:
        try:
            return self._thread.regions
        except AttributeError:
            self._thread.regions = []
            return self._thread.regions

    # ---- code sites

    def _format_site(self) -> list[str]:
        return [str(x) for x in self.current_site()]

    def current_site(self) -> CodeSite:
        """Return the code site of the operation that runs in this thread: line, layer, region and phase of the step.

        Call it within `recording()`. The phase is "forward", "backward", "recomputed" or "update". In backward the line
        is that of the forward operation whose gradient is computed, unless titanmoe's own code runs. What is unknown is
        "" or line 0.
        """
        node = torch._C._current_autograd_node()
        stored = None if node is None else node.metadata.get(TRACEBACK_KEY)
        regions = self._regions()
        file, number, layer, region = "", 0, "", regions[-1] if regions else ""
        phase = "backward" if node is not None else "forward" if self._in_forward_backward else "update"
        kinds = self._kinds
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(code)
            if kind:
                if kind == "engine":
                    phase = "backward" if phase == "forward" else phase
                    if stored is not None:
                        break
                elif kind == "recompute":
                    phase = "recomputed" if phase == "backward" else phase
                elif kind == "sharded":
                    region = TORCH_REGIONS[code.co_name]
                    name = getattr(frame.f_locals["self"], "_module_fqn", None) or ""
                    layer = layer or (".".join(name.split(".")[:2]) if name.startswith("layers.") else "")
                elif kind == "receive":
                    region = RECEIVE
                elif not number:
                    file, number = code.co_filename[len(OURS) :], frame.f_lineno
                if kind == "block" and not layer:
                    layer = self.layers.get(id(frame.f_locals.get("self")), "")
                if kind == "step" or (number and layer and node is None):
                    break
            frame = frame.f_back
        if stored is not None:
            if not number:
                file, number = stored[0], int(stored[1])
            if phase != "recomputed" or not layer:  # recomputation enters a block's regions itself
                layer, region = layer or stored[2], region or stored[3]
        return CodeSite(file, number, layer, region, phase)
