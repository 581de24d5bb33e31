"""The training loop of reinforcement learning: titanmoe.rank gives it to `titanmoe.train.launch` in place of Trainer.

For every `rl.updates` steps the run's weights are copied by messages to a model that generates under a mapping of its
own; it completes prompts, workers of rank 0 reward the completions as they are finished, and each step then learns
from those of its own prompts. No checkpoint is made while completions are left to learn from, and draws are functions
of (seed, step, prompt, completion, position): so a resumed run generates the completions that it would have generated.

Shapes: N samples, S positions, L MoE layers, K top-k.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe import observe
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.batch import ROUTES, Batch
from titanmoe.data.shuffle import permute
from titanmoe.generate.live_generator import LiveGenerator
from titanmoe.generate.loop import Generator, Interrupted, Prompt, Stop
from titanmoe.generate.model import generation_config
from titanmoe.generate.prompts import continuation
from titanmoe.generate.sampling import Sampling
from titanmoe.ops import counter_rng
from titanmoe.policy import PolicyLoss
from titanmoe.rl.prompt_records import PromptRecord, Prompts, read_prompts
from titanmoe.rl.rewards import START_S, Reward, Rewards
from titanmoe.rl.rollouts import Rollout, advantages_and_weights, columns, summary
from titanmoe.session import Session
from titanmoe.train.reference import PROGRESS_INTERVAL_S
from titanmoe.train.run_folder import ROLLOUTS, ROUNDS, read_records
from titanmoe.train.runtime import AFTER_STEP, print_rank_0
from titanmoe.train.trainer import Trainer
from titanmoe.train.training import Training
from titanmoe.train.world_batch import NoLoader

MESSAGE_S = 10
"""Most seconds between messages while ranks wait for rewards."""
SHOWN = 4
"""Completions of held-out prompts that the console and the report show after an evaluation."""


class PromptLoader(NoLoader):
    """The prompts of the run, in an order of their own in each epoch, and how many have been taken."""

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        super().__init__(config, data_rank, data_ranks)
        self.prompts: Prompts = read_prompts(config)
        self.seed, self.consumed = config.training.seed, 0
        self.completions = config.rl.completions
        if self.prompts.tokenizer.files():
            self.mix = SimpleNamespace(tokenizer=self.prompts.tokenizer, sources=())
        self.epoch_messages: list[str] = []

    def take(self, count: int) -> list[PromptRecord]:
        """Return the next `count` prompts, the same on all ranks, and advance.

        They are in the order of the epoch, which is shuffled. With the last prompt of an epoch a line is added to
        `epoch_messages`, which says that the next one begins.
        """
        prompts, before = self._next(count), self.epoch
        self.consumed += count
        if self.epoch > before:
            self.epoch_messages.append(f"prompts begin epoch {self.epoch}")
        return prompts

    def _next(self, count: int) -> list[PromptRecord]:
        size, out = len(self.prompts.trained), []
        for number in range(self.consumed, self.consumed + count):
            order = counter_rng.key("prompts", self.seed, number // size)
            out.append(self.prompts.trained[int(permute(order, np.array([number % size]), size)[0])])
        return out

    @property
    def epoch(self) -> int:
        """Number of times that all prompts have been taken."""
        return self.consumed // len(self.prompts.trained)

    def peek(self) -> list[Batch]:
        """Return [a batch of the next prompt's ids], by which ranks check that they have read the same files.

        Nothing is taken.
        """
        ids_1S = torch.tensor([self._next(1)[0].ids])
        return [Batch(ids_1S, ids_1S, torch.ones_like(ids_1S, dtype=torch.bool))]

    def report(self) -> dict[str, float]:
        """Return {"rl.epoch": how many times all prompts have been taken, a whole number}."""
        return {"rl.epoch": self.epoch}

    def header_rows(self) -> dict[str, str]:
        """Return a line for the header, by label: the numbers of prompts, held-out ones and completions of each."""
        prompts = self.prompts
        held_out = f", {len(prompts.held_out):,} held out" if prompts.held_out else ""
        return {"prompts": f"{len(prompts.trained):,}{held_out}; {self.completions} completions of each"}

    def close(self) -> None:
        """Do nothing: nothing is read ahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state to save: "consumed" (prompts taken), "seed", digests "prompts" and "tokenizer"."""
        state = {"consumed": self.consumed, "seed": self.seed, "prompts": self.prompts.digest}
        return state | {"tokenizer": self.prompts.tokenizer.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the prompts that a saved state has taken.

        Raises:
            ConfigError: prompts, seed or tokenizer differ, or the state is of a run without [rl].
        """
        if "prompts" not in state:  # of a run that was not of reinforcement learning
            fix = "start from those weights (checkpoint.model_only = true)"
            raise ConfigError(f"the checkpoint is of a run on data, not of [rl]: {fix}")
        now = self.state_dict()
        if changed := [name for name in ("prompts", "seed", "tokenizer") if state.get(name) != now[name]]:
            raise ConfigError(
                f"the {' and '.join(changed)} of the run have changed since, so it would be unknown which prompts "
                "were completed: give it what it had, or start a new run from its weights"
            )
        self.consumed = int(state["consumed"])


class PolicyTrainer(Trainer):
    """The training loop of reinforcement learning on one rank."""

    def __init__(self, config: Config, training: Training):
        super().__init__(training)
        self.config, self.loader = config, training.loader
        self.prompts: Prompts = training.loader.prompts
        tokenizer, generation = self.prompts.tokenizer, config.generation
        self.session = Session(config, training, ids=tokenizer.vocab_size)
        self.live = LiveGenerator(
            generation_config(config, training.runtime.world, training.device.type),
            training,
            vocab_size=tokenizer.vocab_size,
            ends=self.prompts.ends,
            timeout_s=config.training.first_step_timeout_s,
            records=True,
            offloads=generation.offload_training,
        )
        training.prepare = self._regenerated_row
        self.ending = Stop(generation.max_tokens, tuple(generation.stop), tokenizer.decode)
        self.rewards = Rewards(config.rl) if self.session.rank == 0 else None
        rl = config.rl
        self.loss = PolicyLoss(
            clip_low=rl.clip_low, clip_high=rl.clip_high, level=rl.ratio, truncation=rl.truncation, truncate=rl.ratio
        )
        self.coming: list[tuple[Batch, dict[str, Any]]] = []
        """Batches of the coming steps, made from completions that are generated already, and metrics of these."""
        self.shown_at = 0.0
        """Time when the last line on the progress of completions was due, in seconds of `time.monotonic`."""

    def train(self) -> int:
        try:
            return super().train()
        finally:
            if self.rewards:
                self.rewards.close()

    def _train(self) -> int:
        self.coming = []  # of steps after the checkpoint that the run may have gone back to
        return super()._train()

    def _regenerated_row(self, training: Training) -> dict[str, str]:
        """Return a header line by label: on rank 0 how many completions after the checkpoint are generated again.

        {} if there are none, and on other ranks. No file is changed.
        """
        rounds = read_records(training.folder.path, ROUNDS) if self.session.rank == 0 else []
        # Rounds of earlier versions have "answers".
        numbers = [one.get("completions", one.get("answers", 0)) for one in rounds if one["step"] > self.step]
        count = sum(numbers)
        return {"regenerated": f"{count:,} completions of later steps, which no checkpoint has"} if count else {}

    def train_step(self) -> dict[str, Any]:
        """Generate completions if none are left, make one step, and evaluate if that is due. Collective over the world.

        A signal ends training (`stopping`) only once the completions that are generated have been learned from.

        Returns:
            The step's metrics by name; {} if there is nothing to learn from, and the step counts as skipped, or if a
                rank wants to stop while completions are generated, and no step is made.
        """
        session, step, temperature = self.session, self.step + 1, self.config.generation.temperature
        observe.active.phase("data", step)
        self.loader.epoch_messages = []
        if not self.coming:
            self.coming = self._generate(step)
            if not self.coming:
                self.stopping = True
                return {}
        batch, metrics = self.coming.pop(0)
        report: dict[str, Any] = {}
        if batch.extra_fields["weight"].any():
            observe.active.phase("forward_backward", step)
            counts = session.count(batch, self.loss, 1.0)
            result = session.forward_backward(
                batch, self.loss, counts=counts, temperature=temperature, log_probs=True, entropy=True
            )
            report = session.optim_step() | metrics | self.loss.metrics(result.log_probs, batch, result.entropy)
        else:
            self.training.state.step += 1
            self.training.state.skips.skipped += 1
            text = "no update: no completion of this step has a reward and may be learned from (rl.reward, rl.cut)"
            observe.active.event(step, "skip", text)
        stop = torch.tensor(int(self.training.checkpoints.wants_to_stop()))
        if session.group:
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=session.group)
        self.stopping = bool(stop) and not self.coming  # a checkpoint has no completions that were not learned from
        interval = self.config.rl.eval_interval
        if report and interval and (self.step % interval == 0 or self.step >= self.training.steps):
            observe.active.phase("validation", self.step)
            report |= self._evaluate()
        return report

    def _generate(self, step: int) -> list[tuple[Batch, dict[str, Any]]]:
        """Generate completions for `rl.updates` steps, or those that are left; return (batch, metrics) of each step.

        Rank 0 appends a line to rounds.jsonl. If a rank wants to stop meanwhile, return []: the prompts are not taken
        then. Collective over the world.
        """
        rl, begin, consumed = self.config.rl, time.monotonic(), self.loader.consumed
        updates = min(rl.updates, self.training.steps - self.step)
        parts = [self.loader.take(rl.prompts_per_step) for _ in range(updates)]
        prompts = [prompt for part in parts for prompt in part]
        observe.active.phase("generate", step)
        self._append(ROUNDS, [{"step": step, "completions": len(prompts) * rl.completions}])
        signals = self.training.checkpoints.signals
        signals.outcome = "saving the steps before this one"
        try:
            with self.live.loaded() as generator:
                rollouts = self._complete(generator, prompts, step, rl.completions, greedy=False)
        except Interrupted:
            self.loader.consumed, self.loader.epoch_messages = consumed, []
            return []
        finally:
            signals.outcome = AFTER_STEP
        observe.active.phase("forward_backward", step)
        seconds = time.monotonic() - begin
        coming, size = [], rl.prompts_per_step * rl.completions
        for first in range(0, len(rollouts), size):
            of_step = rollouts[first : first + size]
            metrics = summary(of_step) | {"rl.generate_s": seconds}
            coming.append((self._batch(of_step), metrics))
            seconds = 0.0
        return coming

    def _batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Return a step's batch, the same on all ranks, of its completions with advantages and weights of tokens.

        With rl.updates > 1 the present weights give the column "old", and with rl.replay = "old" the routes too; with
        rl.kl the weights under the adapters give "reference". Collective over the world.
        """
        config, rl, session = self.config, self.config.rl, self.session
        values = advantages_and_weights(rollouts, rl, config.generation.max_tokens)
        batch = session.batch(**columns(rollouts, *values, config.training.seq_len, rl.replay == "rollout"))
        temperature = config.generation.temperature
        if rl.replay == "old":
            old, routes = session.log_probs_and_routes(batch, temperature=temperature)
            batch = _with_columns(batch, {"old": old.cpu(), ROUTES: routes.experts_NSLK})
        elif rl.updates > 1:
            batch = _with_columns(batch, {"old": session.log_probs(batch, temperature=temperature).cpu()})
        if rl.kl:
            reference = session.log_probs(batch, temperature=temperature, adapters=False).cpu()
            weight = rl.kl * batch.extra_fields["weight"]
            batch = _with_columns(batch, {"reference": reference, "kl_weight": weight})
        return batch

    def _evaluate(self) -> dict[str, Any]:
        """Complete the held-out prompts by most probable tokens; return metrics by name. Collective over the world.

        Returns:
            "val_reward" (absent if no completion got a reward), "val_length" (mean tokens), "val_s" (seconds), and
                "samples": the first SHOWN completions as dicts of "prompt", "completion", "tokens" and "end" ("eos" or
                "length").
        """
        begin = time.monotonic()
        with self.live.loaded() as generator:
            rollouts = self._complete(generator, self.prompts.held_out, self.step, 1, greedy=True)
        metrics = summary(rollouts)
        samples = [
            {
                "prompt": self.prompts.held_out[one.prompt].text,
                "completion": one.text,
                "tokens": one.num_generated,
                "end": "length" if one.is_cut else "eos",
            }
            for one in rollouts[:SHOWN]
        ]
        report = {"samples": samples, "val_length": metrics["rl.length"], "val_s": time.monotonic() - begin}
        return report if metrics["rl.unrewarded"] == len(rollouts) else report | {"val_reward": metrics["rl.reward"]}

    def _complete(
        self, generator: Generator, records: Sequence[PromptRecord], step: int, completions: int, greedy: bool
    ) -> list[Rollout]:
        """Generate completions of each prompt and reward them; return them prompt by prompt. Collective over the world.

        Completions to which the environment has replied go on together, once all of the turn are rewarded. Rank 0 also
        appends completions to rollouts.jsonl: all of an evaluation, else those of the first prompt.

        Args:
            greedy: whether to take the most probable tokens, as in an evaluation, which does not stop for a signal.

        Raises:
            Interrupted: on all ranks, if one wants to stop before all completions are rewarded.
        """
        generation, seed = self.config.generation, self.config.training.seed
        sampling = Sampling(0.0 if greedy else generation.temperature, seed=seed, step=step)
        generate, reward_phase = ("validation", "validation") if greedy else ("generate", "reward")
        rollouts = [Rollout(n, one.ids, i) for n, one in enumerate(records) for i in range(completions)]
        prompts = [Prompt(number, one.ids, completions) for number, one in enumerate(records)]
        self.shown_at = time.monotonic()
        while prompts:  # a turn of the completions that go on
            futures: dict[int, Future[Reward] | None] = {}
            count = sum(prompt.completions for prompt in prompts)

            def on_forward(ended: int, tokens: int, count: int = count) -> bool:
                self._show_progress(f"generate   {ended:,} of {count:,} completions, {tokens:,} tokens")
                return not greedy and self.training.checkpoints.wants_to_stop()

            texts = generator.batches(
                prompts, generation.batch_size, self.ending, sampling, on_forward=on_forward, in_order=False
            )
            for batch in texts:
                for generated in batch:
                    number = generated.number * completions + generated.completion_number
                    one, record = rollouts[number], records[generated.number]
                    one.add_turn(generated, continuation(self.prompts.tokenizer, one.ids, generated.content))
                    futures[number] = None
                    if self.rewards:
                        encode = partial(self._encode_message, record, one)
                        futures[number] = self.rewards.submit(record.text, one.turns, record.record, encode)
            running, prompts = sorted(futures), []
            rewards = self._broadcast_rewards([futures[number] for number in running], step, reward_phase)
            observe.active.phase(generate, step)
            for one, reward in zip((rollouts[number] for number in running), rewards, strict=True):
                one.add_reward(reward)
                if reward.ids is not None:
                    prompts.append(Prompt(one.prompt, one.ids, 1, one.completion_number, len(one.tokens)))
        if self.rewards:
            self._write_completions(step, records, rollouts if greedy else rollouts[:completions])
        return rollouts

    def _broadcast_rewards(self, futures: Sequence[Future[Reward] | None], step: int, phase: str) -> list[Reward]:
        """Return the rewards on every rank, once all are computed. Collective over the world.

        The ranks report the phase while they wait, so that the run does not count as stuck, until no reward has come
        for longer than any may take. If completions get no reward, an event says so.

        Args:
            futures: the rewards; None for each on other ranks than 0.
            phase: name of the step's phase: "reward", or "validation", which does not stop for a signal.

        Raises:
            Interrupted: on all ranks, if rank 0 wants to stop meanwhile.
        """
        seconds, left, late_at = min(MESSAGE_S, self.training.timeout_s / 4), -1, 0.0
        rewards: list[Reward] | None = None
        while rewards is None:
            message: list[Any] = [None, None, None]
            if self.rewards:
                not_done = wait(futures, seconds).not_done
                done = None if not_done else [future.result() for future in futures]
                stops = bool(not_done) and phase == "reward" and self.training.checkpoints.wants_to_stop()
                message = [len(not_done), done, stops]
            if self.session.group:
                dist.broadcast_object_list(message, src=0, group=self.session.group)
            now, before, (left, rewards, stops) = time.monotonic(), left, message
            if stops:
                raise Interrupted
            self._show_progress(f"reward     {len(futures) - left:,} of {len(futures):,} completions")
            if left != before:
                late_at = now + START_S + self.config.rl.reward_timeout_s
            if now < late_at:
                observe.active.phase(phase, step)
        if problems := [reward.problem for reward in rewards if reward.problem]:
            text = f"{len(problems)} of {len(rewards)} completions got no reward and are left out: {problems[0]}"
            observe.active.event(step, "reward", text)
        return rewards

    def _show_progress(self, text: str) -> None:
        """Print a line on rank 0, unless the last one was less than PROGRESS_INTERVAL_S ago."""
        if time.monotonic() - self.shown_at > PROGRESS_INTERVAL_S:
            self.shown_at = time.monotonic()
            print_rank_0(text)

    def _encode_message(self, record: PromptRecord, rollout: Rollout, reward: Reward) -> Reward:
        """Return the reward with the ids of its message, if it has one and the completion may go on; else as it is.

        NaN with a problem if the chat template refuses the message. Called in a thread of `Rewards`.

        Args:
            rollout: its completion so far, with the turn that the reward is for; it is not changed.
        """
        if reward.message is None or len(rollout.messages) + 1 == self.config.rl.max_turns:
            return reward
        try:
            ids = self.prompts.encode_message(record, rollout.tokens[-1], reward.message, reward.role)
        except ValueError as error:  # of the chat template
            return Reward(math.nan, str(error))
        has_room = len(rollout.tokens) + len(ids) < self.config.generation.max_tokens
        return reward._replace(ids=ids, problem="") if has_room else reward

    def _write_completions(self, step: int, records: Sequence[PromptRecord], rollouts: Sequence[Rollout]) -> None:
        """Append completions, with their prompts and rewards, to rollouts.jsonl; a reward that is NaN becomes null.

        Args:
            step: step that the completions are of.
            records: prompts that are completed together.
            rollouts: completions to write; `prompt` of each is an index in `records`.
        """
        lines = []
        for one in rollouts:
            record, reward = records[one.prompt], None if math.isnan(one.reward) else one.reward
            line = {"step": step, "prompt": record.number, "text": record.text, "completion": one.text}
            turns = {"turns": one.turns} if self.config.rl.max_turns > 1 else {}
            lines.append(line | turns | {"is_cut": one.is_cut, "reward": reward})
        self._append(ROLLOUTS, lines)

    def _append(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines of JSON to a file of the run's folder, on rank 0."""
        if self.session.rank == 0:
            with (self.training.folder.path / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def _with_columns(batch: Batch, columns: dict[str, Tensor]) -> Batch:
    return batch._replace(extra_fields=batch.extra_fields | columns)
