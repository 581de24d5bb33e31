"""Write the model card (README.md) of an exported folder: what run made its weights, from its checkpoint's record.

Paths are shortened to their last part, since cards are published. The front matter is YAML, whose strings are JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.hf.fetch import HUB_NAME
from titanmoe.checkpoint.manifest import flatten_record

CARD = "README.md"
FIELDS = ("model.family", "training.objective", "training.seq_len", "training.global_batch_size", "training.epochs",
          "training.mixed_precision_param", "optimizer.name", "optimizer.lr", "optimizer.weight_decay", "lora.rank",
          "lora.experts_rank", "lora.alpha", "lora.rslora", "lora.dropout", "lora.targets", "data.format")  # fmt: skip
"""Fields of the recipe that the card names, those of [lora] with adapters alone."""


def model_card(record: Mapping[str, Any], base: str = "", adapter: bool = False) -> str:
    """Return the text of a model card; "" if the record is not that of a training run.

    Args:
        record: the record in a checkpoint's manifest, which may come from strangers.
        base: name of the weights that the run began from; "" for what its recipe says.
        adapter: whether the folder has adapters in PEFT's format instead of full weights.
    """
    if not record.get("tokens"):
        return ""
    config, trains_adapters = flatten_record(record.get("config", {})), "base" in record
    base = base or str(
        config.get("checkpoint.initial_hf")
        or (config.get("checkpoint.model_only") and config.get("checkpoint.load"))
        or ""
    )
    tags = ["titanmoe", "moe"] + ["lora"] * trains_adapters + ["dpo"] * (config.get("training.objective") == "dpo")
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": tags}
    if on_hub := bool(HUB_NAME.fullmatch(base)) and not Path(base).exists():
        front["base_model"] = base.partition("@")[0]
    begin = f"began from {_code(base if on_hub else _shortened(base))}" if base else "began from random weights"
    rows = {name: json.dumps(config[name]) for name in FIELDS if name in config}
    rows = {name: value for name, value in rows.items() if trains_adapters or not name.startswith("lora.")}
    paths = config.get("data.paths")
    names = map(str, paths if paths and isinstance(paths, list) else [config.get("data.source", "")])
    rows |= {
        "data": ", ".join(map(_shortened, names)),
        "steps": f"{record['step']:,}",
        "tokens": f"{record['tokens']:,}",
    }
    best = flatten_record({"best": record.get("best")})
    if isinstance(loss := best.get("best.value"), float):
        rows[f"best {best.get('best.metric')}"] = f"{loss:.4f} at step {best.get('best.step')}"
    rows |= record.get("versions", {})
    name = " ".join(str(config.get("job.name") or "model").split())
    table = "\n".join(f"| {_code(key)} | {_code(value)} |" for key, value in rows.items())
    matter = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return f"---\n{matter}\n---\n\n# {name}\n\nTrained with titanmoe; the run {begin}.\n\n| | |\n|---|---|\n{table}\n"


def write_model_card(folder: Path, card: str) -> None:
    """Write `card`, the text of a folder's model card, to its README.md, unless it is empty."""
    if card:
        layout.write_text(folder / CARD, card)


def _shortened(name: str) -> str:
    """Return the last part of a path or URL, and the name of a dataset on the hub (hf:...) as it is."""
    return name if name.startswith("hf:") else name.rstrip("/").rpartition("/")[2]


def _code(text: str) -> str:
    """Return a text as code within a cell of a table: in one line, with _ in place of backticks and pipes."""
    return f"`{re.sub(r'[`|]', '_', ' '.join(text.split()))}`"
