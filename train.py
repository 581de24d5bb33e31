"""torchrun --nproc-per-node 4 train.py --config train_configs/debug.toml [--table.field value ...]"""

import sys

from titanmoe.train.launch import main
from titanmoe.train.runtime import leave

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    leave(code)
