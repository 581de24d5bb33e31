"""Completions of the prompts of [validation.samples] during a run, which titanmoe.rank passes to the training loop.

A generator under a mapping of its own gets the weights by messages (titanmoe.generate.live_generator).
"""

from __future__ import annotations

import time
from typing import Any

from titanmoe.config.schema import Config
from titanmoe.files import format_bytes
from titanmoe.generate.live_generator import LiveGenerator
from titanmoe.generate.loop import Prompt, Stop
from titanmoe.generate.model import samples_config
from titanmoe.generate.prompts import continuation, read_samples
from titanmoe.generate.sampling import Sampling
from titanmoe.train.evaluation import Evaluation
from titanmoe.train.training import RankModel

BATCH_SIZE = 16
"""Prompts at a time on each data rank."""


class SampleCompletions(Evaluation):
    """Evaluation that completes the prompts of [validation.samples] with the run's present weights.

    Building it reads the prompts, builds the generator and plans how weights move to it. Collective over the world.
    """

    def __init__(self, config: Config, model: RankModel):
        samples = config.validation.samples
        super().__init__(
            interval=config.validation.interval * samples.every, last=config.training.steps, state=model.state
        )
        self.samples, self.stop = read_samples(config), Stop(samples.max_tokens)
        self.prompts = [Prompt(number, prompt.ids) for number, prompt in enumerate(self.samples.prompts)]
        self.sampling = Sampling(samples.temperature, samples.top_k, samples.top_p, config.training.seed)
        self.live = LiveGenerator(
            samples_config(config, model.runtime.world, model.device.type),
            model,
            vocab_size=self.samples.tokenizer.vocab_size,
            ends=self.samples.ends,
            timeout_s=config.training.first_step_timeout_s,
        )
        count, fold = len(self.prompts), self.live.fold
        self.note = (
            f"{count} prompt{'s' * (count > 1)}, completed under tp {fold.tp}, ep {fold.ep}, etp {fold.etp}, dp "
            f"{fold.dp}; meanwhile a rank has {format_bytes(self.live.weight_bytes)} more of weights"
        )

    def evaluate(self) -> dict[str, Any]:
        """Complete the prompts. Collective over the world.

        Returns:
            On every rank: "samples", a dict for each prompt with "prompt", "completion", "tokens" (their number) and
                "end" ("eos" or "length"); and "samples_s", the seconds that it took.
        """
        begin = time.monotonic()
        with self.live.loaded() as generator:
            batches = generator.batches(self.prompts, BATCH_SIZE, self.stop, self.sampling)
            texts = [generated for batch in batches for generated in batch]
        samples = [
            {
                "prompt": prompt.text,
                "completion": continuation(self.samples.tokenizer, prompt.ids, generated.content),
                "tokens": len(generated.content),
                "end": generated.end,
            }
            for prompt, generated in zip(self.samples.prompts, texts, strict=True)
        ]
        return {"samples": samples, "samples_s": time.monotonic() - begin}
