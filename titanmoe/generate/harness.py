"""The model of a run as an LM of lm-evaluation-harness, which `titanmoe eval` hands to it. Imports lm_eval.

Every rank calls the harness with the same requests; data ranks divide them up. Texts become tokens as in a quiz during
the run (titanmoe.data.quiz).
"""

from __future__ import annotations

import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from titanmoe.data.quiz import encode_choices
from titanmoe.data.tokenizer import Tokenizer
from titanmoe.generate.log_likelihood import Scorer, rolling_windows
from titanmoe.generate.loop import Prompt, Stop
from titanmoe.generate.prompts import begin_tokens, continuation, with_begin
from titanmoe.generate.sampling import Sampling

MAX_TOKENS = 256
"""Limit of a generated text's tokens, if a task sets none."""
LIMITS = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Names under which tasks set a limit."""


class RunModel(LM):
    """A run's model that answers the harness's requests. Its methods are collective over the world."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, batch_size: int):
        super().__init__()
        self.scorer, self.tokenizer, self.size = scorer, tokenizer, batch_size

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        sequences = encode_choices(self.tokenizer, [request.args for request in requests])
        return [tuple(score) for score in self.scorer.score(sequences, self.size)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        prefix = (begin_tokens(self.tokenizer) or [self.tokenizer.eos])[0]
        texts = self.tokenizer.encode_all([request.args[0] for request in requests])
        windows = [rolling_windows(ids.tolist(), prefix, self.scorer.length) for ids in texts]
        scores = iter(self.scorer.score([window for some in windows for window in some], self.size))
        return [sum(next(scores).log_p for _ in some) for some in windows]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        texts: dict[int, str] = {}
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for options, numbers in by_options.items():
            contexts = [requests[number].args[0] for number in numbers]
            texts |= zip(numbers, self._generate(contexts, json.loads(options)), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        words = [word for word in ([until] if isinstance(until, str) else until) if word]
        limit = int(next((options[name] for name in LIMITS if options.get(name)), MAX_TOKENS))
        most = min(limit, self.scorer.length - 1)
        temperature = float(options.get("temperature") or 0) if options.get("do_sample", True) else 0.0
        sampling = Sampling(temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1))
        room = self.scorer.length - most
        ids = [with_begin(row.tolist(), self.tokenizer)[-room:] for row in self.tokenizer.encode_all(contexts)]
        prompts = [Prompt(number, row or [self.tokenizer.eos]) for number, row in enumerate(ids)]
        stop, texts = Stop(most, tuple(words), self.tokenizer.decode), []
        for batch in self.scorer.generator.batches(prompts, self.size, stop, sampling):
            for generated in batch:
                text = continuation(self.tokenizer, prompts[generated.number].ids, generated.content)
                for word in words:
                    text = text.partition(word)[0]
                texts.append(text)
        return texts
