"""Rewrite the table of families and sizes between a page's two markers: python -m titanmoe.models docs/models.md."""

import sys
from pathlib import Path

from titanmoe.config.fields import replace_marked
from titanmoe.config.schema import Model
from titanmoe.models.count import flops_per_token, parameters
from titanmoe.models.families import names, preset

BEGIN, END = "<!-- sizes: written by `python -m titanmoe.models docs/models.md` -->", "<!-- end of sizes -->"


def renew(page: str) -> str:
    """Return the page's text with a new table between BEGIN and END; raise ValueError if it lacks them."""
    lines = [
        "| family | size | parameters | active per token | training GFLOPs per token at seq_len 4096 |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for family, sizes in names().items():
        for size in sizes:
            model = Model(**preset(family, size))
            count, gflops = parameters(model), flops_per_token(model, 4096) / 1e9
            lines.append(f"| {family} | {size} | {count.total:,} | {count.active:,} | {gflops:.3f} |")
    return replace_marked(page, BEGIN, END, "\n".join(["\n", *lines, "\n"]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    page = Path(sys.argv[1])
    page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
