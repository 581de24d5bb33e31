"""The data format of docs/extending.md, in the package and outside."""

import shutil
from itertools import pairwise
from pathlib import Path

from titanmoe.cli import main
from titanmoe.data.formats import tsv
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenizer import ByteTokenizer


def texts(folder: str) -> list[str]:
    documents = ShardDocuments(Path(folder))
    return [ByteTokenizer().decode(documents.read(*ends).tolist()[1:-1]) for ends in pairwise(documents.starts[:])]


def test_it_reads_a_column_within_the_package_and_outside(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.tsv").write_text("name\ttext\none\tfirst\ntwo\tsecond\textra\nthree\tthird\n")
    Path("in/README.md").write_text("of other files in its folder")
    assert main(["tokenize", "in", "--format", "tsv", "--out", "refused"]) == 2
    assert "in/a.tsv:3: has 3 values, and there are 2 columns" in capsys.readouterr().err
    skip = ["--bad-lines", "skip"]
    assert main(["tokenize", "in/a.tsv", "--out", "by_extension", *skip]) == 0
    shutil.copy(tsv.__file__, "tables.py")
    assert main(["tokenize", "in", "--format", "tables:FORMAT", "--out", "outside", *skip]) == 0
    assert texts("by_extension") == texts("outside") == ["first", "third"]
