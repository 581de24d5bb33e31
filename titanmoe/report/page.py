"""The report of runs: one HTML file without external files, for wide and narrow screens, light and dark.

Called by titanmoe.report.report_command with runs read by titanmoe.report.read_run; titanmoe.report.charts draws them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from titanmoe import __version__
from titanmoe.checkpoint import safe_files
from titanmoe.fold.picture import draw
from titanmoe.report.charts import (
    Curve,
    Mark,
    curves_chart,
    load_sheet,
    number,
    percent,
    quiz_sheets,
    ranks_sheet,
    times_chart,
)
from titanmoe.report.draw import DARK, LIGHT, Sheet, svg
from titanmoe.report.read_run import Run
from titanmoe.train.console import format_duration

PAGE = "report.html"
WIDE = (854.0, 488.0)
"""Size of the wide chart, beside which two cards are stacked."""
SHOWN_EVENTS = 200
SHOWN_SAMPLES = 10
"""Number of last steps of a run whose completions are shown, after those of the first."""
SHOWN_ROLLOUTS = 3
"""Likewise of completions with rewards, which are more in a step."""
FOLD_COLOURS = {"#008000": "c1", "#808000": "c2", "#800000": "event"}
"""Roles in place of a terminal's green, yellow and red, which are invisible on a dark page."""


def sheets(runs: list[Run]) -> dict[str, Sheet | None]:
    """Return the charts of metrics and times by name, in the page's order; None for a chart without data.

    Quizzes and heat maps are not among them. Events are marked only if there is a single run.
    """

    def curves(name: str) -> list[Curve]:
        return [Curve(run.name, *run.series(name), f"c{i}") for i, run in enumerate(runs)]

    marks = event_marks(runs[0]) if len(runs) == 1 else []  # with several runs it would be unclear whose they are
    objectives = {run.settings().get("training.objective") for run in runs}
    unit = "nats per pair" if objectives == {"dpo"} else f"nats per token{', or per pair' * ('dpo' in objectives)}"
    loss = dict(title="Loss", unit=unit, curves=curves("loss"), smoothed=True, marks=marks)
    charts = {
        "loss": curves_chart(**loss, size=WIDE),
        "loss_narrow": curves_chart(**loss),
        "val_loss": curves_chart("Validation loss", unit, curves("val_loss")),
        "accuracy": curves_chart("Preferences", "fraction of pairs won", curves("preference.accuracy"), percent),
        "chosen": curves_chart("Reward of chosen completions", "nats times beta", curves("preference.chosen")),
        "rejected": curves_chart("Reward of rejected completions", "nats times beta", curves("preference.rejected")),
        "reward": curves_chart(
            "Reward", "mean of a step's completions", curves("rl.reward"), smoothed=True, marks=marks
        ),
        "val_reward": curves_chart("Reward of held-out prompts", "most probable completions", curves("val_reward")),
        "length": curves_chart("Length of completions", "tokens, mean", curves("rl.length")),
        "policy_entropy": curves_chart("Entropy of the policy", "nats per token", curves("policy.entropy")),
        "clipped": curves_chart("Clipped", "fraction of tokens", curves("policy.clipped"), percent),
        "policy_kl": curves_chart("KL to the weights under adapters", "nats per token", curves("policy.kl")),
        "mismatch": curves_chart("Mismatch", "generator against trainer, nats", curves("policy.mismatch")),
        "kl": curves_chart("KL to the reference", "nats per completion, estimated", curves("preference.kl")),
        "grad_norm": curves_chart("Gradient norm", "before clipping", curves("grad_norm")),
        "max_logit": curves_chart("Largest attention logit", "worst layer", curves("max_logit")),
        "lr": curves_chart("Learning rate", "", curves("lr")),
        "tokens_per_s": curves_chart("Throughput", "tokens/s, all ranks", curves("tokens_per_s"), smoothed=True),
        "mfu": curves_chart("MFU", "", curves("mfu"), percent, smoothed=True),
        "memory": curves_chart("Memory", "GiB, rank 0, peak so far", curves("memory_gib")),
        "imbalance": curves_chart("Imbalance", "busiest expert over mean, worst layer", curves("imbalance")),
        "router_entropy": curves_chart("Router entropy", "nats, mean over layers", curves("router_entropy")),
        "dropped": curves_chart("Dropped", "fraction of routed tokens", curves("dropped_fraction"), percent)
        if any(any(curve.y) for curve in curves("dropped_fraction"))
        else None,
    }
    for i, run in enumerate(runs):
        title = "Where a step's time goes" + (f": {run.name}" if len(runs) > 1 else "")
        charts["times" if len(runs) == 1 else f"times-{i + 1}"] = times_chart(run, title)
    return charts


def event_marks(run: Run) -> list[Mark]:
    """Return the events that charts mark at their steps: restarts, spikes, skips, divergences, collapses, stragglers.

    The mark of a restart on another number of ranks has both numbers.
    """
    marks, ranks = [], None
    for event in run.events:
        kind, environment = event["kind"], event.get("environment", {})
        if kind == "restart":
            new_ranks = environment.get("ranks", ranks)
            text = f"restart: {ranks} -> {new_ranks} rank{'s' * (new_ranks != 1)}"
            marks.append(Mark(event["step"], kind if ranks in (None, new_ranks) else text, "muted"))
        elif kind in ("spike", "skip", "divergence", "collapse", "straggler"):
            marks.append(Mark(event["step"], kind, "event"))
        ranks = environment.get("ranks", ranks)
    return marks


def write_page(runs: list[Run], out: Path | None = None) -> Path:
    """Write the report of runs as one HTML file and return its path. Folders are made, an older report is replaced.

    Args:
        out: the folder to write into; None for report/ in the first run's folder.
    """
    folder, name = (out, PAGE) if out else (runs[0].folder, f"report/{PAGE}")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    charts = {name: sheet for name, sheet in sheets(runs).items() if sheet is not None}
    safe_files.write(folder, name, page(runs, charts).encode())
    return folder / name


def page(runs: list[Run], charts: dict[str, Sheet]) -> str:
    """Return the HTML of the report.

    Args:
        charts: charts by name, as `sheets` returns them, without those that are None.
    """
    title = " and ".join(run.name for run in runs)
    parts = [
        *_header(runs, title),
        *_charts(charts),
        *_quizzes(runs),
        *_samples(runs),
        *_rollouts(runs),
        *_loads(runs),
        *_ranks(runs),
        *_events(runs),
        *_folds(runs),
        *_configs(runs),
        f"<footer>titanmoe {__version__}; what each number is: docs/watching.md</footer>",
    ]
    return document(title, parts)


def document(title: str, parts: list[str]) -> str:
    """Return an HTML document with the report's style and script.

    Args:
        title: the document's title, as plain text.
        parts: HTML of the elements in its body.
    """
    colours = (";".join(f"--{name}:{value}" for name, value in theme.items()) for theme in (LIGHT, DARK))
    head = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>',
        STYLE.replace("LIGHT", next(colours)).replace("DARK", next(colours)),
        "</style></head><body><main>",
    ]
    return "\n".join([*head, *parts, f'</main><div id="tip"></div><script>{SCRIPT}</script></body></html>'])


def _header(runs: list[Run], title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    rows = []
    for i, run in enumerate(runs):
        last, config = run.lines[-1], run.config
        # Steps that follow from epochs are not in the recipe.
        steps = config.training.steps if config else -1
        steps = run.environment.get("steps", steps) if steps == -1 else steps
        of_steps = f" of {steps:,}" if steps != -1 else ""
        fold = run.fold
        mapping = "?"
        if fold:
            views = (fold.attention_axes, fold.expert_axes)
            mapping = " / ".join(" ".join(f"{k} {n}" for k, n in v.items() if n > 1) or "one rank" for v in views)
        cells = {
            "run": f'<i style="background:var(--c{i})"></i>{escape(run.name)}',
            "model": escape(f"{config.model.family} {config.model.size}") if config else "?",
            "mapping (attention / experts)": escape(mapping),
            "ranks": escape(f"{run.environment.get('ranks', '?')} x {run.environment.get('device', '?')}"),
            "steps": f"{last['step']:,}{of_steps}",
            "started (UTC)": escape(run.events[0]["time"][:16].replace("T", " ")) if run.events else "-",
            "training took": _format_or_dash(run.seconds, format_duration),
            "reward": _format_or_dash(last.get("rl.reward"), lambda reward: f"{reward:.4f}"),
            "loss": "not finite" if last["loss"] is None else f"{last['loss']:.4f}",
            "tokens/s": _format_or_dash(run.median("tokens_per_s"), number),
            "MFU": _format_or_dash(run.median("mfu"), percent),
            "memory": _format_or_dash(last.get("memory_gib"), lambda gib: f"{gib:.2f} GiB"),
            "imbalance": _format_or_dash(run.median("imbalance"), lambda ratio: f"{ratio:.2f}"),
        }
        rows.append(cells)
    if len(rows) == 1:
        (cells,) = rows
        yield '<dl class="tiles">'
        for name, value in cells.items():
            if name != "run" and value != "-":
                yield f"<div><dt>{name}</dt><dd>{value}</dd></div>"
        yield "</dl>"
    else:
        names = [name for name in rows[0] if any(cells[name] != "-" for cells in rows)]
        yield '<div class="scroll"><table><tr>' + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
        for cells in rows:
            yield "<tr>" + "".join(f"<td>{cells[name]}</td>" for name in names) + "</tr>"
        yield "</table></div>"
    for run in runs:
        if command := run.environment.get("command"):
            yield f'<p class="note"><code>{escape(str(command))}</code></p>'
    yield '<p class="note">Speed, MFU and imbalance are medians without the first line, which includes start-up.</p>'


def _format_or_dash(value: Any, form: Any) -> str:
    return "-" if value is None else form(value)


def _charts(charts: dict[str, Sheet]) -> Iterator[str]:
    yield '<div class="grid">'
    for name, sheet in charts.items():
        yield figure(sheet, {"loss": "card wide", "loss_narrow": "card narrow"}.get(name, "card"))
    yield "</div>"


def _quizzes(runs: list[Run]) -> Iterator[str]:
    tasks = list(dict.fromkeys(task for run in runs for task in run.quiz))
    for task in tasks:
        yield f"<h2>Quiz: {escape(task)}</h2>"
        yield (
            '<p class="note">Below, the rank correlation (Spearman) of the questions at each step with the same '
            "questions at the last one: a quantity that is near 1 early on is a signal by then.</p>"
        )
        yield '<div class="loads">'
        yield from map(figure, quiz_sheets(runs, task))
        yield "</div>"


def _samples(runs: list[Run]) -> Iterator[str]:
    """Yield an HTML table for each run with [validation.samples]: completions of the first step and of the last ten."""
    for run in runs:
        samples = [event for event in run.events if event["kind"] == "samples"]
        if not samples:
            continue
        yield f"<h2>Completions of the prompts{f': {escape(run.name)}' if len(runs) > 1 else ''}</h2>"
        yield '<div class="scroll"><table><tr><th>step</th><th></th></tr>'
        for event in samples[:1] + samples[1:][-SHOWN_SAMPLES:]:
            text = event["text"].partition("\n")[2]
            yield f"<tr><td>{event['step']:,}</td><td><pre>{escape(text)}</pre></td></tr>"
        yield "</table></div>"


def _rollouts(runs: list[Run]) -> Iterator[str]:
    """Yield HTML with completions of [rl] and their rewards: of each run's first step, and of its last three.

    They are those in rollouts.jsonl, which has only some of a training step. Nothing for runs without any.
    """
    for run in runs:
        if not run.rollouts:
            continue
        steps = list(dict.fromkeys(line["step"] for line in run.rollouts))
        shown = {*steps[:1], *steps[1:][-SHOWN_ROLLOUTS:]}
        yield f"<h2>Completions and their rewards{f': {escape(run.name)}' if len(runs) > 1 else ''}</h2>"
        yield '<div class="scroll"><table><tr><th>step</th><th>prompt</th><th>completion</th><th>reward</th></tr>'
        for line in run.rollouts:
            if line["step"] in shown:
                texts = "".join(f"<td><pre>{escape(line[name])}</pre></td>" for name in ("text", "completion"))
                yield f"<tr><td>{line['step']:,}</td>{texts}<td>{_format_or_dash(line.get('reward'), number)}</td></tr>"
        yield "</table></div>"


def figure(sheet: Sheet, kind: str = "card") -> str:
    """Return a drawing as an HTML figure element, whose CSS classes are `kind`."""
    data = f" data-hover='{escape(json.dumps(sheet.hover))}'" if sheet.hover else ""
    return f'<figure class="{kind}">{svg(sheet, data)}</figure>'


def _loads(runs: list[Run]) -> Iterator[str]:
    for run in runs:
        if not run.load:
            continue
        yield f"<h2>Load of every expert{f': {escape(run.name)}' if len(runs) > 1 else ''}</h2>"
        yield (
            '<p class="note">A row per expert, by number; steps from left to right. <b class="under"></b> a quarter of '
            f'the layer\'s mean or less, clear at the mean, <b class="over"></b> four times the mean or more. '
            f"Steps {run.load_steps[0]:,} to {run.load_steps[-1]:,}.</p>"
        )
        yield '<div class="loads">'
        for layer, load in sorted(run.load.items()):
            worst = float((load.max(0) / load.mean(0).clip(1e-9)).max())
            idle = int((load[:, -1] == 0).sum())
            text = f"worst {worst:.1f} x mean" + (f", {idle} of {len(load)} idle at the end" if idle else "")
            yield (
                f'<figure class="card"><figcaption><b>layer {layer}</b> <span>{text}</span></figcaption>'
                f"{svg(load_sheet(layer, load, run.load_steps))}</figure>"
            )
        yield "</div>"


def _ranks(runs: list[Run]) -> Iterator[str]:
    rank_sheets = [sheet for run in runs if (sheet := ranks_sheet(run)) is not None]
    if rank_sheets:
        yield "<h2>Time of every rank</h2>"
        yield (
            '<p class="note">Time to compute and read data; the rest of a step a rank waits for others. Ranks of a '
            "pipeline's stages may differ. A dashed line: a rank or a link was named as slow.</p>"
        )
        yield from map(figure, rank_sheets)


def _events(runs: list[Run]) -> Iterator[str]:
    rows = [(run, event) for run in runs for event in run.events if event["kind"] != "samples"]
    if not rows:
        return
    yield '<h2>Events</h2><div class="scroll"><table class="events"><tr>'
    yield "".join(
        f"<th>{name}</th>" for name in (*(("run",) if len(runs) > 1 else ()), "step", "what", "when (UTC)", "")
    )
    yield "</tr>"
    for run, event in rows[-SHOWN_EVENTS:]:
        cells = [escape(run.name)] if len(runs) > 1 else []
        cells += [f"{event['step']:,}", f'<b class="{escape(event["kind"])}">{escape(event["kind"])}</b>']
        cells += [escape(event["time"].replace("T", " ").removesuffix("+00:00")), escape(event["text"])]
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"
    if len(rows) > SHOWN_EVENTS:
        yield f'<p class="note">The last {SHOWN_EVENTS} of {len(rows):,}.</p>'


def _folds(runs: list[Run]) -> Iterator[str]:
    """Yield HTML with a picture of each distinct mapping among the runs; runs with an unknown mapping are left out."""
    names_of_picture: dict[str, list[str]] = {}
    for run in runs:
        if (fold := run.fold) is None:
            continue
        node = run.config.parallelism.node
        console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(draw(fold, 8 if node == -1 else node, run.config.model), soft_wrap=True)
        html = console.export_html(inline_styles=True, code_format="{code}")
        for terminal, role in FOLD_COLOURS.items():
            html = html.replace(terminal, f"var(--{role})")
        names_of_picture.setdefault(html, []).append(run.name)
    for html, names in names_of_picture.items():
        yield f"<h2>The fold{': ' + escape(', '.join(names)) if len(runs) > 1 else ''}</h2>"
        yield f'<div class="scroll card"><pre class="fold">{html}</pre></div>'


def _configs(runs: list[Run]) -> Iterator[str]:
    yield "<h2>Config and environment</h2>"
    if len(runs) > 1:
        yield from _differences(runs)
    for run in runs:
        environment = "".join(f"{escape(str(k)):<10} {escape(str(v))}\n" for k, v in run.environment.items())
        yield f"<details><summary>{escape(run.name)}: {escape(str(run.folder))}</summary>"
        yield f"<pre>{environment}</pre><pre>{escape(run.config_text)}</pre></details>"


def _differences(runs: list[Run]) -> Iterator[str]:
    settings = [run.settings() for run in runs]
    names = sorted({name for table in settings for name in table})
    differ = [name for name in names if len({repr(table.get(name)) for table in settings}) > 1]
    yield '<div class="scroll"><table><tr><th>what differs</th>'
    yield "".join(f'<th><i style="background:var(--c{i})"></i>{escape(r.name)}</th>' for i, r in enumerate(runs))
    yield "</tr>"
    for name in differ:
        values = "".join(f"<td>{escape(str(table.get(name, '-')))}</td>" for table in settings)
        yield f"<tr><td>{escape(name)}</td>{values}</tr>"
    yield "</table></div>"


STYLE = """
:root{LIGHT;color-scheme:light}
@media(prefers-color-scheme:dark){:root{DARK;color-scheme:dark}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px 20px 60px;overflow-wrap:anywhere}
main>*,.tiles div,.card{min-width:0;max-width:100%}
h1{font-size:24px;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 8px}
.note,footer{color:var(--soft);font-size:13px;margin:8px 0 16px}
footer{margin-top:40px}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:0}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:8px 14px;flex:1 1 auto}
dt{color:var(--soft);font-size:12px}
dd{margin:0;font-size:17px;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:14px}
.card{margin:0;background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:6px}
.wide{grid-column:span 2;grid-row:span 2}
.narrow{display:none}
svg{display:block;width:100%;height:auto;font-family:inherit;font-variant-numeric:tabular-nums}
i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.loads{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(260px,100%),1fr));gap:14px}
figcaption{padding:2px 6px 6px;font-size:12px}
figcaption span{color:var(--soft);float:right}
.under,.over{display:inline-block;width:14px;height:10px;border-radius:3px;background:rgb(42,120,214)}
.over{background:rgb(214,59,45)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:left}
td,th{padding:5px 18px 5px 0;border-bottom:1px solid var(--grid);white-space:nowrap}
.events td:last-child{white-space:normal;min-width:260px}
.spike,.divergence,.collapse,.straggler,.stop{color:var(--event)}
pre{font:12px/1.35 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;margin:10px 0;overflow-x:auto}
.fold{padding:4px 10px}
summary{cursor:pointer;overflow-wrap:anywhere}
#tip{position:fixed;display:none;pointer-events:none;background:var(--card);border:1px solid var(--base);
border-radius:6px;padding:6px 10px;font-size:12px;box-shadow:0 2px 10px #0003;
font-variant-numeric:tabular-nums;z-index:2}
@media(max-width:1000px){.grid{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media(max-width:680px){main{padding:16px 12px 40px}.grid{grid-template-columns:minmax(0,1fr)}.wide{display:none}
.narrow{display:block}.tiles div{flex:1 1 40%}dd{font-size:15px}}
"""
"""CSS of the page. Phones get a narrow chart of the loss, because the letters of the wide one would shrink."""

SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const h = JSON.parse(svg.dataset.hover), [[x0, x1], [left, right]] = h.x;
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.style.cssText = "stroke:var(--base);display:none";
  rule.setAttribute("y1", h.top[0]); rule.setAttribute("y2", h.top[1]);
  svg.append(rule);
  svg.onpointermove = e => {
    const box = svg.getBoundingClientRect(), at = (e.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = x0 + (Math.min(Math.max(at, left), right) - left) / (right - left) * (x1 - x0);
    tip.replaceChildren();
    let shown = 0;
    for (const s of h.series) {
      const p = s.points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
      if (!tip.childElementCount) {
        const head = document.createElement("b");
        head.textContent = "step " + p[0].toLocaleString("en"); tip.append(head);
        shown = left + (p[0] - x0) / ((x1 - x0) || 1) * (right - left);
      }
      const row = document.createElement("div"), chip = document.createElement("i");
      chip.style.background = `var(--${s.role})`;
      row.append(chip, `${s.name} ${p[1].toLocaleString("en", {maximumSignificantDigits: 5})}`); tip.append(row);
    }
    rule.setAttribute("x1", shown); rule.setAttribute("x2", shown);
    rule.style.display = tip.style.display = "block";
    const wide = tip.offsetWidth;
    tip.style.left = Math.min(e.clientX + 14, innerWidth - wide - 8) + "px";
    tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  };
  svg.onpointerleave = () => rule.style.display = tip.style.display = "none";
}
"""
