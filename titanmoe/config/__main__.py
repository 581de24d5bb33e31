"""Command `python -m titanmoe.config docs/config.md`: rewrite the tables of all fields between the page's markers."""

import sys
from pathlib import Path

from titanmoe.config.fields import update_page

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    page = Path(sys.argv[1])
    page.write_text(update_page(page.read_text(encoding="utf-8")), encoding="utf-8")
