"""`titanmoe fold`: the picture, the groups, the list, and the answer to an illegal mapping."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanmoe.cli import main

ROOT = Path(__file__).parents[2]
RECIPE = """
[model]
family = "qwen3_moe"
size = "debug"

[training]
seq_len = 64
global_batch_size = 12

[parallelism]
tp = 2

[parallelism.experts]
ep = 3
"""


@pytest.fixture
def fold(capsys):
    def run(*line: object) -> tuple[int, str, str]:
        code = main(["fold", *map(str, line)])
        return code, *capsys.readouterr()

    return run


def test_draws_without_colour_into_a_pipe(fold):
    code, out, err = fold("--ranks", 16, "--tp", 2, "--cp", 2, "--pp", 2, "--ep", 4, "--etp", 1)
    assert (code, err) == (0, "")
    assert out.startswith("16 ranks on 2 nodes of 8\n  attention = pp 2 x dp_replicate 1 x dp_shard 2 x cp 2 x tp 2\n")
    assert "\x1b" not in out
    assert out == "".join(f"{line.rstrip()}\n" for line in out.splitlines())


def test_json_is_the_groups_of_both_views(fold):
    code, out, _ = fold("--ranks", 16, "--tp", 2, "--cp", 2, "--pp", 2, "--ep", 4, "--json")
    assert code == 0
    pairs = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert json.loads(out) == {
        "attention": {
            "tp": [[rank, rank + 1] for rank in range(0, 16, 2)],
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "dp": pairs,
            "pp": [[rank, rank + 8] for rank in range(8)],
        },
        "experts": {
            "etp": [[rank] for rank in range(16)],
            "ep": [list(range(first, first + 4)) for first in (0, 4, 8, 12)],
            "edp": pairs,
            "pp": [[rank, rank + 8] for rank in range(8)],
        },
    }


def test_json_joins_the_replicated_and_the_sharded_axes(fold):
    _, out, _ = fold("--ranks", 8, "--dp-replicate", 2, "--tp", 2, "--ep", 2, "--json")
    report = json.loads(out)
    assert report["attention"]["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert report["experts"]["edp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_plan_is_a_row_for_each_module_of_the_layers_that_have_it(fold):
    family = ("--family", "qwen3_next", "--size", "debug", "--ranks", 8, "--pp", 2, "--tp", 4, "--ep", 2, "--etp", 2)
    code, out, err = fold(*family, "--plan")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    linear, full = lines.index("layers.{0-2}"), lines.index("layers.{3}")
    assert lines[linear + 1] == ("attention TensorParallel tp 4 conv_q 0, conv_k 0, conv_v 0, dt_bias 0, A_log 0")
    assert lines[linear + 2] == "attention.wk Sharded tp 4 weight 0" and linear < full
    assert lines[full + 1 : full + 3] == ["attention TensorParallel tp 4", lines[linear + 2] + " up to tp 8"]
    assert "moe.router StageReplicated stage of 4 weight -" in lines
    assert "moe.experts ExpertParallel ep 2 x etp 2 w1 1, w3 1, w2 2" in lines
    assert lines[-1] == "2 pipeline stages: embed and layers 0-2; 3 and head"
    code, out, _ = fold(*family, "--plan", "--parallelism.vocab", "pipeline", "--training.global_batch_size", 4)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and {f"{end} VocabularyParallel pp 2 x tp 4 weight 0" for end in ("embed", "head")} <= {*lines}
    assert "head.norm Replicated tp 4 weight -" in lines
    assert lines[-1] == "2 pipeline stages: layers 0-1; 2-3; embed and head over all"
    code, out, err = fold("--ranks", 8, "--plan")
    assert (code, out) == (2, "") and "--plan needs a model: give a recipe, or --family and --size" in err


def test_an_illegal_mapping_exits_2_with_everything_and_the_nearest(fold):
    code, out, err = fold("--ranks", 16, "--tp", 3, "--ep", 3, "--json")
    assert (code, out) == (2, "")
    assert "tp = 3 does not divide the stage of 16 ranks" in err
    assert "ep = 3 does not divide the stage of 16 ranks" in err
    assert (
        "Nearest legal mappings:\n  tp 3 -> 4, ep 3 -> 4\n      attention = pp 1 x dp_replicate 1 x dp_shard 4" in err
    )


def test_the_laws_of_a_family(fold):
    code, out, _ = fold("--ranks", 8, "--family", "mixtral", "--size", "8x7b", "--ep", 8)
    assert code == 0
    assert out.startswith("8 ranks on 1 node of 8: mixtral 8x7b, 32 layers, 8 experts\n")
    code, _, err = fold("--ranks", 12, "--family", "mixtral", "--size", "8x7b", "--tp", 12, "--seq-len", 4097)
    assert code == 2
    assert "tp = 12 does not divide model.num_kv_heads = 8 (8 % 12 = 8), and is no multiple of it" in err
    assert "training.seq_len = 4097 is not a multiple of" in err
    assert "tp 12 -> 1\n" in err
    code, _, err = fold("--ranks", 16, "--family", "mixtral", "--size", "8x7b", "--ep", 16)
    assert "ep = 16 does not divide model.num_experts = 8 (8 % 16 = 8): use ep in 1, 2, 4, 8" in err


def test_half_a_model_is_refused_with_the_names_there_are(fold):
    code, _, err = fold("--ranks", 8, "--family", "mixtral")
    assert code == 2 and "8x22b_g8t8" in err
    code, _, err = fold("--ranks", 8, "--size", "8x7b", "--ep", 3)
    assert code == 2 and "qwen3_moe" in err and "ep = 3 does not divide the stage" in err
    code, _, err = fold("--ranks", 8, "--seq-len", 64)
    assert code == 2 and "give --family and --size too, or a recipe" in err


def test_a_recipe_and_degrees_in_its_place(fold, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    code, _, err = fold("--ranks", 8, "--config", recipe)
    assert code == 2
    assert "ep = 3 does not divide model.num_experts = 16" in err
    assert "\n  ep 3 -> 4\n" in err
    code, out, _ = fold("--ranks", 8, "--config", recipe, "--ep", 4)
    assert code == 0
    assert out.startswith("8 ranks on 1 node of 8: qwen3_moe debug, 4 layers, 16 experts\n")
    assert "dp_shard 4 x cp 1 x tp 2" in out
    code, _, err = fold("--ranks", 8, "--config", recipe, "--ep", 4, "--tp", 1)
    assert code == 2 and "training.global_batch_size = 12 is not a multiple of" in err
    code, _, err = fold("--ranks", 8, "--config", tmp_path / "none.toml")
    assert code == 2 and "none.toml" in err


def test_an_unknown_key_of_a_recipe_does_not_hide_its_mapping(fold, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + "capacity = 1\n")
    code, _, err = fold("--ranks", 8, "--config", recipe)
    assert code == 2
    assert "capacity" in err and "ep = 3 does not divide" in err


def test_the_list_names_every_legal_mapping(fold):
    code, out, _ = fold("--ranks", 8, "--list")
    assert code == 0
    assert out.startswith("517 legal mappings of 8 ranks, on nodes of 8\n")
    _, out, _ = fold("--ranks", 8, "--list", "--json")
    rows = json.loads(out)
    assert len(rows) == len({tuple(row.items()) for row in rows}) == 517
    assert len(out.splitlines()) == 517
    assert set(rows[0]) == {"pp", "dp_replicate", "dp_shard", "cp", "tp", "edp_replicate", "edp", "ep", "etp"}


def test_the_list_narrows_to_what_is_given(fold):
    _, out, _ = fold("--ranks", 8, "--list", "--json", "--tp", 2, "--ep", 4, "--dp-shard", -1)
    rows = json.loads(out)
    assert {(row["tp"], row["ep"]) for row in rows} == {(2, 4)}
    # a stage of 8: tp leaves 4 to three axes (6 ways), ep leaves 2 (3 ways); a stage of 4: 3 ways and 1
    assert len(rows) == 6 * 3 + 3 * 1
    code, out, err = fold("--ranks", 8, "--list", "--tp", 3)
    assert (code, out) == (2, "")
    assert "no mapping of 8 ranks with tp 3 is legal" in err


def test_the_list_obeys_a_model(fold):
    _, out, _ = fold("--ranks", 16, "--list", "--json", "--family", "mixtral", "--size", "debug", "--seq-len", 64)
    rows = json.loads(out)
    assert max(row["ep"] for row in rows) == max(row["tp"] for row in rows) == 8
    assert max(row["pp"] for row in rows) == 4


def test_impossible_numbers(fold):
    code, _, err = fold("--ranks", 0)
    assert code == 2 and "--ranks = 0 is not a number of ranks" in err
    code, _, err = fold("--ranks", 0, "--list")
    assert code == 2 and "--ranks = 0 is not a number of ranks" in err
    code, _, err = fold("--ranks", 8, "--node", 0)
    assert code == 2 and "--node = 0 is not a number of ranks" in err and "Nearest" not in err
    code, _, err = fold("--ranks", 8, "--tp", 0, "--etp", -1)
    assert code == 2 and "tp 0 -> 1, etp -1 -> 1" in err
    with pytest.raises(SystemExit) as exit:
        main(["fold", "--ranks", "eight"])
    assert exit.value.code == 2


def test_torch_is_not_imported():
    code = "import sys; from titanmoe.cli import main; main(['fold', '--ranks', '8']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_pipe_that_closes_early_and_an_ascii_one():
    run = f"{sys.executable} -c 'from titanmoe.cli import main; import sys; sys.exit(main())' fold --ranks"
    closed = subprocess.run(f"{run} 1024 --list --json | head -1", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert closed.stdout.startswith('[{"pp": 1,') and closed.stderr == ""
    ascii_only = subprocess.run(
        f"PYTHONIOENCODING=ascii {run} 4 --tp 2", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert "[---- dp0 -----][---- dp1 -----]" in ascii_only.stdout


def test_the_picture_of_the_readme_is_what_the_command_draws(fold, tmp_path):
    code, out, _ = fold("--ranks", 8, "--tp", 2, "--cp", 2, "--ep", 8, "--svg", tmp_path / "fold.svg")
    new_picture, page_picture = ((folder / "fold.svg").read_text() for folder in (tmp_path, ROOT / "docs"))
    words = [re.findall(r">([^<>]+)</text>", picture) for picture in (new_picture, page_picture)]
    assert code == 0 and words[0] == words[1] and "ep7" in str(words) and "ep7" in out
    assert "font-face" not in new_picture and "url(http" not in new_picture
    code, _, err = fold("--ranks", 2, "--svg", tmp_path / "gone" / "fold.svg")
    assert code == 2 and "cannot write" in err
