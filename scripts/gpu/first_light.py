"""Test and measure titanmoe on a GPU in minutes: one command writes one table and one archive.

    python scripts/gpu/first_light.py [--minutes 7] [--out DIR] [--only PART ...]
    python scripts/gpu/first_light.py --pretend                    on CPUs, tiny, with three planted faults
    python scripts/gpu/first_light.py --publish DIR/results.json   write the table into docs/benchmarks.md

Each part is a process with a time limit, and parts of one group run side by side. A part that fails, hangs or prints
too much becomes a row of the table, and the next one runs. DIR holds results.json, table.md and first_light.tar.gz
(logs and figures, under 5 MB), which are rewritten after every part. Missing packages are installed from the folder
wheels/, which scripts/gpu/wheels.sh fills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from shlex import split
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
from read_results import (  # noqa: E402
    Row,
    read_layers,
    read_lines,
    read_ncu,
    read_pytest,
    read_rows,
    read_sanitizer,
    read_training,
)

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- first light begins -->", "<!-- first light ends -->"
ARCHIVE_BYTES, LOG_BYTES, MOST_BYTES, TABLE_LINES, ROWS_OF_A_PART = 5_000_000, 400_000, 3_000_000, 78, 18
DUMP_SECONDS = 5
"""The seconds between the SIGABRT of a late part, at which faulthandler prints all stacks, and its SIGKILL."""
PUBLISHED = ("layers", "attention", "completions")
"""Parts whose figures --publish writes; those of the others stay in table.md."""
UNSUPPORTED = 77
"""The exit status of a part that this machine cannot run."""


@dataclass
class Part:
    """A process that tests or measures something, with a time limit, and how to read its results.

    Args:
        name: Name of the part in the table.
        command: The arguments of `python`; {json} is a file for its rows, {folder} a folder of its own.
        limit: The seconds after which it is killed.
        read: Makes rows of the table from its log and from the text of its JSON file.
        group: The name of its group. Consecutive parts of one group run side by side.
        program: A program that starts `python`; if it is missing, the part is unsupported.
        figures: Whether its rows belong in the table even if nothing failed.
    """

    name: str
    command: str
    limit: float
    read: Callable[[str, str], list[Row]]
    group: str = ""
    program: str = ""
    figures: bool = False


@dataclass
class Result:
    """The outcome of a part, whose state is "ok", "failed", "timed out", "unsupported" or "left out"."""

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""
    """Reason for a state other than "ok"."""
    figures: bool = False
    rows: list[Row] = field(default_factory=list)


GPU_TESTS = (
    "tests/test_gpu.py",
    "tests/ops/test_kernels.py",
    "tests/moe/test_symmetric_gpu.py",
    "tests/comm/test_interleave.py",
)


TRAIN = (
    "train.py --config train_configs/debug.toml --job.dump_folder {folder} --parallelism.tp 1 "
    "--parallelism.experts.ep 1 --training.mixed_precision_param bfloat16"
)
REINFORCEMENT = "scripts/gpu/reinforcement.py --json {json}"
PARITY = "scripts/gpu/gpu_parity.py --json {json} --seconds 130"
SLOW = "'compiled windows' 'compiled linear'"
"""The checks that inductor compiles for 40 and 60 seconds."""
GPU = [
    Part("ceilings", "scripts/gpu/ceilings.py --json {json}", 45, read_rows, figures=True),
    Part("plain run", f"{TRAIN} --training.device cuda --training.steps 20", 120, read_training, "side by side"),
    Part(
        "GPU tests",
        "-m pytest -m gpu -n 8 -q -p no:cacheprovider -o faulthandler_timeout=100 " + " ".join(GPU_TESTS),
        150,
        read_pytest,
        "side by side",
    ),
    Part(
        "families", f"{PARITY} --only init float64 float32 bf16 --skip 'bf16 compiled'", 150, read_rows, "side by side"
    ),
    Part("options", f"{PARITY} --skip init float64 float32 bf16 compiled", 150, read_rows, "side by side"),
    Part("compiled", f"{PARITY} --only compiled 'bf16 compiled' --skip {SLOW}", 150, read_rows, "side by side"),
    Part("compiled attention", f"{PARITY} --only {SLOW}", 150, read_rows, "side by side"),
    Part("sums", f"{REINFORCEMENT} --only sums", 150, read_rows, "side by side", figures=True),
    Part("symmetric memory", "scripts/gpu/symmetric.py --json {json}", 120, read_rows, figures=True),
    Part("completions", f"{REINFORCEMENT} --only qwen3 offload", 200, read_rows, figures=True),
    Part("a step", "scripts/bench/trace_step.py qwen3 --keep {folder}/qwen3.json.gz", 70, read_lines, figures=True),
    Part("attention", "scripts/gpu/attention_backends.py --json {json}", 100, read_rows, figures=True),
    Part(
        "layers",
        "scripts/bench/layers.py --shapes qwen3 gpt_oss --sides titanmoe torchtitan-eager fp8 compiled --seconds 150 "
        "--limit 90 --json {json}",
        240,
        read_layers,
        figures=True,
    ),
    Part("products", "scripts/gpu/ceilings.py --grid --json {json}", 60, read_rows),
    Part(
        "memcheck",
        "-m pytest -m gpu --one-of-each -q -p no:cacheprovider tests/ops/test_kernels.py",
        120,
        read_sanitizer,
        program="compute-sanitizer --tool memcheck --target-processes all",
        figures=True,
    ),
    Part(
        "profile",
        "scripts/bench/layers.py --one qwen3 titanmoe 1 8 --steps 1 --times 0",
        60,
        read_ncu,
        program="ncu --clock-control none --launch-count 6 -k regex:swiglu|_sum --section SpeedOfLight "
        "--section Occupancy",
        figures=True,
    ),
]
PRETEND = [
    Part("ceilings", "scripts/gpu/ceilings.py --device cpu --json {json}", 30, read_rows, figures=True),
    Part("crash", "-c 'raise SystemExit(5)'", 20, read_rows, "side by side"),
    Part("hang", "-c 'import time; time.sleep(60)'", 8, read_rows, "side by side"),
    Part("noise", "-c 'for _ in range(60000): print(_, \"x\" * 80)'", 20, read_rows, "side by side"),
    Part("plain run", f"{TRAIN} --training.device cpu --training.steps 3", 60, read_training),
    Part("GPU tests", "-m pytest -m gpu -q -p no:cacheprovider tests/test_gpu.py", 60, read_pytest),
    Part(
        "families",
        "scripts/gpu/gpu_parity.py --device cpu --tiny --only init 'float64 mixtral' muon --json {json}",
        60,
        read_rows,
    ),
    Part("symmetric memory", "scripts/gpu/symmetric.py --device cpu --json {json}", 60, read_rows, figures=True),
    Part("completions", f"{REINFORCEMENT} --device cpu --only qwen3", 60, read_rows, figures=True),
    Part("a step", "scripts/bench/trace_step.py qwen3 --tiny", 60, read_lines, figures=True),
    Part(
        "layers",
        "scripts/bench/layers.py --tiny --shapes qwen3 --sides titanmoe --steps 1 --times 1 --json {json}",
        60,
        read_layers,
        figures=True,
    ),
    Part("attention", "scripts/gpu/attention_backends.py --device cpu --json {json}", 60, read_rows, figures=True),
    Part("memcheck", "-c pass", 5, read_sanitizer, program="compute-sanitizer-of-no-machine"),
]


def run_part(part: Part, folder: Path, environment: dict[str, str], left: float) -> Result:
    """Run one part and return its result; its log and JSON file stay in `folder`.

    It failed if its exit status is neither 0 nor UNSUPPORTED, a row is not ok, or its results cannot be read. A late
    part gets SIGABRT, then SIGKILL; processes that a part leaves are killed. `left` are the seconds that are left for
    all parts, a limit beside the part's own.
    """
    name = part.name.replace(" ", "-")
    rows_file, files = folder / f"{name}.json", folder / name
    files.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-u", *split(part.command.format(json=rows_file, folder=files))]
    if part.program:
        first, *options = split(part.program)
        path = shutil.which(first, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
        if path is None:
            return Result(part.name, "unsupported", note=f"{first} is not installed")
        program = [path, *options, *program]
    begin, limit = time.monotonic(), min(part.limit, left)
    process = subprocess.Popen(
        program, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reader = threading.Thread(target=keep_ends, args=(process.stdout, folder / f"{name}.log"), daemon=True)
    reader.start()
    state = ""
    for signal_number, patience in ((signal.SIGABRT, max(1.0, limit - DUMP_SECONDS)), (signal.SIGKILL, DUMP_SECONDS)):
        try:
            process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            state = "timed out"
            kill(process, signal_number)
    kill(process, signal.SIGKILL)  # what it has left running
    status = process.wait()
    reader.join(5)
    log = (folder / f"{name}.log").read_text(errors="replace") if (folder / f"{name}.log").exists() else ""
    try:
        rows, why = part.read(log, rows_file.read_text() if rows_file.exists() else ""), ""
    except (ValueError, KeyError, TypeError) as error:  # it ended while it wrote, or wrote something else
        rows, why = [], f"its results cannot be read: {error!r}"
    failed = status != 0 or why or any(not row.ok for row in rows)
    state = state or ("unsupported" if status == UNSUPPORTED else "failed" if failed else "ok")
    last = [line.strip() for line in log.splitlines() if line.strip()][-1:]
    note = why or (last[0][:200] if state in ("failed", "timed out", "unsupported") and last else "")
    return Result(part.name, state, time.monotonic() - begin, note, part.figures, rows)


def kill(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def keep_ends(stream: IO[bytes], file: Path) -> None:
    """Copy a stream to a file; of more than LOG_BYTES bytes only the first and the last half of LOG_BYTES."""
    half, size, end = LOG_BYTES // 2, 0, b""
    with file.open("wb") as log:
        while chunk := stream.read1(65536):
            log.write(chunk[: max(0, half - size)])
            log.flush()
            end = (end + chunk[max(0, half - size) :])[-half:]
            size += len(chunk)
        if size > LOG_BYTES:
            log.write(f"\n... {size - LOG_BYTES:,} bytes left out ...\n".encode())
        log.write(end)


def about_machine() -> dict[str, str]:
    """Return the card, the driver, versions of packages and the date, as texts by name."""
    code = (
        "import importlib.metadata as m, json, platform, torch\n"
        "version = lambda name: next((d.version for d in m.distributions(name=name)), 'none')\n"
        "card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'\n"
        "print(json.dumps({'card': card, 'torch': torch.__version__, 'CUDA': str(torch.version.cuda), "
        "'Triton': version('triton'), 'numpy': version('numpy'), 'Python': platform.python_version()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    about = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"torch": done.stderr[-200:]}
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        about["driver"] = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        about["driver"] = "none"
    return about | {"date": time.strftime("%Y-%m-%d")}


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown tables, cut after TABLE_LINES lines: failures, each part's result, then figures.

    At most 16 failures are named, and ROWS_OF_A_PART figures of each part. The report has "about", "command" and
    "results", as in results.json.
    """
    results = report["results"]
    lines = [", ".join(f"{key} {value}" for key, value in report["about"].items()) + ".", f"`{report['command']}`", ""]
    failed = [(r, row) for r in results for row in r["rows"] if not row["ok"]]
    if failed:
        lines += ["| failed | check | why |", "|---|---|---|"]
        lines += [cells(r["name"], row["name"], row["text"]) for r, row in failed[:16]]
        lines += [f"and {len(failed) - 16} more in the archive"] * (len(failed) > 16) + [""]
    lines += ["| part | result | seconds | checks | note |", "|---|---|---|---|---|"]
    for r in sorted(results, key=lambda r: r["state"] == "ok"):
        good = sum(row["ok"] for row in r["rows"])
        lines.append(cells(r["name"], r["state"], f"{r['seconds']:.0f}", f"{good} of {len(r['rows'])}", r["note"]))
    figures = [(r, row) for r in results if r["figures"] for row in [x for x in r["rows"] if x["ok"]][:ROWS_OF_A_PART]]
    if figures:
        lines += ["", "| part | what | figures |", "|---|---|---|"]
        room = TABLE_LINES - len(lines)
        lines += [cells(r["name"], row["name"], row["text"]) for r, row in figures[:room]]
    return "\n".join(lines[: TABLE_LINES + 1]) + "\n"


def cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', '/').replace(chr(10), ' ') for text in texts)} |"


def write(out: Path, folder: Path, report: dict[str, Any]) -> None:
    """Write results.json, table.md and the archive to `out`; leave out the largest files if the archive is too large.

    `folder` has the logs and JSON files of the parts, `report` is the content of results.json.
    """
    (out / "results.json").write_text(json.dumps(report, indent=1))
    (out / "table.md").write_text(table(report))
    files = sorted(
        (f for f in folder.rglob("*") if f.is_file() and belongs_in_archive(f)), key=lambda f: f.stat().st_size
    )
    while True:
        with tarfile.open(out / "first_light.tar.gz", "w:gz") as archive:
            for file in [out / "results.json", out / "table.md", *files]:
                archive.add(file, Path("first_light", file.name if file.parent == out else file.relative_to(folder)))
        if (out / "first_light.tar.gz").stat().st_size <= ARCHIVE_BYTES or not files:
            return
        files.pop()


def belongs_in_archive(file: Path) -> bool:
    """Return whether a file has at most MOST_BYTES and is not of a checkpoint: logs, figures and small traces."""
    return "checkpoints" not in file.parts and file.stat().st_size <= MOST_BYTES


def groups(parts: list[Part]) -> Iterator[list[Part]]:
    """Yield, in order, lists of the parts that run side by side: consecutive ones of a group; alone without one."""
    for _, together in groupby(enumerate(parts), lambda pair: pair[1].group or pair[0]):
        yield [part for _, part in together]


def install_wheels(folder: Path) -> str:
    """Install the wheels of wheels/ into `folder` and return it, even if that fails, which is printed; "" if none."""
    wheels = [str(wheel) for wheel in (ROOT / "wheels").glob("*.whl")]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, *wheels]
    if wheels and (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        print(f"wheels/ cannot be installed: {done.stderr[-500:]}", flush=True)
    return str(folder) if wheels else ""


def publish(files: list[Path]) -> None:
    """Write the table of these results.json into docs/benchmarks.md, each part as the last file with it has it.

    Only parts in PUBLISHED keep their figures; machine and date are those of the first file.
    """
    report, *later = (json.loads(file.read_text()) for file in files)
    for new in later:
        newer = {result["name"] for result in new["results"]}
        report["results"] = [result for result in report["results"] if result["name"] not in newer] + new["results"]
        report["command"] += f"; {new['command']}"
    for result in report["results"]:
        result["figures"] = result["figures"] and result["name"] in PUBLISHED
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = table(report)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0, help="for all parts; those at the end are left out")
    parser.add_argument("--out", type=Path, default=Path("runs/first_light"))
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument("--pretend", action="store_true", help="on CPUs, tiny, with parts that crash, hang and babble")
    parser.add_argument(
        "--publish", type=Path, nargs="+", metavar="RESULTS", help="write their table into docs/benchmarks.md"
    )
    args = parser.parse_args(argv)
    if args.publish:
        publish(args.publish)
        return 0
    parts = PRETEND if args.pretend else GPU
    if unknown := set(args.only or ()) - {part.name for part in parts}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
    parts = [part for part in parts if not args.only or part.name in args.only]
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first_light_") as temporary:
        folder = Path(temporary, "parts")
        folder.mkdir()
        site = install_wheels(Path(temporary, "site"))
        path = os.pathsep.join(filter(None, [str(ROOT), site, os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {
            "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"
        }  # fmt: skip
        os.environ["PYTHONPATH"] = path
        report = {
            "about": about_machine(),
            "command": " ".join(["python", "scripts/gpu/first_light.py", *sys.argv[1:]]),
        }
        report["results"] = []
        for together in groups(parts):
            left = args.minutes * 60 - (time.monotonic() - began)
            if left < min(part.limit for part in together) / 3:
                done = [Result(part.name, "left out", note="no time was left") for part in together]
            else:
                with ThreadPoolExecutor(len(together)) as pool:
                    start = partial(run_part, folder=folder, environment=environment, left=left)
                    done = list(pool.map(start, together))
            for result in done:
                print(f"{result.name}: {result.state}, {result.seconds:.0f} s. {result.note}", flush=True)
            report["results"] += [asdict(result) for result in done]
            report["seconds"] = round(time.monotonic() - began, 1)
            write(args.out, folder, report)
    print(table(report), flush=True)
    print(f"took {report['seconds']:.0f} s; {args.out}/first_light.tar.gz has logs and figures")
    return int(any(result["state"] not in ("ok", "unsupported") for result in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
