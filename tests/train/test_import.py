"""titanmoe itself is quick to import: a start only waits for torch."""

from tests.support import processes

NAMES = "import sys, titanmoe.train.launch, titanmoe.train.build, titanmoe.train.trainer; print(*sys.modules)"


def test_a_run_imports_what_it_needs_when_it_needs_it() -> None:
    """Tokenizers, Parquet, image libraries, TensorBoard and the like take up to seconds each. Read in a fork of a
    process that has imported all that ranks of tests need, which is more."""
    run = processes.run(["-c", NAMES])
    assert run.returncode == 0, run.stderr
    names = run.stdout.split()
    assert [name for name in names if "ops.kernels" in name] == [
        "titanmoe.ops.kernels"
    ]  # no kernel unless it is needed
    heavy = {
        "tensorboard",
        "torchdata",
        "tokenizers",
        "transformers",
        "safetensors",
        "pyarrow",
        "PIL",
        "jinja2",
        "wandb",
    }
    assert not heavy.intersection(name.partition(".")[0] for name in names)
