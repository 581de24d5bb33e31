"""Trains one rank of a run; torchrun starts one process for each rank.

    torchrun --nproc-per-node 4 train.py --config train_configs/debug.toml [--table.field value ...]

`titanmoe train train_configs/debug.toml` starts the same ranks and prints the first error alone.
"""

from titanmoe.rank import run

if __name__ == "__main__":
    run()
