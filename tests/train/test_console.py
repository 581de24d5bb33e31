"""The console: a panel on a terminal, lines elsewhere, other ranks marked."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from tests.support import processes
from titanmoe.config.schema import Config
from titanmoe.train.console import (
    ConsoleSettings,
    LineConsole,
    LivePanel,
    RankPrefixed,
    draw_curve,
    format_duration,
    format_phases,
    open_console,
)
from titanmoe.train.launch_messages import show_status
from titanmoe.train.report_targets import Report

RECORD = {
    "step": 20,
    "loss": 2.6194,
    "grad_norm": 0.4,
    "lr": 4.22e-3,
    "tokens_per_s": 6699.0,
    "step_time_s": 0.61,
    "mfu": 0.413,
    "memory_gib": 0.41,
    "tokens": 4096.0,
    "imbalance": 2.8,
    "dropped_fraction": 0.012,
    "time.data": 0.02,
    "time.forward_backward": 0.48,
    "time.optimizer": 0.1,
    "time.dispatch": 0.12,
}
REPORT = Report(20, RECORD, {}, 2.7, 25.0)


@pytest.fixture
def config() -> Config:
    config = Config()
    config.training.steps = 60
    return config


def shown(config: Config) -> ConsoleSettings:
    return ConsoleSettings(config.training.steps, config.compile.enable, config.moe.force_balance)


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system=None)


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_where_the_run_is_within_the_width(config, width):
    console = terminal(width)
    panel = open_console(config.metrics.console, shown(config), "debug", console)
    assert isinstance(panel, LivePanel)
    panel.log(REPORT)
    panel.event(20, "spike", "loss 9 is far above")
    panel.close()
    text = console.file.getvalue()
    for part in ("debug", "step 20 of 60", "33%  ETA 0:00:25", "2.6194", "smoothed 2.7000", "6,699", "MFU 41.3%"):
        assert part in text
    for part in ("0.41 GiB", "imbalance 2.80", "dropped 1.2%", "forward-backward 80% (dispatch 20%)"):
        assert part in text
    assert "spike: loss 9 is far above" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is not left hidden
    assert text.index("\x1b[?25h") < text.index("step 20 of 60")  # not even if the run is killed
    drawn = Console(width=width, file=io.StringIO())
    drawn.print(panel.panel(REPORT))
    lines = drawn.file.getvalue().splitlines()
    assert len(lines) == 7 and all(len(line) == width for line in lines)


@pytest.mark.parametrize(
    "found, words",
    [({"val_perplexity": 12.18}, "perplexity 12.18"), ({"preference.val_accuracy": 0.75}, "val accuracy 75.0%")],
)
def test_a_validation_has_a_line_of_its_own_that_stays(config, found, words):
    console = terminal(80)
    panel = open_console(config.metrics.console, shown(config), "debug", console)
    panel.log(REPORT._replace(record=RECORD | {"val_loss": 2.5, "val_best": 2.25} | found))
    panel.close()
    for width in (80, 100):
        drawn = Console(width=width, file=io.StringIO())
        drawn.print(panel.panel(REPORT))  # a later report has none
        lines = drawn.file.getvalue().splitlines()
        assert len(lines) == 8 and all(len(line) == width for line in lines)
        assert f"val loss 2.5000 (best 2.2500)  {words}  at step 20" in drawn.file.getvalue()


def test_a_loss_that_is_too_high_reddens_the_panel(config):
    colours = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    panel = open_console(config.metrics.console, shown(config), "debug", colours)
    panel.log(REPORT)
    assert "\x1b[31m╭" not in colours.file.getvalue()
    colours.print(panel.panel(REPORT._replace(wrong="since step 3 the loss is far too high")))
    panel.event(20, "divergence", "now 9")
    panel.close()
    text = colours.file.getvalue()
    assert "\x1b[31m╭" in text and "\x1b[1;31m2.6194" in text and "\x1b[1;31msince step 3 the loss" in text


def test_until_the_first_step_it_says_what_is_waited_for(config, monkeypatch, capsys):
    console = terminal(80)
    config.compile.enable = True
    open_console(config.metrics.console, shown(config), "debug", console).close()
    assert "compiling and making the first step ..." in console.file.getvalue()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show_status("reading")
    assert capsys.readouterr().out == "", "a log would keep every line"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show_status("reading the recipe")
    show_status("")
    assert capsys.readouterr().out == "\r\x1b[Kreading the recipe ...\r\x1b[K"
    monkeypatch.setenv("RANK", "1")
    show_status("reading the recipe")
    assert capsys.readouterr().out == ""


def test_lines_where_nobody_could_see_a_panel(config, capsys):
    assert isinstance(
        open_console(config.metrics.console, shown(config), "run", Console(file=io.StringIO())), LineConsole
    )
    config.metrics.console = "lines"
    lines = open_console(config.metrics.console, shown(config), "run", terminal(80))
    lines.log(REPORT._replace(eta=None))
    lines.log(REPORT)
    lines.event(20, "save", "step-00000020")
    lines.event(20, "spike", "loss 9 is far above")
    _, second, first, third = capsys.readouterr().out.splitlines()
    assert first == (
        "step 20/60  loss 2.6194  grad norm 0.400  lr 4.22e-03  6,699 tokens/s  MFU 41.3%  memory 0.41 GiB  "
        "imbalance 2.80  dropped 1.2%  ETA 0:00:25"
    )
    assert second.startswith("first step took 0.6 s")
    assert third == "step 20  SPIKE: loss 9 is far above"


def test_a_step_of_reinforcement_learning_says_in_which_phase_its_seconds_went(config, capsys):
    lines = LineConsole(shown(config))
    learns = RECORD | {"rl.reward": 0.53125, "rl.length": 12.25, "val_reward": 0.5}
    completions = learns | {"time.generate": 12.34, "time.reward": 0.06}
    for record in (completions, learns):
        lines.log(REPORT._replace(record=record))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 20/60  reward 0.5312  grad norm 0.400")
    assert first.endswith("length 12.2  val reward 0.5000  generate 12.3 s  rewards 0.1 s  learn 0.6 s  ETA 0:00:25")
    assert second.endswith("length 12.2  val reward 0.5000  learn 0.6 s  ETA 0:00:25")
    assert "generate 95%" in format_phases(completions), "the panel has fractions"


def test_small_things():
    assert draw_curve([1.0, 2.0, 3.0]) == "▁▅█"
    assert draw_curve([2.0, 2.0]) == "▁▁"
    assert draw_curve([1.0, math.nan, 3.0]) == "▁ █" and draw_curve([math.nan]) == " "
    assert format_duration(3725.4) == "1:02:05"
    assert format_phases({"loss": 1.0}) == ""
    assert format_phases({"time.data": 1e-4, "time.optimizer": 1.0}) == "optimizer 100%"


def test_what_another_rank_says_has_its_number():
    stream = io.StringIO()
    stamped = RankPrefixed(stream, 3)
    print("one\ntwo", file=stamped)
    stamped.write("half ")
    stamped.write("line\n")
    assert stream.getvalue() == "[rank 3] one\n[rank 3] two\n[rank 3] half line\n"


def test_a_traceback_too():
    code = "from titanmoe.train import console; console.prefix_output_with_rank(2); import warnings; warnings.warn('w')"
    run = processes.run(["-c", f"{code}; 1 / 0"])
    lines = run.stderr.splitlines()
    assert lines[-1].endswith("ZeroDivisionError: division by zero")
    assert all(line.startswith("[rank 2] ") for line in lines)
