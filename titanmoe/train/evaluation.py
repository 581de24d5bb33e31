"""What a run measures between steps, only forward: the loss on data that is not trained on, and questions with choices.

Both go through the stages and mapping of the run and leave no trace: weights, optimizer, selection biases and the
loader are not written to, and the layers' counts are reset when a step begins. Random numbers are counted, and those
of training (jitter) are off. What lm-evaluation-harness calls acc and acc_norm is computed from the same sums of
log-probabilities.

Shapes: B samples, S positions of the attention slice, C choices of all questions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.data.batch import Batch
from titanmoe.data.loader import ValidationSet
from titanmoe.data.quiz import CHOICE, AnswerSet, Question
from titanmoe.models.vocabulary import Scores
from titanmoe.parallel.batch_slice import Slice
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.run_folder import QUANTITIES
from titanmoe.train.run_state import RunState


def forward_only(
    samples: Iterable[list[Batch]], slicer: Slicer, gradients: Gradients
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step's batches, the slicer's objective: this rank's sum, and the count over all ranks."""
    one = torch.ones((), dtype=torch.float64, device=slicer.device)
    for batches in samples:
        totals = slicer.count(batches)
        gradients.begin_step(totals)
        yield gradients.engine.run(slicer.slices(batches), slicer.objective, one, backward=False), totals.count


@dataclass(eq=False, kw_only=True)
class Evaluation:
    """What is measured every `interval` steps, and after step `last`."""

    interval: int
    last: int
    slicer: Slicer
    """Without what multi-token prediction needs, and with the objective that is measured."""
    gradients: Gradients
    state: RunState

    @property
    def is_due(self) -> bool:
        return self.state.step % self.interval == 0 or self.state.step == self.last


@dataclass(eq=False, kw_only=True)
class Validation(Evaluation):
    """The loss: cross-entropy, or that of pairs."""

    samples: ValidationSet
    best: float = math.inf

    def after_step(self) -> dict[str, float]:
        """The loss and the best one so far, if a validation is due; the perplexity of cross-entropy, or the objective's
        own metrics."""
        if not self.is_due:
            return {}
        begin = time.monotonic()
        loss, metrics = self.measure()
        self.best = min(self.best, loss)
        values = {"val_loss": loss, "val_best": self.best, "val_s": time.monotonic() - begin}
        if metrics:
            return values | metrics
        return values | {"val_perplexity": math.exp(loss) if loss < 700 else math.inf}

    def state_dict(self) -> dict[str, float | None]:
        return {"best": self.best if math.isfinite(self.best) else None}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        best = state.get("best")
        self.best = math.inf if best is None else best

    def measure(self) -> tuple[float, dict[str, float]]:
        """The objective over the whole set, divided by its count once; and its metrics, as those of a step with val_
        before their last name."""
        meshes, objective = self.slicer.meshes, self.slicer.objective
        total, count = (torch.zeros((), dtype=torch.float64, device=self.slicer.device) for _ in range(2))
        sums = objective.take_metrics(total)
        for sum_of_batches, count_of_batches in forward_only(self.samples, self.slicer, self.gradients):
            total += sum_of_batches
            sums += objective.take_metrics(total)
            count += count_of_batches
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        mine = torch.cat((total.view(1), sums))
        loss, *values = (all_reduce(mine, meshes.world) / meshes.tp.size / count.clamp(min=1)).tolist()
        names = [name.replace(".", ".val_") for name in objective.metrics]
        return loss + objective.constant, dict(zip(names, values, strict=True))


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
class Answers(Evaluation):
    """The answers to questions with choices. The slicer's objective is ChoiceSums."""

    questions: AnswerSet

    def after_step(self) -> dict[str, Any]:
        """If it is due: the mean of each quantity by task, and all numbers as lines for the run's folder."""
        if not self.is_due:
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
