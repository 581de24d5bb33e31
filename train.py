"""torchrun --nproc-per-node 4 train.py --config train_configs/debug.toml [--table.field value ...]

`titanmoe train train_configs/debug.toml` does the same, and its errors are easier to read.
"""

from titanmoe.rank import run

if __name__ == "__main__":
    run()
