"""What counts as a checkpoint on disk, and which one is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from tests.checkpoint.folders import flip_a_bit, make, rewrite
from titanmoe import files
from titanmoe.checkpoint import layout, manifest, safe_files
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, write_checkpoint
from titanmoe.checkpoint.choose_checkpoint import checkpoints_folder, choose_start
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.write_tensors import LazyTensor, _ChecksummedFile
from titanmoe.config.schema import Config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number, step in enumerate((10, 20, 30), 1):
        make(tmp_path / "run/checkpoints", step, number)
    return tmp_path / "run"


def config(run: Path, load: str = "auto") -> Config:
    config = Config()
    config.job.dump_folder, config.job.name = str(run.parent), run.name
    config.checkpoint.enable, config.checkpoint.load = True, load
    return config


def start_of(run: Path, load: str = "auto") -> tuple[str, list[str]]:
    beginning = choose_start(config(run, load).checkpoint, run, layout.find_damage)
    return beginning.path.name if beginning.path else "", beginning.notes


def shard(run: Path, step: int) -> Path:
    return run / "checkpoints" / layout.folder_name(step) / "rank-00000-000.distcp"


def test_auto_takes_the_last_one_made(run):
    assert start_of(run) == ("step-00000030", [])


def test_a_kill_before_latest_was_renamed_hides_nothing(run):
    layout.write_latest(run / "checkpoints", "step-00000020")
    name, message = start_of(run)
    assert name == "step-00000030" and "latest names step-00000020, which is older" in message[0]


def test_runs_do_not_share_an_absolute_folder(tmp_path):
    for name in ("a", "b"):
        settings = config(tmp_path / name)
        settings.checkpoint.folder = str(tmp_path / "all")
        assert checkpoints_folder(tmp_path / name, settings.checkpoint) == tmp_path / "all" / name


def test_a_run_without_checkpoints_starts_from_scratch(tmp_path):
    assert start_of(tmp_path / "run") == ("", [])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip_a_bit, "its contents have changed"),
        (lambda file: os.truncate(file, 100), "has 100 bytes but was written with"),
        (Path.unlink, "is missing"),
    ],
    ids=["bit", "truncated", "missing"],
)
def test_auto_passes_over_a_damaged_one_and_says_so(run, harm, words):
    harm(shard(run, 30))
    name, message = start_of(run)
    assert name == "step-00000020"
    assert (
        len(message) == 1
        and "passing over step-00000030" in message[0]
        and words in message[0]
        and "rank-00000" in message[0]
    )


@pytest.mark.parametrize("load", ["auto", "elsewhere"])
def test_all_damaged_is_refused_with_each_reason_and_how_to_start_over(run, load):
    """Another path to load is for a run without checkpoints of its own: its weights are no place to resume from
    either."""
    make(run.parent / "elsewhere/checkpoints", 5)
    for step in (10, 20, 30):
        flip_a_bit(shard(run, step))
    with pytest.raises(CheckpointError) as refused:
        start_of(run, load if load == "auto" else str(run.parent / load))
    text = str(refused.value)
    places = [text.index(f"step-000000{step}: {shard(run, step)} has CRC-32") for step in (30, 20, 10)]
    assert (
        places == sorted(places)
        and "--checkpoint.load=none starts from scratch on purpose" in text
        and "\n" not in text
    )
    assert choose_start(config(run, "none").checkpoint, run, layout.find_damage).path is None


def test_a_name_in_latest_alone_does_not_mean_a_new_run(run):
    for path in layout.checkpoints_by_step(run / "checkpoints").values():
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="latest names step-00000030, but there is no checkpoint"):
        start_of(run)


def test_a_damaged_one_that_was_asked_for_is_refused_with_the_file(run):
    flip_a_bit(shard(run, 20))
    with pytest.raises(CheckpointError, match=r"step-00000020/rank-00000-000.distcp has CRC-32"):
        start_of(run, "20")
    assert start_of(run, "10")[0] == "step-00000010"


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run):
    with pytest.raises(CheckpointError, match="has no such step: choose from 10, 20, 30"):
        start_of(run, "25")


def test_latest_that_names_nothing_is_passed_over(run):
    layout.write_latest(run / "checkpoints", "step-00000099")
    name, message = start_of(run)
    assert name == "step-00000030" and "step-00000099, which does not exist" in message[0]


def test_a_path_is_a_checkpoint_a_run_or_its_folder(run, tmp_path):
    other = tmp_path / "other"
    for path in (run, run / "checkpoints", run / "checkpoints/step-00000030"):
        assert start_of(other, str(path))[0] == "step-00000030"
    make(other / "checkpoints", 5)
    assert start_of(other, str(run))[0] == "step-00000005", "a run's own come first, so that a restart goes on"


@pytest.mark.parametrize("what", ["nowhere", "empty", "bare"])
def test_other_folders_are_refused_by_what_they_are(tmp_path, what):
    if what != "nowhere":
        (tmp_path / what).mkdir()
    if what == "bare":
        (tmp_path / what / ".metadata").touch()
    words = {"nowhere": "no such folder", "empty": "contains no checkpoint", "bare": "titanmoe did not write it"}[what]
    with pytest.raises(CheckpointError, match=words):
        start_of(tmp_path / "run", str(tmp_path / what))


def test_a_format_of_the_future_is_refused(run):
    rewrite(run / "checkpoints/step-00000030", format=7)
    with pytest.raises(CheckpointError, match="has checkpoint format 7, this titanmoe reads format 2"):
        start_of(run, "30")
    assert start_of(run)[0] == "step-00000020"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": "x"}'])
def test_a_damaged_manifest_is_one_line_that_names_it(run, text):
    (run / "checkpoints/step-00000030" / layout.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"step-00000030/manifest.json is damaged"):
        start_of(run, "30")
    assert start_of(run)[0] == "step-00000020"


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [(0, 0, [10, 20, 30]), (1, 0, [30]), (2, 0, [20, 30]), (1, 10, [10, 20, 30]), (1, 20, [20, 30])],
)
def test_retention(run, last, every, left):
    assert layout.remove_old(run / "checkpoints", run / "checkpoints/step-00000030", last, every) == []
    assert list(layout.checkpoints_by_step(run / "checkpoints")) == left


def test_retention_goes_by_when_they_were_made(run):
    """A run that went back to step 10 keeps what it makes now, not the steps of the future it left."""
    make(run / "checkpoints", 15, number=layout.next_save_number(run / "checkpoints"))
    layout.remove_old(run / "checkpoints", run / "checkpoints/step-00000015", 2, 0)
    assert list(layout.checkpoints_by_step(run / "checkpoints")) == [15, 30]


def test_leftovers_are_swept_and_nothing_else(run):
    folder = run / "checkpoints"
    for name in ("step-00000040.writing", "step-00000001.removing", "mine"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    (folder / "latest.new").touch()
    assert layout.clean_up_interrupted(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest", "mine", "step-00000010", "step-00000020", "step-00000030",
    ]  # fmt: skip


def test_a_full_disk_is_one_line_that_names_the_file_and_harms_nothing(run, monkeypatch):
    def full(self: _ChecksummedFile, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_ChecksummedFile, "write", full)
    with pytest.raises(CheckpointError, match=r"step-00000040.writing/rank-00000-000.distcp: No space left on device"):
        make(run / "checkpoints", 40)
    assert start_of(run) == ("step-00000030", [])
    assert not list((run / "checkpoints").glob("*.writing")), "its bytes are free again"


def test_a_failed_save_that_lacks_nothing_but_its_name_is_not_removed(run, monkeypatch):
    def fail(unfinished: Path, target: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(layout, "rename_into_place", fail)
        with pytest.raises(CheckpointError, match="step-00000040: Input/output error"):
            make(run / "checkpoints", 40)
    rewrite(run / "checkpoints/step-00000040.writing", number=4)
    assert layout.leftover_bytes(run / "checkpoints") == 0, "the next start does not remove it either"
    assert start_of(run)[0] == "step-00000040.writing"


def test_leftovers_are_what_the_next_start_removes(run):
    folder = run / "checkpoints"
    for name, size in {"step-00000040.writing/hf": 5, "step-00000001.removing": 7, "mine": 11}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x" * size)
    (folder / "step-00000050.writing").symlink_to(folder / "mine")
    assert layout.leftover_bytes(folder) == 12 and layout.leftover_bytes(run / "none") == 0
    layout.clean_up_interrupted(folder)
    assert layout.leftover_bytes(folder) == 0 and (folder / "mine/file").exists()


def test_a_byte_lost_on_the_way_is_found_before_the_checkpoint_is_visible(run, monkeypatch):
    lossy = _ChecksummedFile.close

    def close(self: _ChecksummedFile) -> None:
        written = not self.closed
        lossy(self)
        if written and self.path.suffix == ".distcp":
            flip_a_bit(self.path)

    monkeypatch.setattr(_ChecksummedFile, "close", close)
    with pytest.raises(CheckpointError, match=r"rank-00000-000.distcp has CRC-32"):
        make(run / "checkpoints", 40)
    assert start_of(run) == ("step-00000030", [])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        make(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(CheckpointError, match=r"/proc/titanmoe"):
        make(Path("/proc/titanmoe"), 1)


def test_an_existing_checkpoint_is_not_overwritten(run):
    with pytest.raises(CheckpointError, match="exists: choose another folder, or give --overwrite"):
        make(run / "checkpoints", 30)


def test_any_block_of_a_tensor_can_be_read_alone(tmp_path):
    tensor = torch.arange(60.0).view(5, 12)
    write_checkpoint(tmp_path / "c", {"x": LazyTensor((5, 12), torch.float32, slice_of_full(lambda: tensor))}, {})
    checkpoint = Checkpoint(tmp_path / "c")
    assert torch.equal(checkpoint.read("x"), tensor)
    assert torch.equal(checkpoint.read("x", (1, 2), (3, 4)), tensor[1:4, 2:6])
    assert checkpoint.read("x", (0, 0), (0, 12)).shape == (0, 12)
    with pytest.raises(CheckpointError, match="has no tensor y"):
        checkpoint.read("y")


def test_views_are_stored_without_the_storage_they_are_part_of(tmp_path):
    big = torch.zeros(1_000_000)
    write_checkpoint(tmp_path / "c", {"x": LazyTensor((10,), torch.float32, slice_of_full(lambda: big[5:15]))}, {})
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 20_000


@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 80 + "1" + "}" * 80], ids=len)
def test_a_record_that_is_nested_deep_is_one_line(run, deep):
    file = run / "checkpoints/step-00000030" / layout.MANIFEST
    _, _, rest = file.read_text().split("\n", 2)  # without its checksum, which is computed again
    file.write_text(manifest.with_checksum("{\n" + rest.replace('"step": 30', f'"step": 30, "deep": {deep}', 1)))
    with pytest.raises(CheckpointError, match=f"{file} is damaged: TooDeep lists or objects are nested too deep"):
        layout.read_manifest(file.parent)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_checksum_is_of_all_blocks_of_a_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "BLOCK", 8)
    (tmp_path / "file").write_bytes(bytes(range(size)))
    assert layout.compute_crc32(tmp_path, "file", size) == zlib.crc32(bytes(range(size)))


@pytest.mark.parametrize("best", [None, 5, {"step": [1]}, {"step": 20, "metric": 3}])
def test_a_manifest_with_another_best_is_damaged(run, best):
    newest = run / "checkpoints/step-00000030"
    content = json.loads((newest / layout.MANIFEST).read_text())
    rewrite(newest, record=content["record"] | {"best": best})
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: ValueError record.best"):
        start_of(run, "30")
    assert layout.best_step(newest) == -1
    with pytest.raises(CheckpointError, match="keeps no best checkpoint"):
        latest_checkpoint(run.with_name("run:best"))


def test_a_path_with_a_nul_does_not_exist() -> None:
    assert not safe_files.exists(Path("a\0b")) and layout.checkpoints_by_step(Path("a\0b")) == {}
    for name in ("a\0b", "a\0b:best"):
        with pytest.raises(CheckpointError):
            latest_checkpoint(Path(name))
