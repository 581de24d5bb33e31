"""The stateful loader: which samples a data rank sees in a step, and how far the run has come.

Sample j of an optimizer step has the global number `samples consumed before the step + j`. Microbatch m of data rank d
holds samples j = (m * data_ranks + d) * local_batch_size + b: a round over the data ranks takes consecutive samples.

Shapes: M microbatches of a step, B samples of a microbatch, N = M * B, S positions, L = S + 1.
"""

from __future__ import annotations

import torch

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.data.sources import open_source


class Loader:
    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        training = config.training
        per_round = training.local_batch_size * data_ranks
        self.global_batch_size = per_round if training.global_batch_size == -1 else training.global_batch_size
        self.microbatches = self.global_batch_size // per_round
        self.seed, self.seq_len = training.seed, training.seq_len
        self.source = open_source(config)
        self.consumed = 0
        """Samples, over all data ranks."""
        first_M = torch.arange(self.microbatches) * data_ranks + data_rank
        self._sample_MB = first_M.unsqueeze(1) * training.local_batch_size + torch.arange(training.local_batch_size)

    def next_step(self) -> list[Batch]:
        """This data rank's microbatches of the next optimizer step."""
        batches = self.peek()
        self.consumed += self.global_batch_size
        return batches

    def peek(self) -> list[Batch]:
        """What next_step will return."""
        window_NL = self.source.samples(self.consumed + self._sample_MB.flatten(), self.seq_len + 1)
        tokens_NS, labels_NS = window_NL[:, :-1].contiguous(), window_NL[:, 1:].contiguous()
        valid_NS = torch.ones_like(labels_NS, dtype=torch.bool)
        rows = (x_NS.chunk(self.microbatches) for x_NS in (tokens_NS, labels_NS, valid_NS))
        return [Batch(*parts) for parts in zip(*rows, strict=True)]

    def state_dict(self) -> dict[str, int | str]:
        return {"consumed": self.consumed} | self._identity()

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where a run of the same samples stopped; the batch size and the number of data ranks may differ."""
        names = {"seed": "training.seed", "seq_len": "training.seq_len", "source": "the data (its fingerprint)"}
        problems = [
            f"{names[name]} was {state[name]!r} when the state was saved and is {here!r} now: "
            "the samples already seen would not be known; keep it, or start a new run"
            for name, here in self._identity().items()
            if state[name] != here
        ]
        if problems:
            raise ConfigError(problems)
        self.consumed = int(state["consumed"])

    def _identity(self) -> dict[str, int | str]:
        """What the content of a sample with a given number depends on."""
        return {"seed": self.seed, "seq_len": self.seq_len, "source": self.source.fingerprint}
