"""The model to generate with: found in a run or a Hugging Face folder, with its tokenizer, and configured.

`titanmoe.generate.build_model` builds it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.full_model import FullModel, find_full_model
from titanmoe.config import ConfigError
from titanmoe.config.blocks import moe_layers
from titanmoe.config.component_kinds import ComponentError, Components
from titanmoe.config.schema import Config, Experts, Parallelism
from titanmoe.data.token_shards import is_shards, read_manifest
from titanmoe.data.tokenizer import FILE, Tokenizer, open_tokenizer
from titanmoe.fold.degrees import resolve_degrees
from titanmoe.fold.legality import model_violations
from titanmoe.models.families import FAMILIES, mixers
from titanmoe.models.mixers.mixer_spec import MixerSpec
from titanmoe.moe.score_functions import SCORE_FUNCTIONS

if TYPE_CHECKING:
    from titanmoe.checkpoint.read_adapters import Adapters

CACHES = {
    "titanmoe.models.attention:Attention": "titanmoe.generate.cached_attention:CachedKeys",
    "titanmoe.models.latent_attention:LatentAttention": "titanmoe.generate.cached_attention:CachedLatents",
    "titanmoe.models.linear_attention:GatedDelta": "titanmoe.generate.cached_state:CachedState",
}
"""The `titanmoe.generate.cache.Cache` for each mixer module, both as "module:NAME"."""


def cache_path(mixer: MixerSpec) -> str:
    """Return where the class of a mixer's cache is, as "module:NAME"; "" if the mixer has no cache.

    The mixer's spec may name one; else it follows from the mixer's module.
    """
    return mixer.cache or CACHES.get(mixer.implementation, "")


@dataclass(frozen=True)
class TrainedModel(FullModel):
    """A model to load, with adapters if there are any."""

    adapters: Adapters | None = None
    """Adapters on the weights; None without them."""
    base_name: str = ""
    """The name that the user gave for the base weights of adapters."""

    @property
    def tokenizer(self) -> Path | None:
        """Path of the tokenizer of the run with adapters, else of the checkpoint or folder of the weights; or None."""
        of_weights = (self.path, FILE if self.step is None else f"{layout.CARRIED}/{FILE}")
        of_adapters = (
            [(self.adapters.path, f"{layout.CARRIED}/{FILE}")] if self.adapters and self.adapters.config else []
        )
        for folder, name in (*of_adapters, of_weights):
            with suppress(*safe_files.NOT_FOUND_ERRORS):
                return safe_files.safe_path(folder, name)
        return None


def find_model(path: Path | None, adapter: Path | None = None) -> TrainedModel:
    """Find the weights and adapters that the command line names, without loading them.

    Base weights of adapters that the hub has are fetched into its cache.

    Args:
        path: a run, one of its checkpoints, or a Hugging Face folder; None for the adapters' own base weights.
        adapter: a run with adapters, one of its checkpoints, or a PEFT folder; None without adapters.

    Raises:
        ConfigError, CheckpointError: they do not exist, or are damaged.
    """
    if adapter is None:
        return TrainedModel(**vars(find_full_model(path)))
    from titanmoe.checkpoint.hf.fetch import weights_folder
    from titanmoe.checkpoint.hf.peft_read import is_peft
    from titanmoe.checkpoint.hf.weight_sources import is_hf, open_adapters, open_base_weights

    if not is_peft(adapter):
        adapter = layout.require_intact(latest_checkpoint(adapter))
    adapters, base_name = open_adapters(adapter, str(path or ""))
    open_base_weights(adapters, base_name)
    full = TrainedModel(**vars(find_full_model(weights_folder(base_name) if is_hf(base_name) else Path(base_name))))
    config = adapters.config or replace(full.config, lora=adapters.lora)
    identity = full.identity
    if adapters.config:
        identity = layout.read_manifest(adapter).record.get("loader", {}).get("tokenizer")
    return replace(full, config=config, identity=identity, adapters=adapters, base_name=base_name)


def tokenizer_of(trained: TrainedModel, name: str | None) -> Tokenizer:
    """Open the tokenizer to generate with: by name (a tokenizer.json, its folder or "bytes"), or the model's for None.

    The model's is the one stored with it or the recipe's data.tokenizer, whichever made the tokens it was trained on;
    where that is not recorded, data.tokenizer comes first, unless it is "bytes".

    Raises:
        ConfigError: it cannot be opened, or neither of the two made those tokens.
    """
    data, carried = trained.config.data, trained.tokenizer
    if name is not None:
        return open_tokenizer(name)
    shards = [path for entry in data.paths if is_shards(path := Path(entry).expanduser())]
    identity = trained.identity or (read_manifest(shards[0])["tokenizer"]["identity"] if shards else None)
    if identity is None and data.tokenizer != "bytes":
        return open_tokenizer(data.tokenizer)
    own_tokenizer = open_tokenizer(str(carried)) if carried and identity != "bytes" else open_tokenizer("bytes")
    if identity in (None, own_tokenizer.identity):
        is_of_run = trained.step is not None or (trained.adapters and trained.adapters.config)
        if not is_of_run and not carried:
            raise ConfigError(f"{trained.path} has no {FILE}: name one with --tokenizer, or its folder, or bytes")
        return own_tokenizer
    if data.tokenizer != "bytes" and (data_tokenizer := open_tokenizer(data.tokenizer)).identity == identity:
        return data_tokenizer
    raise ConfigError(
        f"the run read token shards of the tokenizer {identity}, which is not with the checkpoint: name it with "
         f"--tokenizer (a {FILE} or its folder)"
    )  # fmt: skip


def chat_template_of(trained: TrainedModel, tokenizer: Tokenizer) -> str:
    """Return the path of the model's chat template; "" for the one beside `tokenizer`, as in checkpoints."""
    carried = trained.tokenizer is not None and getattr(tokenizer, "file", None) == trained.tokenizer
    return "" if carried else trained.config.data.chat_template


def samples_config(config: Config, world: int, device: str) -> Config:
    """Return the config that completes prompts in the middle of a run, on the same `world` ranks.

    Attention has the run's tp and neither pp nor cp. Experts are divided among as many ranks as divide them, for the
    least memory.

    Raises:
        ConfigError: the model cannot generate.
    """
    degrees, _ = resolve_degrees(world, config.parallelism)
    experts, etp, ep = config.model.num_experts, degrees["etp"], degrees["ep"]
    if moe_layers(config.model):
        ep = max(n for n in range(1, experts + 1) if experts % n == 0 and world % (n * etp) == 0)
    return config_to_run(config, world, degrees | {"pp": 1, "cp": 1, "ep": ep}, None, device)


def generation_config(config: Config, world: int, device: str) -> Config:
    """Return the config that generates completions for [rl] on the run's ranks, mapped by [generation.parallelism].

    Raises:
        ConfigError: the model cannot generate, or the mapping does not fit.
    """
    return config_to_run(config, world, {"pp": 1, "cp": 1, **vars(config.generation.parallelism)}, None, device)


def config_to_run(
    trained_config: Config, world: int, degrees: dict[str, int], dtype: str | None, device: str
) -> Config:
    """Return the config to generate with: mapping, dtype and device as given; what only training needs is default.

    Multi-token prediction is left out. Weights are replicated over data ranks.

    Args:
        trained_config: the config that the model was trained with.
        world: number of ranks.
        degrees: pp, cp, tp, ep and etp by name; pp and cp have to be 1.
        dtype: dtype of weights and computation; None for that of training.
        device: training.device.

    Raises:
        ConfigError: with every problem, such as degrees that do not fit.
    """
    problems = [
        f"parallelism.{name} = {degrees[name]}: {why}, so generating needs {name} = 1; tp, ep and etp split the model"
        for name, why in (
            ("pp", "a token passes all stages before the next can start, so the others would wait"),
            ("cp", "a sequence has one new token at a time, and nothing to split"),
        )
        if degrees[name] != 1
    ]
    tp, ep, etp = (degrees[name] for name in ("tp", "ep", "etp"))
    training = replace(
        Config().training,
        dtype=dtype or trained_config.training.mixed_precision_param,
        mixed_precision_param=dtype or trained_config.training.mixed_precision_param,
        seq_len=max(tp, 1),  # its laws only ask for a multiple of tp
        device=device,
    )
    # Dropless, and the choice is the router's alone: what training adds to it is not part of the model. What rules out
    # a default is kept if the run chose it.
    plain_choices = {"grouped_mm": "loop", "kernels": "torch", "router_product": "float32"}
    choices = {name: value for name, value in plain_choices.items() if getattr(trained_config.moe, name) == value}
    moe = replace(Config().moe, router_dtype=trained_config.moe.router_dtype, **choices)
    model = replace(trained_config.model, mtp_depth=0)
    config = Config(model=model, training=training, moe=moe, components=Components((FAMILIES, SCORE_FUNCTIONS)))
    try:
        without_cache = {mixer.name for mixer in mixers(model) if not cache_path(mixer)}
    except ComponentError as error:
        raise ConfigError(str(error)) from None
    problems += [
        f'model.family = "{model.family}" has {name}, which has no cache for earlier tokens: it cannot generate'
        for name in sorted(without_cache)
    ]
    resolved, mapping_problems = resolve_degrees(world, Parallelism(tp=tp, experts=Experts(ep=ep, etp=etp)))
    problems += mapping_problems
    edp = resolved.pop("edp", 1)  # its laws are about sharded weights, and these are not
    problems += model_violations(resolved, config)
    if problems:
        raise ConfigError(problems)
    experts = Experts(ep=ep, etp=etp, edp=1, edp_replicate=edp * resolved["edp_replicate"])
    parallelism = Parallelism(tp=tp, dp_shard=1, dp_replicate=resolved["dp"], experts=experts)
    return replace(config, lora=trained_config.lora, parallelism=parallelism)
