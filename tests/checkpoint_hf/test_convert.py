"""`titanmoe convert` in both directions: bytes, files, ranks, memory."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import world
from tests.checkpoint import folders
from tests.checkpoint_hf import models
from tests.support.byte_pairs import CHATML
from titanmoe.cli import main

ROOT = Path(__file__).parents[2]


def convert(*words):
    return main(["convert", *map(str, words)])


def equal(got, want):
    """Names, dtypes, shapes and bytes."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.fixture
def qwen(tmp_path):
    folder = models.save(models.make("qwen2_moe", torch.bfloat16), tmp_path / "qwen")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "pytorch_model.bin").write_text("not for us")
    return folder


@pytest.mark.parametrize("name", models.FAMILIES)
def test_there_and_back_is_equal_to_the_byte(tmp_path, name, capsys):
    model = models.make(name, torch.bfloat16)
    folder = models.save(model, tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    equal(models.tensors(tmp_path / "out"), models.tensors(folder))
    first, again = (type(model).from_pretrained(path).eval() for path in (folder, tmp_path / "out"))
    assert again.dtype == torch.bfloat16
    assert torch.equal(models.logits(again, models.ids()), models.logits(first, models.ids()))


@pytest.mark.parametrize("name", models.FAMILIES)
def test_a_config_written_without_an_original_says_the_same(tmp_path, name):
    model = models.make(name)
    folder = models.save(model, tmp_path / "in")
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    (tmp_path / "ours" / "hf" / "config.json").unlink()
    manifest = folders.manifest_of(tmp_path / "ours")
    del manifest["files"]["hf/config.json"]
    folders.rewrite(tmp_path / "ours", **manifest)
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out") == 0
    again = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(models.logits(again, models.ids()), models.logits(model, models.ids()))


def test_shards_tokenizer_and_config_come_along(qwen, tmp_path, capsys):
    models.save(models.make("qwen2_moe", torch.bfloat16), qwen, max_shard_size="20KB")
    (qwen / "model.safetensors").unlink()
    assert len(list(qwen.glob("*.safetensors"))) > 3
    assert convert("--from-hf", qwen, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out", "--max-shard-gb", 16e-6) == 0
    out = tmp_path / "out"
    equal(models.tensors(out), models.tensors(qwen))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 3
    assert max((out / file).stat().st_size for file in files) < 20_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in models.tensors(qwen).values())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (qwen / name).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((qwen / "config.json").read_text())
    assert not (out / "pytorch_model.bin").exists()
    assert "no tokenizer" not in capsys.readouterr().out
    # A run's folder means its latest checkpoint, as for the other commands.
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "ours").rename(run / "checkpoints/step-00000000")
    assert convert("--to-hf", run, tmp_path / "again") == 0
    equal(models.tensors(tmp_path / "again"), models.tensors(qwen))


def test_another_tokenizer_and_dtype(qwen, tmp_path, capsys):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"of": "another"}')
    assert convert("--from-hf", qwen, tmp_path / "ours") == 0
    options = ("--tokenizer", tmp_path / "tokenizer", "--dtype", "float32")
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out", *options) == 0
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == {"of": "another"}
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    equal(models.tensors(tmp_path / "out"), {n: t.float() for n, t in models.tensors(qwen).items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_many_ranks_make_what_one_makes(qwen, tmp_path):
    assert convert("--from-hf", qwen, tmp_path / "one") == 0
    assert convert("--to-hf", tmp_path / "one", tmp_path / "alone", "--max-shard-gb", 16e-6) == 0
    codes = world.run(2, _on_ranks, str(qwen), str(tmp_path))
    assert codes == [[0, 0], [0, 0]]
    names = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert sorted(file.name for file in (tmp_path / "together").iterdir()) == names
    for name in names:
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2


def _on_ranks(folder, tmp):
    from titanmoe.checkpoint.hf import convert_command

    join, destroy = convert_command._join, torch.distributed.destroy_process_group
    convert_command._join = lambda: torch.distributed.group.WORLD  # the pool's own, which outlives the call
    torch.distributed.destroy_process_group = lambda: None
    try:
        return [
            convert("--from-hf", folder, f"{tmp}/two"),
            convert("--to-hf", f"{tmp}/two", f"{tmp}/together", "--max-shard-gb", 16e-6),
        ]
    finally:
        convert_command._join, torch.distributed.destroy_process_group = join, destroy


@pytest.mark.parametrize("part", ["plan_folder", "write_file"])
def test_a_failing_rank_ends_all_and_leaves_nothing(qwen, tmp_path, part):
    assert convert("--from-hf", qwen, tmp_path / "two") == 0
    codes, printed = zip(*world.run(2, _failing, str(tmp_path), part), strict=True)
    assert codes == (2, 2)
    assert printed[0] == "error: No space left on device\n" and printed[1] == ""
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))


def _failing(tmp, part):
    """Only rank 1 fails, as if its own machine had a full disk."""
    from titanmoe.checkpoint.hf import convert, convert_command

    healthy, join, destroy = getattr(convert, part), convert_command._join, torch.distributed.destroy_process_group
    convert_command._join = lambda: torch.distributed.group.WORLD
    torch.distributed.destroy_process_group = lambda: None

    def full(*args):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return healthy(*args)

    setattr(convert, part, full)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = main(["convert", "--to-hf", f"{tmp}/two", f"{tmp}/out", "--max-shard-gb", "0.000016"])
        return code, stderr.getvalue()
    finally:
        setattr(convert, part, healthy)
        convert_command._join, torch.distributed.destroy_process_group = join, destroy


MEASURE = """
import threading
from titanmoe.checkpoint.hf import convert, huggingface_source  # what the conversion imports does not count
from titanmoe.cli import main

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

for words in (["--from-hf", "in", "ours"], ["--to-hf", "ours", "out", "--max-shard-gb", "0.02"]):
    base, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = main(["convert", *words])
    done.set()
    watcher.join()
    print("PEAK", code, peak[0] - base)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_few_tensors(tmp_path):
    """The peak of the process's own pages: those of mapped files can be dropped at any time."""
    shape = dict(hidden_size=256, intermediate_size=512, num_local_experts=8, vocab_size=64, num_hidden_layers=10)
    model = models.transformers.MixtralForCausalLM(
        models.transformers.MixtralConfig(**{**models.BASE, **shape, "num_experts_per_tok": 2})
    )
    whole = sum(p.nbytes for p in model.parameters())
    largest = 8 * 512 * 256 * 4
    models.save(model, tmp_path / "in", max_shard_size="20MB")
    del model
    # glibc keeps freed memory below a growing threshold: then the peak would be the allocator's
    env = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=120
    )
    codes_and_peaks = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PEAK")]
    assert [code for code, _ in codes_and_peaks] == ["0", "0"], done.stderr
    for _, peak in codes_and_peaks:
        print(f"peak {int(peak):,} of {whole:,} bytes, largest tensor {largest:,}")
        assert int(peak) < 4 * largest + 12e6 < whole / 4
    equal(models.tensors(tmp_path / "out"), models.tensors(tmp_path / "in"))


def test_transformers_stops_after_an_assistant_message(qwen, tmp_path, bpe):
    """The exported eos_token_id lists the ends of a text and of an assistant message, and the folder's earlier ids."""
    from transformers import AutoConfig, GenerationConfig

    (qwen / "generation_config.json").write_text('{"eos_token_id": 5, "top_k": 7}')
    assert convert("--from-hf", qwen, tmp_path / "ours") == 0
    (tmp_path / "ours/hf/config.json").unlink()
    manifest = folders.manifest_of(tmp_path / "ours")
    del manifest["files"]["hf/config.json"]
    folders.rewrite(tmp_path / "ours", **manifest)
    for name, template, marks in (("chat", CHATML, [0, 2]), ("none", None, [0])):
        tokenizer, out = tmp_path / f"tokenizer {name}", tmp_path / name
        tokenizer.mkdir()
        settings = {"eos_token": "<|endoftext|>"} | ({"chat_template": template} if template else {})
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
        (tokenizer / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
        assert convert("--to-hf", tmp_path / "ours", out, "--tokenizer", tokenizer) == 0
        made = GenerationConfig.from_pretrained(out)
        assert made.eos_token_id == [5, *marks] and made.top_k == 7
        assert AutoConfig.from_pretrained(out).eos_token_id == 0
    # All of it is there already: the file stays as it was.
    (qwen / "generation_config.json").write_text('{"eos_token_id": [2, 0], "top_k": 7}')
    (qwen / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (qwen / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    assert convert("--from-hf", qwen, tmp_path / "complete") == 0
    assert convert("--to-hf", tmp_path / "complete", tmp_path / "out") == 0
    assert (tmp_path / "out/generation_config.json").read_text() == '{"eos_token_id": [2, 0], "top_k": 7}'
