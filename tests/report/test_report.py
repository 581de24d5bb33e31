"""titanmoe report: what is on the page and in the PNGs, for all sorts of odd runs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanmoe.cli import main
from titanmoe.config.fields import to_toml
from titanmoe.config.schema import Config, Training
from titanmoe.load_colours import opaque_colours, transparent_colours
from titanmoe.report.charts import (
    POINTS,
    Curve,
    Mark,
    correlations,
    curves_chart,
    number,
    percent,
    rank_correlation,
    ranks_sheet,
    relative_load,
    smooth,
    thin,
    ticks,
)
from titanmoe.report.draw import Area, Picture, Sheet, Stroke, Words, svg
from titanmoe.report.page import event_marks, sheets
from titanmoe.report.read_run import read_runs

ENVIRONMENT = {"ranks": 4, "device": "CPU", "torch": "2.13.0", "command": "titanmoe train <debug>"}


def line(step: int, **more: Any) -> dict[str, Any]:
    values = {"step": step, "loss": 2 + 4 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 5000.0 + step}
    values |= {"step_time_s": 0.5, "memory_gib": 0.4, "imbalance": 1.5, "router_entropy": 2.0, "dropped_fraction": 0.0}
    times = {"data": 0.05, "forward_backward": 0.4, "optimizer": 0.05, "dispatch": 0.1}
    return values | {f"time.{name}": seconds for name, seconds in times.items()} | more


def make_run(folder: Path, steps: int = 40, config: Config | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True)
    config = config or Config()
    config.parallelism.tp, config.parallelism.experts.ep, config.training.steps = 2, 4, steps
    (folder / "config.toml").write_text(to_toml(config))
    lines = [line(step, **more) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    loads = [{"step": s, "load": {"0": [s, 10, 10, 0], "1": [10, 10, 10, 10]}} for s in range(1, steps + 1)]
    (folder / "experts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in loads))
    events = [
        {"step": 0, "kind": "start", "text": "4 ranks on CPU", "environment": ENVIRONMENT},
        {"step": 20, "kind": "spike", "text": "loss <9> & above"},
        {"step": 30, "kind": "restart", "text": "goes on after step 30", "environment": ENVIRONMENT},
    ]
    times = [event | {"time": "2026-01-02T03:04:05+00:00"} for event in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in times))
    return folder


def test_one_run_on_one_page_that_needs_no_network(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report/report.html\n"
    html = (run / "report" / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:image/png;base64,)', html) and "http" not in html.replace(
        "http://www.w3.org/2000/svg", ""
    )
    for part in (
        "Gradient norm",
        "forward and backward 80%",
        "of which dispatch in forward 20%",
        "dp_shard 2 tp 2 / ep 4",
    ):
        assert part in html
    for part in (
        "2026-01-02 03:04",
        "<dd>0:00:20</dd>",
        "<code>titanmoe train &lt;debug&gt;</code>",
        "loss &lt;9&gt; &amp; above",
        "goes on after step 30",
        "experts held",
        "[parallelism.experts]",
        "2.1000",
    ):
        assert part in html
    assert "MFU</dt>" not in html and ">Dropped<" not in html  # neither is known
    drawings = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html)]
    assert len(drawings) == 11  # nine charts, and the load of two layers
    spoken = [text.text for text in drawings[0].iter("text")]
    assert "spike" in spoken and "restart" in spoken
    heat = [text.text for text in drawings[-1].iter("text")]
    assert heat == ["0", "2", "3", "step 1", "40"], "experts at the left, steps below"


def test_the_time_of_every_rank_is_drawn(tmp_path):
    run = make_run(tmp_path / "run")
    seconds = {"compute": [1.0, 1.0, 1.0, 2.0], "data": [0.0, 0.0, 0.0, 1.0], "ep": [2.0, 2.0, 2.0, 0.0]}
    lines = [{"step": 1, "seconds": {"compute": [1.0, 1.0], "data": [0.0, 0.0]}}, {"step": 2, "seconds": {"ep": [1]}}]
    lines += [{"step": step, "seconds": seconds} for step in range(3, 41)]
    (run / "ranks.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    event = {"step": 22, "kind": "straggler", "text": "rank 3 is slow", "time": "2026-01-02T03:04:05+00:00"}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (read,) = read_runs([run])
    assert read.busy_steps == list(range(3, 41)), "not those on other ranks, nor a line without them"
    assert read.busy_RC.tolist() == [[1.0] * 38] * 3 + [[3.0] * 38] and len(read.warnings) == 1
    sheet = ranks_sheet(read)
    (picture,) = (mark for mark in sheet.marks if isinstance(mark, Picture))
    blue, red = picture.rgba[0, 0], picture.rgba[3, 0]
    assert blue[2] > blue[0] and red[0] > red[2] and red[3] == 255, "twice the mean of all is the full red"
    (line,) = (mark for mark in sheet.marks if isinstance(mark, Stroke))
    assert line.points[0][0] == pytest.approx(40 + 800 * 19 / 38) and line.role == "event"
    assert [mark.text for mark in sheet.marks if isinstance(mark, Words)][2:] == ["0", "2", "3", "step 3", "40"]
    assert main(["report", str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    assert "Time of every rank" in html and "rank 3 is slow" in html
    assert "straggler" in [mark.text for mark in event_marks(read)]


def test_several_runs_are_compared(tmp_path):
    config = Config()
    config.optimizer.lr = 0.125
    first = make_run(tmp_path / "a" / "run", mfu=0.4)
    second = make_run(tmp_path / "b" / "run", 20, config, dropped_fraction=0.1)
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<td>optimizer.lr</td><td>0.0003</td><td>0.125</td>" in html
    assert "<td>optimizer.beta1" not in html
    for part in (
        "MFU",
        "Dropped",
        f"Where a step&#x27;s time goes: {first}",
        f"Where a step&#x27;s time goes: {second}",
    ):
        assert part in html


def test_a_run_cut_short_or_of_another_version_is_drawn_as_far_as_it_is_known(tmp_path):
    run = make_run(tmp_path / "run", 3)
    (run / "metrics.jsonl").write_text(
        json.dumps(line(1)) + "\n" + json.dumps(line(2, loss=None, nonfinite={"loss": "nan"})) + '\n{"step": 3, "lo'
    )
    (run / "config.toml").write_text("[model]\nno_such_key = 1\n")
    for name in ("experts.jsonl", "events.jsonl"):
        (run / name).unlink()
    assert main(["report", str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    assert "not finite" in html and "no_such_key" in html


def test_malformed_lines_are_reported_by_kind_and_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run", 3)
    bad = ["{", "nonsense", "[" * 9999, '{"a":' * 99 + "1" + "}" * 99, "[]", "7", '{"step": "x", "loss": 1}']
    bad += ['{"step": 4}', '{"step": 4, "loss": "low"}', '{"step": 1e999, "loss": 1}', '{"step": 4, "loss": [1]}']
    with (run / "metrics.jsonl").open("ab") as file:
        file.write("".join(text + "\n" for text in bad).encode() + b"\xff\n")
        file.write(json.dumps(line(4, memory_gib="much", imbalance=10**400, mfu=True)).encode() + b'\n{"step": 5, "lo')
    with (run / "experts.jsonl").open("a") as file:
        for load in ({}, [], {"0": [1], "1": [1]}, {"x": [1]}, {"0": ["a"] * 4, "1": [1] * 4}):
            file.write(json.dumps({"step": 4, "load": load}) + "\n")
    with (run / "events.jsonl").open("a") as file:
        for event in ({"kind": "x"}, {"kind": "start", "text": "", "time": "", "environment": {"ranks": 0}}):
            file.write(json.dumps({"step": 4} | event) + "\n")
    (run / "config.toml").write_text("a = " + "[" * 2000 + "]" * 2000)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {run}/metrics.jsonl: 3 lines are not JSON: left out",
        f"warning: {run}/metrics.jsonl: 2 lines are nested more than 64 deep: left out",
        f"warning: {run}/metrics.jsonl: 7 lines are not what titanmoe writes there: left out",
        f"warning: {run}/events.jsonl: 2 lines are not what titanmoe writes there: left out",
        f"warning: {run}/experts.jsonl: 5 lines are not what titanmoe writes there: left out",
        f"warning: {run}/config.toml: is not TOML: tables or lists are nested more than 16 deep, which no field needs: "
        "remove brackets or dots",
    ]
    (read,) = read_runs([run])
    assert [line["step"] for line in read.lines] == [1, 2, 3, 4] and "mfu" not in read.lines[-1]
    (run / "metrics.jsonl").write_text("nonsense\n")
    assert main(["report", str(run)]) == 2
    assert "metrics.jsonl: 1 line is not JSON: left out" in capsys.readouterr().err


def test_folders_that_are_not_runs_are_reported_at_once(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path / "gone"), str(tmp_path / "empty")]) == 2
    printed = capsys.readouterr().err
    assert "2 problems" in printed and "gone has no metrics.jsonl" in printed and "has no lines yet" in printed
    assert main(["report", *["x"] * 9]) == 2
    assert "name 8 or fewer" in capsys.readouterr().err


def test_a_long_run_of_many_experts_stays_small(tmp_path):
    run = make_run(tmp_path / "run", 2)
    lines = [json.dumps(line(step)) for step in range(1, 5001)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    draw = np.random.default_rng(0)
    loads = [
        {"step": step, "load": {str(layer): draw.integers(0, 99, 256).tolist() for layer in range(4)}}
        for step in range(1, 251)
    ]
    (run / "experts.jsonl").write_text("\n".join(map(json.dumps, loads)))
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "report.html").stat().st_size < 1_500_000


def test_every_curve_is_on_its_sheet(tmp_path):
    runs = read_runs([make_run(tmp_path / "a_run_of_a_long_name", 5), make_run(tmp_path / ("b" * 60), 500)])
    for name, sheet in sheets(runs).items():
        for mark in sheet.marks if sheet else ():
            if isinstance(mark, Stroke | Area):
                xs, ys = zip(*mark.points, strict=True)
                assert min(xs) >= 0 and max(xs) <= sheet.width and min(ys) >= 0 and max(ys) <= sheet.height, name


def test_the_loss_of_dpo_is_per_pair(tmp_path):
    pairs = make_run(tmp_path / "pairs", config=Config(training=Training(objective="dpo")), val_loss=0.5)
    tokens = make_run(tmp_path / "tokens", val_loss=2.0)
    for runs, unit in (
        ([pairs], "nats per pair"),
        ([tokens], "nats per token"),
        ([pairs, tokens], "nats per token, or per pair"),
    ):
        drawn = sheets(read_runs(runs))
        for name in ("loss", "loss_narrow", "val_loss"):
            assert f">{unit}<" in svg(drawn[name])


def test_the_largest_logit_is_drawn_if_it_was_measured(tmp_path):
    measured = read_runs([make_run(tmp_path / "measured", max_logit=30.0)])
    for runs, drawn in ((measured, True), (read_runs([make_run(tmp_path / "other")]), False)):
        assert (sheets(runs)["max_logit"] is not None) == drawn


def test_what_happened_is_marked_with_what_changed(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    two_ranks, one_rank = ENVIRONMENT | {"ranks": 2}, ENVIRONMENT | {"ranks": 1}
    run.events += [{"step": 33, "kind": "restart", "text": "", "time": "", "environment": two_ranks}]
    run.events += [{"step": 35, "kind": "collapse", "text": "", "time": ""}]
    run.events += [{"step": 36, "kind": "restart", "text": "", "time": "", "environment": one_rank}]
    marks = [(mark.step, mark.text, mark.role) for mark in event_marks(run)]
    assert marks[:2] == [(20, "spike", "event"), (30, "restart", "muted")]
    assert marks[2:4] == [(33, "restart: 4 -> 2 ranks", "muted"), (35, "collapse", "event")]
    assert marks[4:] == [(36, "restart: 2 -> 1 rank", "muted")]
    run.events = run.events[-1:]
    assert [mark.text for mark in event_marks(run)] == ["restart"], "the ranks before are unknown"


def test_the_texts_of_marks_lie_inside_their_chart_and_not_on_each_other():
    curve = Curve("a", [1.0, 40.0], [2.0, 1.0], "c0")
    marks = [Mark(step, "restart: 4 -> 2 ranks", "muted") for step in (40, 1, 35, 14, 15)]
    sheet = curves_chart("Loss", "", [curve], marks=marks)
    boxes = []
    for words in sheet.marks:
        if isinstance(words, Words) and words.text.startswith("restart"):
            wide = 0.6 * words.size * len(words.text)
            left = words.x - (wide if words.anchor == "end" else 0)
            assert left >= 0 and left + wide <= sheet.width
            assert all(y != words.y or abs(x - left) > wide for x, y in boxes)
            boxes.append((left, words.y))
    assert len(boxes) == len(marks)


def test_a_curve_of_few_points_shows_each():
    sheet = curves_chart("Validation loss", "", [Curve("run", [10.0, 20.0], [3.0, 2.0], "c0")])
    assert sum(isinstance(mark, Area) for mark in sheet.marks) == 2
    sheet = curves_chart("Loss", "", [Curve("run", [float(x) for x in range(99)], [2.0] * 99, "c0")])
    assert not any(isinstance(mark, Area) for mark in sheet.marks)


def test_nothing_on_the_page_is_wider_than_a_phone(tmp_path):
    run = make_run(tmp_path / ("r" * 90))
    assert main(["report", str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    assert "overflow-wrap:anywhere" in html and "minmax(min(260px,100%),1fr)" in html
    body = html.partition("<main>")[2]
    for tag in ("<table", '<pre class="fold"'):
        assert all('class="scroll' in before[-60:] for before in body.split(tag)[:-1]), f"{tag} scrolls by itself"


def test_numbers_and_ticks_are_round():
    assert [number(x) for x in (0, 6699, 1.5e9, 3e-4, 0.25, 12.5)] == ["0", "6.7k", "1.5G", "3e-4", "0.25", "12.5"]
    assert [number(x) for x in (999.4, 999.6, 999_600, -2e12)] == ["999", "1k", "1M", "-2T"]
    assert [percent(x) for x in (0.413, 0.0261, 5.1e-6, 0.0)] == ["41%", "2.6%", "<0.1%", "0%"]
    assert ticks(0.3, 9.1) == [2.5, 5.0, 7.5] and ticks(1, 80, 6) == [20, 40, 60, 80] and ticks(3, 3) == [3]
    assert smooth([1.0] * 100) == pytest.approx([1.0] * 100)


def test_thinning_keeps_every_spike():
    y = [1.0] * 10000
    y[1234], y[8765] = 50.0, -7.0
    points = thin(list(range(10000)), y)
    assert len(points) <= POINTS and (1234, 50.0) in points and (8765, -7.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_a_dead_expert_and_a_hot_one_are_seen_among_hundreds():
    load = np.full((256, 1000), 10.0)
    load[17], load[200] = 0.0, 80.0
    share = relative_load(load)
    assert share.shape == (64, 240)
    assert share[17 // 4].max() < 0.1 and share[200 // 4].min() > 7


def test_colours_of_loads():
    share = np.array([0.0, 0.25, 1.0, 4.0, 100.0])
    assert opaque_colours(share).tolist()[2] == [240, 239, 236]
    rgba = transparent_colours(share)
    assert rgba[:, 3].tolist() == [255, 255, 0, 255, 255]
    assert (rgba[1] == rgba[0]).all() and (rgba[3] == rgba[4]).all() and rgba[1, 2] > rgba[3, 2]


def test_every_kind_of_mark_is_drawn():
    square = [(10.0, 10.0), (30.0, 10.0), (30.0, 30.0), (10.0, 30.0)]
    red = np.zeros((2, 2, 4), np.uint8)
    red[...] = 255, 0, 0, 255
    across = Stroke([(0, 50), (100, 50)], "ink", 4)
    marks = [Area(square, "c0"), across, Picture(60, 5, 20, 20, red), Words(5, 90, "<a>")]
    sheet = Sheet(100, 100, "a & b", [*marks, Stroke([(50, 0), (50, 40)], "event", 2, dash=True)])
    tree = ElementTree.fromstring(svg(sheet))
    assert [child.tag for child in tree] == ["polygon", "polyline", "image", "text", "polyline"]


def test_a_rank_correlation_is_spearmans():
    assert rank_correlation(np.array([1, 5, 9]), np.array([2, 3, 99])) == 1
    assert rank_correlation(np.array([1, 5, 9]), np.array([3, 2, 1])) == -1
    # Ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3: 4.5 / sqrt(4.5 * 5).
    assert rank_correlation(np.array([0, 4, 4, 7]), np.array([1, 2, 3, 4])) == pytest.approx(4.5 / 22.5**0.5)
    assert rank_correlation(np.array([1, 1]), np.array([1, 2])) is None


def test_a_quiz_of_an_earlier_version_is_read(tmp_path):
    run = make_run(tmp_path / "asked", 3, **{"answers.trivia.margin": 0.5, "answers_s": 2.0})
    line = {key: [1, 2] for key in ("bits_per_byte", "margin", "accuracy", "accuracy_norm")}
    (run / "quiz.jsonl").write_text(json.dumps({"step": 1, "task": "trivia"} | line) + "\n")
    (read,) = read_runs([run])
    assert read.series("quiz.trivia.margin")[1] == [0.5] * 3 and read.series("quiz_s")[1] == [2.0] * 3
    assert read.quiz["trivia"][1]["margin"].tolist() == [1, 2]


def test_answers_are_drawn_with_how_early_they_rank_questions_as_in_the_end(tmp_path, capsys):
    means = {f"quiz.trivia.{name}": 0.5 for name in ("bits_per_byte", "margin", "accuracy", "accuracy_norm")}
    run = make_run(tmp_path / "asked", 3, **means)
    rows = [([3, 2, 1], [1, 0, 0]), ([1, 3, 2], [0, 0, 0]), ([1, 2, 3], [0, 1, 1])]
    lines = [
        {"step": step, "task": "trivia", "bits_per_byte": x, "margin": x, "accuracy": right, "accuracy_norm": right}
        for step, (x, right) in enumerate(rows, 1)
    ]
    odd = [{"step": 2, "task": "trivia", "margin": [1]}, lines[0] | {"step": 0, "margin": [1, 2]}]
    (run / "quiz.jsonl").write_text("\n".join(json.dumps(x) for x in [*lines, *odd]) + "\n")
    (read,) = read_runs([run])
    assert correlations(read, "trivia", "margin") == ([1, 2, 3], [-1, 0.5, 1])
    assert correlations(read, "trivia", "accuracy") == ([1, 3], [-1, 1])  # all wrong at step 2
    assert "2 lines are not what titanmoe writes there" in read.warnings[0]
    assert main(["report", str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    for part in ("Quiz: trivia", "Bits per byte", "Margin: early signal", "rank correlation with the last step"):
        assert part in html


def test_rewards_and_sampled_completions_are_drawn(tmp_path, capsys):
    policy = {"policy.entropy": 1.0, "policy.clipped": 0.1, "policy.kl": 0.01, "policy.mismatch": 1e-3}
    run = make_run(tmp_path / "run", **policy, **{"rl.reward": 0.625, "rl.length": 12.0, "val_reward": 0.5})
    lines = [
        {"step": step, "prompt": 3, "text": f"prompt {step}", "completion": f"<{step}>", "reward": step % 2 or None}
        for step in range(1, 9)
    ]
    lines[0]["answer"] = lines[0].pop("completion")  # as earlier versions
    (run / "rollouts.jsonl").write_text("\n".join(json.dumps(x) for x in [*lines, {"step": 9, "text": 3}]) + "\n")
    assert main(["report", str(run)]) == 0
    assert "rollouts.jsonl: 1 line is not what titanmoe writes there" in capsys.readouterr().err
    html = (run / "report" / "report.html").read_text()
    for title in ("Reward", "Reward of held-out prompts", "Length of completions", "Entropy of the policy", "Clipped"):
        assert f">{title}</text>" in html
    assert ">KL to the weights under adapters</text>" in html and ">Mismatch</text>" in html
    assert "<dt>reward</dt><dd>0.6250</dd>" in html and "<h2>Completions and their rewards</h2>" in html
    row = r"<tr><td>(\d)</td><td><pre>prompt \1</pre></td><td><pre>&lt;\1&gt;</pre></td><td>(.)</td></tr>"
    steps = re.findall(row, html)
    assert steps == [("1", "1"), ("6", "-"), ("7", "1"), ("8", "-")]
