"""Command `python -m titanmoe.config PAGE...`: rewrite the tables between markers in pages of docs/.

docs/config.md has all fields; docs/from_megatron.md and docs/from_torchtitan.md have other trainers' names of them.
"""

import sys
from pathlib import Path

from titanmoe.config import fields, other_names

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for page in map(Path, sys.argv[1:]):
        text = fields.update_page(page.read_text(encoding="utf-8"))
        page.write_text(other_names.update_page(text), encoding="utf-8")
