"""Where a step of four recipes goes on H100s, by the planner: seconds of each part, as docs/benchmarks.md has them.

    python scripts/price_parts.py            write both tables there

Of each model the shipped recipe, the fastest mapping that the planner finds for its GPUs and batch, and, where
TorchTitan has the model, its layers under the recipe's mapping. Then, of recipes with a newer mapping, what each step
on the way changed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from scripts.planner_page import between, table_of  # noqa: E402
from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.config.load import load, read_draft  # noqa: E402
from titanmoe.config.recipe import find_recipe  # noqa: E402
from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.config.world_size import recipe_ranks  # noqa: E402
from titanmoe.fold.degrees import Fold  # noqa: E402
from titanmoe.plan.cost import Cost  # noqa: E402
from titanmoe.plan.devices import read_device  # noqa: E402
from titanmoe.plan.dispatch_costs import DispatchChoice  # noqa: E402
from titanmoe.plan.links import Factors  # noqa: E402
from titanmoe.plan.price import Price, Pricer  # noqa: E402
from titanmoe.plan.search import evaluate, search  # noqa: E402

RECIPES = {
    "mixtral_8x7b": "Mixtral-8x7B",
    "mixtral_8x22b": "Mixtral-8x22B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "deepseek_671b": "DeepSeek-V3",
}
H100 = read_device("h100")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
MARK = "<!-- from here: python scripts/price_parts.py -->\n"
STEPS_MARK = "<!-- step by step, from here: python scripts/price_parts.py -->\n"
COLUMNS = {
    "products": ("matrix work",),
    "attention": ("attention",),
    "rows": ("rows to experts and back",),
    "host": ("waiting for the host",),
    "copies": ("copies of weights",),
    "memory-bound": ("memory-bound work",),
    "tp, cp": ("messages of tp", "messages of cp"),
    "dp": ("weights and gradients",),
    "pp": ("messages of pp",),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
}
"""By the head of a column: what it adds up of a price's components."""
LOST = ("rows", "host", "copies")
HEAD = ("run", "mapping", "step", "MFU", *COLUMNS, ", ".join(LOST))
TIMES_AS_MUCH = {
    "qwen3_30b_a3b": ((839 / 194, 1369 / 393), (58 + 65) / (33 + 40)),
    "deepseek_671b": ((2305 / 698, 4014 / 1473), (64 + 76) / (43 + 56)),
}
"""What TorchTitan's layer has of titanmoe's: bytes outside products and attention, forward and backward, and kernels,
as scripts/bench/roofline.py counts both."""


WHOLE = "--moe.overlap=none"
STEPS = {
    "mixtral_8x7b": {
        "gradients added in a pass of their own": (),
        "inside the products (off by default)": ("--moe.accumulate_weight_gradients=true", "--compile.enable=false"),
    },
    "gpt_oss_20b": {
        "one sample at a time": ("--training.local_batch_size=1", WHOLE),
        "two": (WHOLE,),
        "two, in halves": (),
    },
    "qwen3_235b_a22b": {
        "a pipeline": (
            *("--parallelism.pp=16", "--parallelism.tp=4", "--training.local_batch_size=1", WHOLE),
            "--activation_checkpoint.mode=none",
        ),
        "none": (WHOLE,),
        "none, in halves": (),
    },
    "olmoe_7b_a1b": {
        "weights freed in forward": ("--parallelism.reshard_after_forward=auto",),
        "kept": (),
    },
}
"""What led to a recipe's mapping, as changes of the recipe."""


class TorchTitan(Pricer):
    """Prices TorchTitan's layers under titanmoe's mapping, schedule and rules, with the same messages; FSDP2 has its
    experts, and recomputation goes through the combine."""

    def __init__(self, recipe: str, config: Config):
        super().__init__(config, H100, Factors())
        self.moved, self.kernels = TIMES_AS_MUCH[recipe]

    def attention_and_ffn(
        self, fold: Fold, samples: int, layer: int, choice: DispatchChoice
    ) -> tuple[tuple[Cost, Cost], ...]:
        both = super().attention_and_ffn(fold, samples, layer, choice)
        return tuple(
            tuple(
                cost._replace(memory=cost.memory * moved, host=cost.host * self.kernels)
                for cost, moved in zip(part, self.moved, strict=True)
            )
            for part in both
        )

    def leaves_out_experts(self, config: Config, fold: Fold) -> bool:
        return False

    def experts_again(self, forward: Cost, mode: str, *degrees: Any) -> Cost:
        return forward


def degrees(config: Config, fold: Fold) -> str:
    attention = " ".join(f"{axis} {n}" for axis in ("pp", "cp", "tp") if (n := getattr(fold, axis)) > 1)
    experts = " ".join(f"{axis} {n}" for axis in ("ep", "etp") if (n := getattr(fold, axis)) > 1)
    mode = config.activation_checkpoint.mode
    more = ", halves" * (config.moe.overlap == "halves")
    if (kept := config.parallelism.reshard_after_forward) != "auto":
        more += f", reshard {kept}"
    return f"{attention or '1'} / {experts or '1'}, {config.training.local_batch_size}, {mode}{more}"


def cells(name: str, config: Config, fold: Fold, price: Price) -> tuple[str, ...]:
    parts = [sum(price.components.get(part, 0.0) for part in parts) for parts in COLUMNS.values()]
    lost = sum(part for head, part in zip(COLUMNS, parts, strict=True) if head in LOST)
    return (
        name,
        degrees(config, fold),
        f"{price.step:.2f}",
        f"{price.mfu:.1%}",
        *(f"{part:.2f}" if part else "" for part in parts),
        f"{lost / price.step:.1%}",
    )


def own_rows(recipe: str) -> list[tuple[str, ...]]:
    """Of TorchTitan's layers, where it has the model, and of the recipe."""
    config, world = read(recipe)
    mapping, model = evaluate(config, world, H100, Factors()), RECIPES[recipe]
    config, fold = mapping.config, mapping.fold
    rows = [cells(f"{model}, recipe", config, fold, mapping.price)]
    if recipe in TIMES_AS_MUCH:
        rows.insert(0, cells(f"{model}, TorchTitan", config, fold, TorchTitan(recipe, config).price(config, fold)))
    return rows


def best_row(recipe: str) -> tuple[str, ...]:
    best = search(*read(recipe), H100, Factors(), 1).best[0]
    return cells(f"{RECIPES[recipe]}, best", best.config, best.fold, best.price)


def step_rows(recipe: str) -> list[tuple[str, ...]]:
    rows = []
    for name, changed in STEPS[recipe].items():
        mapping = evaluate(*read(recipe, *changed), H100, Factors())
        rows.append(cells(f"{recipe}: {name}", mapping.config, mapping.fold, mapping.price))
    return rows


def read(recipe: str, *changed: str) -> tuple[Config, int]:
    path = str(find_recipe(recipe))
    return load(["--config", path, *changed], COMPONENTS, lambda config: []), recipe_ranks(
        read_draft([path], COMPONENTS)
    )


def main() -> None:
    steps = [row for recipe in STEPS for row in step_rows(recipe)]
    between(PAGE, STEPS_MARK, "\n" + "\n".join(table_of(HEAD, steps)) + "\n")
    rows = [row for recipe in RECIPES for row in (*own_rows(recipe), best_row(recipe))]
    between(PAGE, MARK, "\n" + "\n".join(table_of(HEAD, rows)) + "\n")


if __name__ == "__main__":
    main()
