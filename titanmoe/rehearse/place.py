"""Where in the program an operation stands: the code line, the layer and region it works for, the part of the step.

In forward all of it is in the Python stack. In backward most operations have none: they belong to a node of autograd's
graph, which remembers the place where it was made. torch notes such a text for every node under anomaly detection;
here it notes the place instead.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import NamedTuple
from unittest import mock

import torch
from torch.fx import traceback

from titanmoe.ops.region import measured_by
from titanmoe.rehearse.record import COMM, HERE, LAUNCH, LAYERED, OURS, TORCH

NOTE = "traceback_"
"""Under which a node of the graph has what `traceback.format_stack` returned when it was made."""
GATHER, REDUCE, RECEIVE = "gather weights", "reduce gradients", "receive buffers"
"""Work that torch does by itself, named as if it were regions of the code."""
TORCHS = {"unshard": GATHER, "wait_for_unshard": GATHER, "post_backward": REDUCE, "finalize_backward": REDUCE}
WHOLE = "forward backward"


class Place(NamedTuple):
    file: str = ""
    number: int = 0
    layer: str = ""
    region: str = ""
    """The innermost; "" for norms, residual sums and what else has none."""
    part: str = ""
    """"forward", "backward", "recomputed" (forward once more, in backward) or "update": the rest of the step."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def _kind(code: CodeType) -> str:
    """What a frame of that code shows."""
    file, name = code.co_filename, code.co_name
    if file.startswith(OURS):
        if file.startswith((HERE, COMM)) or file == LAUNCH:
            return ""
        if name == "train_step":
            return "step"
        if name == "unpack" and file.endswith(os.path.join("parallel", "recompute.py")):
            return "again"
        return "layered" if name in LAYERED else "ours"
    if not file.startswith(TORCH):
        return ""
    if name == "_engine_run_backward":
        return "engine"
    if file.endswith(os.path.join("utils", "checkpoint.py")):
        return "again"
    if "_fully_shard" in file and name in TORCHS:
        return "sharded"
    return "receive" if name == "_make_tensor_from_meta" else ""


class Places:
    """layers: names of blocks, by their id."""

    def __init__(self, layers: dict[int, str]):
        self.layers = layers
        self._kinds: dict[CodeType, str] = {}
        self._thread = threading.local()  # regions that it is in
        self._within = False

    @contextmanager
    def on(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(measured_by(self))
            stack.enter_context(mock.patch.object(traceback, "format_stack", self._noted))
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            yield

    # ---- what the Trainer's clock is for

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        if name == WHOLE:
            self._within = True
            try:
                yield
            finally:
                self._within = False
            return
        stack = self._regions()
        stack.append(name)
        try:
            yield
        finally:
            stack.pop()

    def lap(self, name: str) -> None:
        pass

    def _regions(self) -> list[str]:
        try:
            return self._thread.regions
        except AttributeError:
            self._thread.regions = []
            return self._thread.regions

    # ---- places

    def _noted(self) -> list[str]:
        return [str(x) for x in self.here()]

    def here(self) -> Place:
        """Of the operation that is at work in this thread."""
        node = torch._C._current_autograd_node()
        noted = None if node is None else node.metadata.get(NOTE)
        regions = self._regions()
        file, number, layer, region = "", 0, "", regions[-1] if regions else ""
        part = "backward" if node is not None else "forward" if self._within else "update"
        kinds = self._kinds
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(code)
            if kind:
                if kind == "engine":
                    part = "backward" if part == "forward" else part
                    if noted is not None:
                        break
                elif kind == "again":
                    part = "recomputed" if part == "backward" else part
                elif kind == "sharded":
                    region = TORCHS[code.co_name]
                    name = getattr(frame.f_locals["self"], "_module_fqn", None) or ""
                    layer = layer or (".".join(name.split(".")[:2]) if name.startswith("layers.") else "")
                elif kind == "receive":
                    region = RECEIVE
                elif not number:
                    file, number = code.co_filename[len(OURS) :], frame.f_lineno
                if kind == "layered" and not layer:
                    layer = self.layers.get(id(frame.f_locals.get("self")), "")
                if kind == "step" or (number and layer and node is None):
                    break
            frame = frame.f_back
        if noted is not None:
            if not number:
                file, number = noted[0], int(noted[1])
            if part != "recomputed":  # which enters its regions again
                layer, region = layer or noted[2], region or noted[3]
        return Place(file, number, layer, region, part)
