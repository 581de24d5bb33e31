"""Files that others' programs read: they agree with the recipes and with each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import titanmoe
from tests.test_recipes import world
from titanmoe.components import COMPONENTS
from titanmoe.train.launch import read_config

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_kubernetes_starts_as_many_ranks_as_the_recipe_wants() -> None:
    jobs = load("scripts/launch_kubernetes.yaml")
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert job["replicas"] == 1 and spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    args = container["args"]
    split = args.index("train.py")
    launch = dict(arg.removeprefix("--").split("=") for arg in args[:split])
    nodes, ranks = int(launch["nnodes"]), int(launch["nproc-per-node"])
    assert nodes == spec["parallelism"] == spec["completions"]
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    name = jobs["metadata"]["name"]
    assert launch["master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    assert int(launch["master-port"]) == container["ports"][0]["containerPort"]
    assert launch["node-rank"] == "$(JOB_COMPLETION_INDEX)" in [f"$({one['name']})" for one in container["env"]]
    read_config(args[split + 1 :], nodes * ranks, COMPONENTS)
    assert world(ROOT / args[split + 1].removeprefix("--config=")) == nodes * ranks
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_skypilot_starts_as_many_ranks_as_the_recipe_wants() -> None:
    task = load("scripts/launch_skypilot.yaml")
    ranks = task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2])
    recipe = task["envs"]["RECIPE"]
    assert world(ROOT / recipe) == ranks
    read_config(["--config", recipe, *shlex.split(task["envs"]["ARGS"])], ranks, COMPONENTS)
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    variables = set(re.findall(r"\$(\w+)", task["run"]))
    given = {"SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"}
    assert variables == given | task["envs"].keys()


def test_the_image_copies_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE) == ["base", "cpu", "cuda"]
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept and all((ROOT / source).exists() for source in sources)
    if linter := shutil.which("hadolint"):
        subprocess.run([linter, str(ROOT / "Dockerfile")], check=True)


def test_the_citation_is_of_this_version() -> None:
    citation = load("CITATION.cff")
    assert citation["version"] == titanmoe.__version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
