"""Checkpoints of a run that trains LoRA adapters: they contain the adapters, and the digest of the base weights.

Base weights come from a Hugging Face model, from another run's checkpoint, or from the seed. A run that resumes loads
them from there again, and its adapters from its own checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import state
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.choose_checkpoint import StartPoint, base_weights_name, start_from_path
from titanmoe.checkpoint.move_in_blocks import fill_in_blocks
from titanmoe.checkpoint.on_all_ranks import raise_on_all_ranks
from titanmoe.checkpoint.read_adapters import Adapters
from titanmoe.checkpoint.weight_digest import frozen_digest
from titanmoe.models.tensors import stored_name
from titanmoe.train.checkpoints import Checkpoints


class AdapterCheckpoints(Checkpoints):
    """Checkpoints of a run that trains LoRA adapters: adapters are saved and loaded, base weights only loaded."""

    def _start_without_checkpoint(self) -> dict[str, str]:
        notes = super()._start_without_checkpoint()
        self._record_base_digest()
        return self._load_peft_adapters(notes)

    def _start_from_checkpoint(self, beginning: StartPoint) -> dict[str, str]:
        if "base" in Checkpoint(beginning.path).record:
            self._load_base()
        notes = super()._start_from_checkpoint(beginning)
        return self._load_peft_adapters(notes) if beginning.model_only else notes

    def load(self, saved: Checkpoint, model_only: bool = False) -> list[str]:
        changes = super().load(saved, model_only)
        if "base" not in saved.record:
            self._record_base_digest()
        return changes

    def _refusals(self, saved: Checkpoint, now: Mapping[str, Any], model_only: bool) -> list[str]:
        problems, base = super()._refusals(saved, now, model_only), saved.record.get("base")
        if base is not None and base != self.run_record["base"]:
            problems.append(
                f"the adapters were trained on other weights (digest {base}, and here {self.run_record['base']}): name "
                "the same ones in checkpoint.initial_hf, or in checkpoint.load with model_only = true, and with the "
                "same training.mixed_precision_param"
            )
        return problems

    # ---- which tensors

    def _targets(self, with_moments: bool, base: bool = False) -> state.Targets:
        """Return this rank's shards of the adapters by name, or with `base` of the frozen base weights.

        Args:
            with_moments: whether to add the optimizer's moments of these weights.
            base: whether to return the base weights and the persistent buffers instead of the adapters.

        Returns:
            By "model.NAME" or "optimizer.MOMENT.NAME": the stored tensor's name, and a TensorShard in the live tensor's
                memory.
        """
        moments = self.optimizer.moments() if with_moments else None
        parameters = {name: p for name, p in self.parameters.items() if p.requires_grad != base}
        return state.shards_to_load(parameters, self.buffers if base else {}, moments, self.model.tie_embeddings)

    # ---- the weights under the adapters

    def _load_base(self) -> None:
        """Load the base weights in place: from checkpoint.initial_hf, or with model_only from checkpoint.load.

        Those that come from the seed are left as they are. Then record their digest. Collective over the world.

        Raises:
            ConfigError: the weights cannot be read or do not fit the model.
        """
        options = self.options
        if options.initial_hf:
            self.begin_from_hf()
        elif options.model_only:
            base = Checkpoint(self.choose_start(lambda: start_from_path(Path(options.load), self.find_damage)).path)
            if "base" not in base.record:
                self.load(base, model_only=True)
        self._record_base_digest()

    def _record_base_digest(self) -> None:
        """Store the digest of the base weights as `run_record["base"]`, part of every later checkpoint's record.

        Collective over the world.
        """
        frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}
        without_ties = {name: p for name, p in frozen.items() if name == stored_name(name, self.model.tie_embeddings)}
        self.run_record["base"] = frozen_digest(without_ties, self.group)

    # ---- adapters that PEFT made

    def _load_peft_adapters(self, notes: dict[str, str]) -> dict[str, str]:
        """Fill new adapters with those that PEFT saved in checkpoint.initial_adapter, if that option is set.

        Collective over the world.

        Args:
            notes: lines of the startup header so far, by label.

        Returns:
            `notes`, with where the adapters came from added to the line "begins from".

        Raises:
            ConfigError: on all ranks, if the adapters cannot be read, or do not fit the model, [lora] or its base.
        """
        if not (folder := self.options.initial_adapter):
            return notes
        from titanmoe.checkpoint.hf.peft_base import read_first_adapters

        adapters = raise_on_all_ranks(self.group, lambda: read_first_adapters(Path(folder), self.model, self.lora))
        compared = self._compare_base(adapters)
        for name, (_, shard) in self._targets(with_moments=False).items():
            fill_in_blocks(shard.tensor, shard.offset, adapters.tensors[name.removeprefix("model.")].read)
        origin = f"adapters of {folder}"
        if adapters.dropout != self.lora.dropout:
            origin += f", trained there with lora_dropout = {adapters.dropout:g}, and here {self.lora.dropout:g}"
        origin = f"{origin}\n{compared}"
        return notes | {"begins from": f"{notes['begins from']}\n{origin}" if "begins from" in notes else origin}

    def _compare_base(self, adapters: Adapters) -> str:
        """Compare the run's base weights with those that PEFT's adapters name, as far as both can be read.

        Collective over the world.

        Returns:
            A line for the startup header that says what was compared, such as weights, names or shapes alone.

        Raises:
            ConfigError: the weights differ, have another name and cannot be compared, or are random although the
                adapters name a model.
        """
        from titanmoe.checkpoint.hf.peft_base import compare_base, refuse_other_base
        from titanmoe.checkpoint.hf.weight_sources import open_weights

        under = base_weights_name(self.options)
        refuse_other_base(adapters, under)
        if under:
            return compare_base(adapters, open_weights(under, self.model), under, self.group)
        return "on random weights: its adapter_config.json names no base"
