"""Commands of the documentation that need torch print what it says; its recipe works."""

import json
import os
import re
import subprocess

import pytest
from command_server import command_line
from consoles import PAGES, ROOT, WITH_TORCH, regenerated

pytest.importorskip("torch")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "CI": "1"}
WITH_BLOCKS = [page for page in PAGES if WITH_TORCH.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page):
    assert page.read_text() == regenerated(page, command_line(), WITH_TORCH).text, (
        "run `python tests/consoles.py torch` and look"
    )


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_recipe_makes_a_model_that_writes_words(tmp_path):
    """It is that of ten minutes, on another corpus and in fewer steps."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for page in PAGES:
        (corpus / f"{page.stem}.txt").write_text(page.read_text())
    config = ROOT / "samples" / "shakespeare" / "ten-minutes.yaml"
    recipe = [*command_line(), "train", corpus, "--config", config, "--steps", "250", "-o", "tiny"]
    subprocess.run(recipe, cwd=tmp_path, env=ENVIRONMENT, check=True)
    picture = (tmp_path / "tiny" / "loss.svg").read_text()
    points = re.search(r'points="(.*?)"', picture)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert sum(heights[-20:]) / 20 > 280  # it has fallen: 312 is the lowest, 48 the highest
    said = subprocess.run(
        [*command_line(), "run", "--model", "tiny", "-q"],
        input=json.dumps({"prompt": "The batch", "max_tokens": 60, "temperature": 0.7}).encode(),
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    words = re.findall(r"[a-z]{2,}", json.loads(said.stdout)["text"])
    known = set(re.findall(r"[a-z]{2,}", " ".join(page.read_text() for page in PAGES)))
    assert len(words) > 10
    assert sum(word in known for word in words) / len(words) > 0.7


def test_pages_have_such_commands():
    assert {page.name for page in WITH_BLOCKS} == {"huggingface.md", "pieces.md", "training.md"}
