"""torchrun --nproc-per-node 4 train.py --config train_configs/debug.toml [--table.field value ...]"""

import gc
import sys

gc.disable()  # imports make much that stays and hardly any garbage: collecting takes a fifth of their time

from titanmoe.train.launch import main  # noqa: E402
from titanmoe.train.runtime import leave  # noqa: E402

gc.enable()

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    leave(code)
