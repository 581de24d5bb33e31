"""The kernels compile to Hopper machine code at the shapes of every recipe, and fit a multiprocessor. This needs
Triton's compiler but no GPU.

The interpreter of tests/ops/test_interpreter.py accepts what the compiler does not, such as a loop that changes a
variable's type.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanmoe.ops.kernels import installed, interpreted

if not installed() or interpreted():
    pytest.skip("Triton's compiler is not there", allow_module_level=True)

import triton

from tests.support.launches import SHARED_MEMORY, Kernel, compile_kernels, compile_launches, register_ranges, resources

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_MODEL = ("sft_debug", "dpo_debug")
"""Their model is made where it is needed."""
RECIPES = sorted(p for p in (ROOT / "train_configs").glob("*.toml") if p.stem not in WITHOUT_MODEL)
FIRST = ("qwen3_30b_a3b", "lora_qwen3_30b_a3b")
FLOAT64 = ("--training.dtype", "float64", "--training.mixed_precision_param", "float64")


def fit(kernels: list[Kernel]) -> None:
    """Without local memory, where registers are spilled to, and with no more shared memory than a block can have."""
    for name, kernel in kernels:
        used = resources(kernel)
        assert (used.stack, used.local) == (0, 0) and used.shared <= SHARED_MEMORY, (name, used, kernel.src.constants)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_launches_compile_for_their_addresses() -> None:
    """Numbers are read 16 bytes at a time where they begin at a multiple of that."""
    from titanmoe.ops.kernels import permute_rows

    x, index = torch.empty(8 * 64 + 8, dtype=torch.bfloat16, device="meta"), torch.empty(4, dtype=torch.int64)
    for begin, wide in ((0, True), (4, False), (8, True)):
        with compile_launches() as made:
            permute_rows.fetch_rows.__wrapped__(x[begin:][: 8 * 64].view(8, 64), index)
        ((_, kernel),) = made
        assert ("ld.global.v4.b32" in kernel.asm["ptx"]) == wide, begin
    rows_and_weights = torch.empty(8, 64 + permute_rows.SPACE // 2, dtype=torch.bfloat16, device="meta")
    with compile_launches() as made:  # the next row begins after the weight, at a multiple of 16 bytes
        permute_rows.fetch_unpacked_rows.__wrapped__(rows_and_weights, index, torch.float32)
    assert "ld.global.v4.b32" in made[0][1].asm["ptx"]


@pytest.mark.parametrize(
    "recipe", [pytest.param(p, marks=() if p.stem in FIRST else pytest.mark.slow, id=p.stem) for p in RECIPES]
)
def test_recipes(recipe: Path) -> None:
    kernels = compile_kernels(recipe)
    # Unrolled over the experts and several warps the router was 500 KB and took half a minute to compile.
    assert max(len(kernel.asm["cubin"]) for _, kernel in kernels) < 300_000
    files = {name.partition(".")[0] for name, _ in kernels}
    assert files >= {"permute_rows", "weighted_swiglu", "route"} and files & {"rotate", "latent_heads"}
    fit(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["deepseek_671b", "gpt_oss_20b"])
def test_float64(recipe: str) -> None:
    fit(compile_kernels(ROOT / f"train_configs/{recipe}.toml", *FLOAT64))


@pytest.mark.slow
def test_the_table_of_registers() -> None:
    for_gpus = [recipe for recipe in RECIPES if "debug" not in recipe.stem]
    used = register_ranges([kernel for recipe in for_gpus for kernel in compile_kernels(recipe)])
    files = {path.stem for path in (ROOT / "titanmoe/ops/kernels").glob("*.py") if "@triton.jit" in path.read_text()}
    assert {name.partition(".")[0] for name in used} == files
    page = (ROOT / "tests/ops/registers.txt").read_text()
    head, _, *rows = page.partition("| kernel | ")[2].partition("\n\n")[0].splitlines()
    version = "Triton " + ".".join(triton.__version__.split(".")[:2])
    if version not in head:
        pytest.skip(f"the table has no column for {version}")
    column = [cell.strip() for cell in head.strip(" |").split("|")].index(version)
    assert {row.split("|")[1].strip(" `"): row.split("|")[2 + column].strip() for row in rows} == used
