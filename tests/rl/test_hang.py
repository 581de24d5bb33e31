"""Ranks of a run of reinforcement learning that hang while they generate, or wait for a reward that never comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import parity
from tests.rl.test_odd_steps import RUN
from tests.support import processes

STUCK = """
import sys, time
from titanmoe import rank
from titanmoe.generate.loop import Generator
from titanmoe.rl import policy_trainer, rewards

def stuck(whole, is_due):
    def call(self, *args):
        while is_due(self, *args):
            time.sleep(60)
        return whole(self, *args)
    return call

if sys.argv.pop(1) == "generate":
    is_due = lambda self, work: work.sampling.step == 2 and self.meshes.world.rank == 1
    Generator._advance = stuck(Generator._advance, is_due)
else:
    policy_trainer.START_S = 0
    seen = []
    rewards._Worker.reward = stuck(rewards._Worker.reward, lambda *_: seen.append(1) or len(seen) > 6)
rank.run()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
@pytest.mark.parametrize(("phase", "rank", "place"), [("generate", 1, ""), ("reward", 0, "_broadcast_rewards")])
def test_the_phase_and_rank_that_hang_are_named(phase: str, rank: int, place: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 +"}\n{"prompt": "2 +"}\n')
    (tmp_path / "stuck.py").write_text(STUCK)
    changes = parity.TINY | RUN | {"rl.prompts": [str(tmp_path / "prompts.jsonl")], "training.steps": 9}
    changes |= {"rl.reward": "tests.support.odd_rewards:remainder", "rl.reward_timeout_s": 1.0, "training.timeout_s": 4}
    changes |= {"parallelism.experts.ep": 2, "job.dump_folder": str(tmp_path), "metrics.tensorboard": False}
    argv = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    argv += [str(tmp_path / "stuck.py"), phase, "--config", "train_configs/debug.toml", *parity.arguments(changes)]
    done = processes.Started(argv, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, forks=True).wait(120)
    first, _, third, *more = done.stderr.partition("error: hang: ")[2].splitlines() or [done.stderr] * 3
    assert first.startswith(f"rank {rank} on ") and "(and rank" not in first, done.stderr
    assert third.strip().startswith(f"step 2, {phase}; no progress for"), third
    assert place in "".join(more[:2])
