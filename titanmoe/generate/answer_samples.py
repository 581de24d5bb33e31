"""Answers to the prompts of [validation.samples] during a run, which titanmoe.rank passes to the training loop.

The run's weights are copied by messages to a model that generates: without pipeline, context parallel and FSDP, in the
compute dtype. The copy exists only while it answers. Nothing of the run is written to: the copy has buffers and process
groups of its own, and every random number is a function of (seed, prompt, position).
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import Any

import torch

from titanmoe.checkpoint.relayout import Relayout
from titanmoe.checkpoint.state import Targets, shards_to_load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.loop import Generated, Generator, Prompt, Stop
from titanmoe.generate.model import build_empty, samples_config
from titanmoe.generate.prompts import continuation, read_samples
from titanmoe.generate.sampling import Sampling
from titanmoe.train.console import format_size
from titanmoe.train.evaluation import Evaluation
from titanmoe.train.training import RankModel

BATCH_SIZE = 16
"""Prompts at a time on each data rank."""


class SampleAnswers(Evaluation):
    """Evaluation that answers the prompts of [validation.samples] with the run's present weights."""

    def __init__(self, config: Config, model: RankModel):
        """Read the prompts and plan how weights move. Collective over the world."""
        samples = config.validation.samples
        super().__init__(
            interval=config.validation.interval * samples.every, last=config.training.steps, state=model.state
        )
        self.model, self.stop = model, Stop(samples.max_tokens)
        self.samples = read_samples(config)
        self.prompts = [Prompt(number, prompt.ids) for number, prompt in enumerate(self.samples.prompts)]
        self.sampling = Sampling(samples.temperature, samples.top_k, samples.top_p, config.training.seed)
        self.config = samples_config(config, model.runtime.world, model.device.type)
        fold = derive(model.runtime.world, self.config.parallelism)
        timeout = timedelta(seconds=config.training.first_step_timeout_s)
        self.meshes = build_meshes(fold, model.device.type, timeout=timeout, trains=False)
        _, targets = build_empty(self.config, self.meshes, torch.device("meta"))
        self.relayout = Relayout(self.source, targets, leave_out=("model.mtp.",))
        weights = sum({stored: shard.tensor.nbytes for stored, shard in targets.values()}.values())
        count = len(self.prompts)
        self.note = (
            f"{count} prompt{'s' * (count > 1)}, answered under tp {fold.tp}, ep {fold.ep}, etp {fold.etp}, dp "
            f"{fold.dp}; meanwhile a rank has {format_size(weights)} more of weights"
        )

    @property
    def source(self) -> Targets:
        """The run's shards on this rank."""
        return shards_to_load(self.model.parameters, self.model.buffers, None, self.config.model.tie_embeddings)

    def after_step(self) -> dict[str, Any]:
        """Answer the prompts if they are due after this step, else return {}. Collective over the world.

        Returns:
            "samples", a dict for each prompt with "prompt", "answer", "tokens" (their number) and "end" ("eos" or
                "length"); and "samples_s", the seconds that it took.
        """
        if not self.is_due:
            return {}
        begin, lines = time.monotonic(), []
        for prompt, generated in zip(self.samples.prompts, self.answer(), strict=True):
            answer = continuation(self.samples.tokenizer, prompt.ids, generated.content)
            lines.append(
                {"prompt": prompt.text, "answer": answer, "tokens": len(generated.content), "end": generated.end}
            )
        gc.collect()  # the modules of the copy refer to each other, and would otherwise keep its weights
        return {"samples": lines, "samples_s": time.monotonic() - begin}

    def answer(self) -> list[Generated]:
        """Copy the weights and generate an answer for each prompt, in their order. Collective over the world."""
        model, targets = build_empty(self.config, self.meshes, self.model.device)
        self.relayout.move(self.source, targets)
        tokenizer = self.samples.tokenizer
        generator = Generator(model, self.meshes, self.model.device, tokenizer.vocab_size, self.samples.ends)
        batches = generator.batches(self.prompts, BATCH_SIZE, self.stop, self.sampling)
        return [generated for batch in batches for generated in batch]
