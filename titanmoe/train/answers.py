"""Questions with choices, scored while training goes on: only forward, through the stages and mapping of the run.

What lm-evaluation-harness calls acc and acc_norm is computed from the same sums of log-probabilities. As a validation,
it leaves no trace in the training.

Shapes: B samples, S positions of the attention slice, C choices of all questions.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.data.answers import CHOICE, AnswerSet, Question
from titanmoe.models.vocabulary import Scores
from titanmoe.parallel.batch_slice import Slice
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.run_folder import QUANTITIES
from titanmoe.train.run_state import RunState
from titanmoe.train.validation import forward_only


class ChoiceSums(CrossEntropy):
    """Adds up the log-probabilities of each choice over the batches of a set. Itself it is 0."""

    def clear(self, choices: int, device: torch.device) -> None:
        self.sums_C = torch.zeros(choices + 1, dtype=torch.float64, device=device)
        """The last one is what padding adds to."""

    def sum(self, scores: Scores, piece: Slice) -> Tensor:
        choice_T = piece.further[CHOICE].flatten() % len(self.sums_C)
        self.sums_C.index_add_(0, choice_T, -scores.loss_BS.flatten().double())
        return scores.loss_BS.new_zeros(())


def judge(question: Question, log_p: np.ndarray) -> dict[str, float]:
    """From the log-probability of each choice."""
    right = question.answer
    bytes_of_right = len(question.choices[right].encode())
    lengths = np.array([len(choice) for choice in question.choices])
    return {
        "bits_per_byte": float(-log_p[right]) / math.log(2) / bytes_of_right,
        "margin": float(log_p[right] - np.delete(log_p, right).max()),
        "accuracy": float(log_p.argmax() == right),
        "accuracy_norm": float((log_p / lengths).argmax() == right),
    }


@dataclass(eq=False, kw_only=True)
class Answers:
    """Due every `interval` steps, and after step `last`."""

    interval: int
    last: int
    questions: AnswerSet
    slicer: Slicer
    """With ChoiceSums as its objective."""
    gradients: Gradients
    state: RunState

    def after_step(self) -> dict[str, Any]:
        """If it is due: the mean of each quantity by task, and all numbers as lines for the run's folder."""
        if self.state.step % self.interval and self.state.step != self.last:
            return {}
        begin, at = time.monotonic(), 0
        log_p_C, report, lines = self.log_probabilities(), {}, []
        for task in self.questions.tasks:
            judged = []
            for question in task.questions:
                judged.append(judge(question, log_p_C[at : at + len(question.choices)]))
                at += len(question.choices)
            by_quantity = {name: [one[name] for one in judged] for name in QUANTITIES}
            report |= {f"answers.{task.name}.{name}": float(np.mean(x)) for name, x in by_quantity.items()}
            lines.append({"step": self.state.step, "task": task.name, **by_quantity})
        return report | {"answers": lines, "answers_s": time.monotonic() - begin}

    def log_probabilities(self) -> np.ndarray:
        """Of every choice."""
        sums, meshes = self.slicer.objective, self.slicer.meshes
        sums.clear(len(self.questions.encoded), self.slicer.device)
        for _ in forward_only(self.questions, self.slicer, self.gradients):
            pass
        # Only ranks of the last stage have scores, and all ranks of a tp group have the same ones.
        return (all_reduce(sums.sums_C, meshes.world)[:-1] / meshes.tp.size).cpu().numpy()
