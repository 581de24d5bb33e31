"""Evaluations between training steps, forward only: validation loss, and multiple-choice questions.

Both run through the stages and mapping of the run and change none of its state: weights, optimizer, selection biases
and the loader are not written to, and the layers' counts are reset when a step begins. Random numbers are functions of
the step and the token, and router jitter is off. `accuracy` and `accuracy_norm` are acc and acc_norm of
lm-evaluation-harness.

Shapes: N numbers of the head for each label, B samples, S positions of the attention slice, C choices of all questions,
T positions of a microbatch.
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
from titanmoe.config.schema import QUIZ_METRICS
from titanmoe.data.loader import ValidationSet
from titanmoe.data.quiz import CHOICE, Question, QuizSet
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.run_state import RunState


@dataclass(eq=False, kw_only=True)
class Evaluation:
    """Evaluation of the model that runs after every `interval` steps and after step `last`, the end of the run."""

    interval: int
    last: int
    state: RunState
    note: str = ""
    """Line of the header about the evaluation; "" for none."""

    @property
    def is_due(self) -> bool:
        """True if the evaluation runs after the step just made: every `interval` steps, and after the last."""
        return self.state.step % self.interval == 0 or self.state.step == self.last

    def after_step(self) -> dict[str, Any]:
        """Return metrics of the step by name if the evaluation is due after it, else {}. Collective over the world."""
        return self.evaluate() if self.is_due else {}

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model, in subclasses; return metrics by name, with its seconds. Collective over the world."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class ForwardEvaluation(Evaluation):
    """Evaluation by forward passes through the stages of the run."""

    slicer: Slicer
    """Slicer with the objective to measure, and without the inputs of multi-token prediction."""
    gradients: Gradients


@dataclass(eq=False, kw_only=True)
class Validation(ForwardEvaluation):
    """Validation loss: cross-entropy, or for preference pairs the loss of the run's objective."""

    samples: ValidationSet
    best: float = math.inf
    """Lowest validation loss of the run so far."""

    def evaluate(self) -> dict[str, float]:
        """Measure and return val_loss, val_best (the lowest so far), val_s, and the objective's metrics.

        If the objective has no metrics, val_perplexity takes their place. Collective over the world.
        """
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
        """Return the mean loss over the validation set, and the objective's own metrics by name.

        Collective over the world. A metric "preference.accuracy" gets the name "preference.val_accuracy". Does not
        change `best`.
        """
        meshes, objective = self.slicer.meshes, self.slicer.objective
        total, divisor = (torch.zeros((), dtype=torch.float64, device=self.slicer.device) for _ in range(2))
        sums = objective.take_metrics(total)
        for batches in self.samples:
            totals = self.slicer.count(batches)
            self.gradients.begin_step(totals)
            total += self.gradients.engine.run(self.slicer.slices(batches), objective, backward=False)
            sums += objective.take_metrics(total)
            divisor += totals.divisor
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        mine = torch.cat((total.view(1), sums))
        loss, *values = (all_reduce(mine, meshes.world) / meshes.tp.size / divisor.clamp(min=1)).tolist()
        names = [name.replace(".", ".val_") for name in objective.metrics]
        return loss + objective.constant, dict(zip(names, values, strict=True))


def score_question(question: Question, log_p: np.ndarray) -> dict[str, float]:
    """Return the metrics of one multiple-choice question: bits_per_byte, margin, accuracy and accuracy_norm.

    Args:
        log_p: log-probability of each choice in nats, summed over the choice's tokens, shape (choices,).

    Returns:
        bits_per_byte of the right choice; margin, in nats over the best wrong one; accuracy, 1.0 if the right one has
            the largest log_p, else 0.0; accuracy_norm, likewise with log_p divided by the choice's characters.
    """
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
class QuizEvaluation(ForwardEvaluation):
    """Evaluation on multiple-choice questions, which are grouped in tasks."""

    questions: QuizSet

    def evaluate(self) -> dict[str, Any]:
        """Ask all questions and return metrics. Collective over the world.

        Returns:
            The mean of each metric under "quiz.TASK.METRIC", seconds under "quiz_s", and under "quiz" a dict for each
                task, a line of quiz.jsonl: "step", "task", and by metric a list with a number per question.
        """
        begin, at = time.monotonic(), 0
        log_p_C, report, lines = self.log_probabilities(), {}, []
        for task in self.questions.tasks:
            judged = []
            for question in task.questions:
                judged.append(score_question(question, log_p_C[at : at + len(question.choices)]))
                at += len(question.choices)
            by_quantity = {name: [one[name] for one in judged] for name in QUIZ_METRICS}
            report |= {f"quiz.{task.name}.{name}": float(np.mean(x)) for name, x in by_quantity.items()}
            lines.append({"step": self.state.step, "task": task.name, **by_quantity})
        return report | {"quiz": lines, "quiz_s": time.monotonic() - begin}

    def log_probabilities(self) -> np.ndarray:
        """Return the log-probability of every choice of every question, summed over the choice's tokens, shape (C,).

        They are on every rank, in the order of tasks, questions and choices. Collective over the world.
        """
        slicer, gradients, meshes = self.slicer, self.gradients, self.slicer.meshes
        # Padding is added to one more entry at the end.
        sums_C = torch.zeros(len(self.questions.encoded) + 1, dtype=torch.float64, device=slicer.device)
        log_p_of: dict[int, Tensor] = {}

        def store(output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
            loss_BS = HeadOutput.of(output_NBS).loss_BS
            log_p_of[id(batch_slice)] = -loss_BS.detach().flatten().double()
            return loss_BS.new_zeros(())

        for batches in self.questions:
            slices = slicer.slices(batches)
            gradients.begin_step(slicer.count(batches))
            gradients.engine.run(slices, store, backward=False)
            for one in slices:
                if (log_p_T := log_p_of.pop(id(one), None)) is not None:
                    sums_C.index_add_(0, one.extra_fields[CHOICE].flatten() % len(sums_C), log_p_T)
        # Only ranks of the last stage have scores, and all ranks of a tp group have the same ones.
        return (all_reduce(sums_C, meshes.world)[:-1] / meshes.tp.size).cpu().numpy()
