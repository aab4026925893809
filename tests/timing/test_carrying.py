"""Profiles carried to other numbers of GPUs: by hand, there and back, beside what was measured."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from batcher.timing.carrying import load_profile, on_gpus
from batcher.timing.catalog import CatalogError
from batcher.timing.physics import EXAMPLE_STEPS, check_physics
from batcher.timing.profiles import TERMS, Profile, shipped_profiles

ALONE = Profile(
    t0=3.0, w=17.0, f=0.08, g=0.02, d=4e-4, h=2e-4, e=4e-6, by_tokens=((8, 16.0), (64, 24.0)),
    hardware="rtx-4090", model="llama-3.1-8b", kv_tokens=40_000,
)  # fmt: skip


def test_what_gpus_share_and_what_they_wait_for() -> None:
    two = on_gpus(ALONE, 2)
    halves = {term: getattr(two, term) * 2 for term in ("w", "f", "g", "d", "h", "e")}
    assert halves == pytest.approx({term: getattr(ALONE, term) for term in halves})
    assert two.by_tokens == ((8, 8.0), (64, 12.0))
    # 64 all-reduces of 5.5 µs; reading half of 15.01 GB at 85 % of 1,008 GB/s less
    assert two.t0 + two.w == pytest.approx(20 - 15.01 / 2 / 1.008 / 0.85 + 64 * 5.5e-3, rel=1e-3)
    # a token: 64 times 4,096 numbers of 2 bytes, at 19 GB/s
    assert two.c == pytest.approx(64 * 4096 * 2 / 19e9 * 1e3, rel=1e-4)
    assert (two.tensor_parallel, two.kv_tokens) == (2, None)
    assert "from 1 GPU to 2 GPUs," in two.error


def test_there_and_back_is_where_it_began() -> None:
    again = on_gpus(replace(on_gpus(ALONE, 2), error=ALONE.error), 1)
    assert again.terms == pytest.approx(ALONE.terms, rel=1e-4)
    assert on_gpus(ALONE, 1) is ALONE


def test_stages_of_a_pipeline() -> None:
    one, two = (on_gpus(ALONE, 2, stages) for stages in (1, 2))
    assert two.terms == pytest.approx(
        one.terms
        | {"t0": one.t0 + 5.5e-3, "c": one.c + 4096 * 2 / 19e9 * 1e3}, rel=1e-4
    )  # fmt: skip
    assert "from 1 GPU to 4 GPUs in 2 stages" in two.error
    step_time, of_one = two.step_time("two"), one.step_time("one")
    assert step_time.settings["pipeline_parallel"] == 2
    rows = step_time.ticks(32, 32, 32_000, 0)
    # half of the rows at a time, and the messages between stages
    between = 5.5e-6 + 16 * 4096 * 2 / 19e9
    assert rows == pytest.approx(of_one.ticks(16, 16, 16_000, 0) + between * 1e15, rel=1e-6)
    assert step_time.ticks(1, 1, 1000, 0) > of_one.ticks(1, 1, 1000, 0)


def test_the_heads_of_keys_are_not_divided() -> None:
    assert on_gpus(ALONE, 32).d == pytest.approx(ALONE.d / 8)
    assert on_gpus(ALONE, 32).e == pytest.approx(ALONE.e / 32)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_it_is_near_what_was_measured(gpu: str) -> None:
    carried = load_profile(f"{gpu}_llama3.1-70b_tp4:8")[1].step_time("carried")
    measured = shipped_profiles()[f"{gpu}_llama3.1-70b_tp8"].step_time("measured")
    for name, step in EXAMPLE_STEPS.items():
        many = name in ("decode 128 x 1,024", "decode 256 x 1,024")
        error = carried.ticks(*step) / measured.ticks(*step) - 1
        assert abs(error) < (0.2 if many else 0.09), name


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_none_that_is_carried_beats_its_hardware(name: str, stages: tuple[int, int]) -> None:
    carried = on_gpus(shipped_profiles()[name], *stages)
    assert check_physics(carried)[0].verdict == "possible"
    assert all(value >= 0 for value in carried.terms.values())


def test_a_name_with_a_number_of_gpus(tmp_path: Path) -> None:
    name, profile = load_profile("h100_llama3.1-8b_tp1:2")
    assert (name, profile.tensor_parallel) == ("h100_llama3.1-8b_tp1:2", 2)
    path = tmp_path / "mine.yaml"
    terms = ", ".join(f"{term}: 1" for term in TERMS)
    path.write_text(f"one: {{{terms}, hardware: l40s, model: llama-3.1-8b}}")
    assert load_profile(f"{path}:one:4")[1].tensor_parallel == 4
    assert load_profile(f"{path}:2")[0] == "one:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100_llama3.1-8b_tp1:0", "expected 1 to 1024 GPUs, .*, not 0"),
        ("samples/timing/profiles.yaml:our-gpu:2", "has to name its hardware and model"),
        ("nothing:2", "unknown profile nothing"),
    ],
)
def test_what_cannot_be_carried(text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        load_profile(text)
