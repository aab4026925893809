"""What an engine takes beside its kernels: between them, and to launch them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.timing.catalog import CatalogError
from batcher.timing.profiles import load_profile, setup_of, split_overhead, step_time_of

KERNELS = ("h100_llama3.1-8b_tp1", "h100_llama3.1-70b_tp4", "h100_mixtral-8x7b_tp2")
ROOFLINES = ("roofline:llama-3.1-8b:h100-sxm", "roofline:llama-3.1-70b:h100-sxm:4x2")
NUM_LAYERS = {name: 80 if "70b" in name else 32 for name in (*KERNELS, *ROOFLINES)}
TICKS_PER_US = 10**9
STEPS = st.tuples(*(st.integers(1, most) for most in (4000, 300, 10**6, 10**7)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "engine.yaml"
    path.write_text('{gap_us: 25, launch_us: 350, source: "made up"}')
    return path


@given(step=STEPS)
@pytest.mark.parametrize("kernels", NUM_LAYERS)
def test_a_step_takes_its_kernels_and_the_gaps_of_all_layers_but_no_less_than_the_launches(
    kernels: str, engine: Path, step: tuple[int, int, int, int]
) -> None:
    alone = step_time_of(kernels).ticks(*step)
    layers = NUM_LAYERS[kernels]
    expected = max(alone + 25 * layers * TICKS_PER_US, 350 * layers * TICKS_PER_US)
    assert step_time_of(f"{kernels}@{engine}").ticks(*step) == expected


@pytest.mark.parametrize("kernels", [*KERNELS, *ROOFLINES])
def test_what_an_engine_takes_changes_neither_the_hardware_nor_the_model_nor_the_room(
    kernels: str,
) -> None:
    name = f"{kernels}@vllm-2025"
    setup = setup_of(name)
    assert setup == setup_of(kernels)
    assert None not in (setup.gpu, setup.shape, setup.kv_room)


def test_the_name_and_the_source_tell_of_the_engine(engine: Path) -> None:
    name, profile = load_profile(f"h100_llama3.1-8b_tp1@{engine}")
    assert name == f"h100_llama3.1-8b_tp1@{engine}"
    assert profile.source.endswith("the engine: made up")
    assert profile.least == pytest.approx(0.35 * 32)
    assert step_time_of(name).settings["least"] == profile.least


@pytest.mark.parametrize("path", ["/srv/us@here/ours.yaml", "./us@here/ours.yaml:NAME", "plain"])
def test_an_at_within_a_path_names_no_engine(path: str) -> None:
    assert split_overhead(path) == (path, None)
    assert split_overhead(f"{path}.yaml:2@vllm-2025")[0] == f"{path}.yaml:2"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("h100_llama3.1-8b_tp1@vllm-2026", r"unknown engine vllm-2026 \(did you mean vllm-2025"),
        ("h100_llama3.1-8b_tp1@none.yaml", "cannot read none.yaml"),
        ("samples/timing/profiles.yaml:our-gpu@vllm-2025", "a profile has to name its model"),
        ("roofline:llama-3.1-8b:h100-sxm@nothing", "unknown engine nothing"),
    ],
)
def test_an_engine_that_cannot_be_used_is_an_error(name: str, error: str) -> None:
    with pytest.raises(CatalogError, match=error):
        step_time_of(name)
