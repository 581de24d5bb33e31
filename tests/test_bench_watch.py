"""The parts of scripts/bench/watch_overhead.py."""

import json
import random
import sys
from pathlib import Path

import pytest

from tests import parity, world
from titanmoe.watch.numbers import checks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts/bench"))
import watch_overhead  # noqa: E402


def test_of_pairs_that_noise_has_spread_the_median_and_its_interval_remain():
    slow = [1 + 0.5 * (i % 7 == 0) + 0.01 * (i % 5) for i in range(100)]  # what else the machine does
    found = watch_overhead.ratio([(1.02 * noise, noise) for noise in slow])
    assert found["median"] == found["low"] == found["high"] == pytest.approx(0.02)
    spread = watch_overhead.ratio([(100 + i, 100.0) for i in range(100)])
    assert (spread["low"], spread["high"]) == pytest.approx((0.40, 0.60)) and spread["median"] == pytest.approx(0.495)


def test_what_a_step_costs_more_is_found_stretch_by_stretch_whatever_the_speed_of_the_machine():
    draw = random.Random(0)

    def step():
        speed = draw.uniform(0.5, 2)  # of this step; and each stretch has a length of its own
        coins = [draw.random() < 0.5 for _ in range(20)]
        noise = [draw.uniform(0.95, 1.05) * (10 if draw.random() < 0.02 else 1) for _ in coins]
        work = [(1e6 * (1 + k % 3) + 3e3 * heard) * noise[k] * speed for k, heard in enumerate(coins)]
        return [(heard, int(ns)) for heard, ns in zip(coins, work, strict=True)]

    gain, error = watch_overhead.longer([step() for _ in range(1500)] + [step()[:-1]])
    assert error < 20e-6 and gain == pytest.approx(20 * 3e-6 * 1.25, abs=3 * error)  # 1.25: the mean speed


def test_what_is_counted_adds_up(tmp_path):
    figures = {"message_s": 2e-6, "rule_s": 1e-3, "tick_s": 5e-4, "carry_s": 5e-3, "carried_bytes": 2**20}
    rehearsal, plan = tmp_path / "rank.json", tmp_path / "plan.json"
    messages = [{"count": 1000}, {"count": 500}]
    rehearsal.write_text(json.dumps({"ranks": [{"world": 1024, "messages": messages}]}))
    plan.write_text(json.dumps({"plan": {"step_s": 2.0}}))
    found = watch_overhead.by_count(rehearsal, plan, figures, 8)
    assert found["messages_there"] == 1500 and found["cost_there_s"] == pytest.approx(4e-3)
    assert found["share_there"] == pytest.approx(4e-3 / 2 + 5e-4 / 0.5 + 5e-3 / 5)
    assert found["requests_per_s"] == pytest.approx(128 * 2.2) and found["bytes_per_s"] == 128 * 2**20 / 5
    assert "share_there" not in watch_overhead.by_count(rehearsal, None, figures, 8)


def test_each_part_is_timed_alone(tmp_path):
    found = watch_overhead.parts(tmp_path, 2)
    assert all(0 < found[name] < 0.1 for name in ("message_s", "tick_s", "carry_s", "rule_s"))
    assert found["carried_bytes"] > 2 * 64 * 20
    assert watch_overhead.listener.issued.__module__ == "titanmoe.comm.listener", "nobody listens any more"
    text = "\n".join(watch_overhead.lines(found))
    assert "2 ranks' heartbeats" in text and "in all" not in text


def turns():
    watch_overhead.STEPS = 2
    options = {"data.source": "synthetic", "debug.replicas_every": 100, "optimizer.skip_spikes": 6.0}
    options |= {"training.steps": 1000, "lr_schedule.decay": "none"}
    return watch_overhead.in_turns(parity.make_trainer(parity.TINY | options, checks=checks), 0.01, 0.01)


def test_steps_in_turns_are_made_with_and_without_the_watch(tmp_path):
    first, second = world.run(2, turns)
    assert len(first["wall"]) == len(second["wall"]) >= 2 and first["messages"] == second["messages"] > 10
    assert first["cpu"] == second["cpu"] and first["compare_s"] > 0 and first["message_s"] > 0
    assert first["in_place_s"] == second["in_place_s"] and abs(first["in_place_s"]) < 0.1
    assert 0 < first["in_place_error_s"] == second["in_place_error_s"]
    assert watch_overhead.per_message(first) == first["in_place_s"] / first["messages"]
    text = "\n".join(watch_overhead.lines(watch_overhead.parts(tmp_path, 2) | first))
    assert "pairs of 10 steps" in text and "in all, " in text
