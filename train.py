"""torchrun --nproc-per-node 4 train.py --config train_configs/debug.toml [--table.field value ...]"""

import sys

from titanmoe.train.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
