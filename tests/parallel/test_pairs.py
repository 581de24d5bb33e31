"""Pairs of a forward and a backward that take turns: what may be asked for, and that no number changes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity, world
from tests.parallel.test_pipeline import fold
from titanmoe.config.schema import Config, Model, MoE, Parallelism, Pipeline, Training
from titanmoe.fold.degrees import Fold
from titanmoe.parallel.pipeline import problems
from titanmoe.turns import Turns

# Stages in loops, 0 and 2 on one rank and 1 and 3 on the other: a forward and a backward of each, and some pairs.
LOOPS = [
    "0F0 0F1 2F0 2F1 0F2 2B0 (0F3;2B1)OVERLAP_F_B 0B0 2F2 (2F3;0B1)OVERLAP_F_B 2B2 2B3 0B2 0B3".split(),
    "1F0 1F1 3F0 3B0 (1F2;3F1)OVERLAP_F_B 3B1 (1B0;1F3)OVERLAP_F_B 1B1 3F2 3B2 3F3 (3B3;1B2)OVERLAP_F_B 1B3".split(),
]
