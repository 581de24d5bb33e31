"""The reference of a run: the model that it begins from, or the weights under its adapters. What it says of the run's
data is counted once and kept beside the shards (titanmoe.data.scores).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from titanmoe.checkpoint.base import model_digest
from titanmoe.checkpoint.choose_checkpoint import run_folder
from titanmoe.checkpoint.hf.convert import raise_on_all_ranks
from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.documents import whole_of
from titanmoe.data.scores import Classes, scores_of
from titanmoe.data.shards import ShardDocuments
from titanmoe.models.tensors import ADAPTER, stored_name
from titanmoe.train.checkpoints import REFERENCE
from titanmoe.train.runtime import say
from titanmoe.train.scoring import count_scores
from titanmoe.train.training import Training


class Reference:
    def __init__(self, config: Config, training: Training):
        self.config, self.training = config, training
        self.group = training.checkpoints.group

    def ready(self) -> dict[str, str]:
        """Has the loader read the scores, counted first where there are none. Call it when the weights are there; all
        ranks together. Returns notes for the run's header."""
        training, about_run = self.training, self.training.checkpoints.about_run
        goes_on = REFERENCE in about_run and not self.config.lora.rank
        if not goes_on:
            about_run[REFERENCE] = self.digest()
        model, sources = about_run[REFERENCE], self.sources()
        note = "counted before"
        if not self._take(sources, model):
            if goes_on and training.state.step:
                raise ConfigError(
                    [
                        f"{sources[0].folder} has no scores of this run's reference, the model that it began from "
                        f"(digest {model}), and of these weights they would be others: count them with the recipe "
                        "that the run began with, titanmoe score RECIPE"
                    ]
                )
            say(f"scores     counting those of the reference, {model}, as there are none beside the data")
            with self._without_adapters():
                count_scores(self.config, training, model)
            self._take(sources, model)
            note = "counted now"
        training.loader.close()  # what it has read ahead has no scores
        return {"reference": f"{model}, {note}"}

    def digest(self) -> str:
        compute = getattr(torch, self.config.training.mixed_precision_param)
        tied = self.config.model.tie_embeddings
        own = {
            name: parameter
            for name, parameter in self.training.parameters.items()
            if name == stored_name(name, tied) and ADAPTER not in name
        }
        return model_digest(own, self.training.buffers, compute, self.group)

    def sources(self) -> list[ShardDocuments]:
        loader, validation = self.training.loader, self.training.validation
        mixes = [loader.mix, *([validation.samples.mix] if validation else [])]
        parts = [source.packer for mix in mixes for source in mix.sources]
        documents = [whole_of(packer.documents) for packer in parts if hasattr(packer, "documents")]
        if len(documents) < len(parts) or not all(isinstance(one, ShardDocuments) for one in documents):
            fix = 'set data.source = "files", and name some in data.paths'
            raise ConfigError([f"scores are kept beside the data, and this run has none in files: {fix}"])
        return documents

    def _take(self, sources: list[ShardDocuments], model: str) -> bool:
        """Whether every rank has those of all sources."""

        def mine() -> bool:
            problems: list[str] = []
            for documents in sources:
                try:
                    documents.stored_scores = scores_of(documents, model, self.config.training.seq_len)
                except ConfigError as error:
                    problems += error.problems
            if problems:
                raise ConfigError([*dict.fromkeys(problems)])
            return all(documents.stored_scores for documents in sources)

        complete = raise_on_all_ranks(self.group, mine)
        return all(on_all_ranks(self.group, lambda: complete))

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        modules: list[nn.Module] = [part for stage in self.training.stages for part in stage.modules()]
        scales = {part: part.lora_scale for part in modules if getattr(part, "lora_scale", 0)}
        try:
            for part in scales:
                part.lora_scale = 0.0
            yield
        finally:
            for part, scale in scales.items():
                part.lora_scale = scale


def count(config: Config, training: Training, likeliest: bool) -> int:
    """What `titanmoe score` has the ranks do. likeliest: count the likeliest ids in place of labels."""
    with training.checkpoints.inside(run_folder(config.job)) as checkpoints:
        begun, reference = checkpoints.begin(), Reference(config, training)
        notes = begun | (_count_classes(reference) if likeliest else reference.ready())
    for name, note in notes.items():
        say(f"{name:<10} {note}")
    return 0


def _count_classes(reference: Reference) -> dict[str, str]:
    config, training, options = reference.config, reference.training, reference.config.distillation
    if config.lora.rank:
        raise ConfigError(["--top is of a whole model: merge its adapters (titanmoe convert), and score that one"])
    classes, model = Classes(options.top, options.temperature, config.model.vocab_size), reference.digest()
    name, sources = classes.name(model), reference.sources()
    there = raise_on_all_ranks(
        reference.group, lambda: all(scores_of(one, name, config.training.seq_len) for one in sources)
    )
    if not all(on_all_ranks(reference.group, lambda: there)):
        count_scores(config, training, model, classes)
    return {"scores": f'name them in the recipe that learns from them: distillation.scores = "{name}"'}
