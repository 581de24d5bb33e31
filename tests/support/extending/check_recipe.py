"""A run of the dispatcher, optimizer and family of docs/extending.md and docs/extending_families.md."""

import json

from tests import parity, world


def test_the_loss_falls(tmp_path):
    world.run(2, parity.train, ["--config", "train_configs/debug_small_moe.toml", "--job.dump_folder", str(tmp_path)])
    lines = (tmp_path / "debug_small_moe/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
