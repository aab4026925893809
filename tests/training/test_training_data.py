"""What is read as a corpus, what of it is held out, and what is refused."""

import errno
import os
import re
import resource
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
import yaml
from consoles import ROOT
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from batcher import decode, load_model
from batcher.errors import BatchdecodeError
from batcher.training.data import (
    NO_TARGET,
    Evaluation,
    Losses,
    Packing,
    TrainingSettings,
    learning_rate,
    loss_curve,
    read_corpus,
    split_text,
    write_whole,
)
from cli.commands import train
from cli.commands.train import TrainOptions

LINES = st.lists(st.text("ab ", max_size=9).map("{}\n".format)).map("".join)


@given(LINES, st.floats(0.01, 0.5))
def test_a_text_is_its_pieces_and_what_is_held_out_are_whole_lines_in_its_middle(text, holdout):
    before, held_out, after = split_text(text, holdout)
    assert before + held_out + after == text
    if held_out:
        assert before.endswith("\n")
        assert held_out.endswith("\n")


@given(st.integers(200, 400), st.floats(0.05, 0.5))
def test_the_share_that_is_held_out_is_the_one_that_was_asked_for(num_lines, holdout):
    text = "".join(f"{number:04}\n" for number in range(num_lines))
    _, held_out, _ = split_text(text, holdout)
    assert 0 < len(held_out) - holdout * len(text) < 7  # a line has five characters


def test_files_are_texts_in_the_order_of_their_names_and_one_line_holds_nothing_out(tmp_path):
    assert split_text("a long line, and no end", 0.5) == ("a long line, and no end", "", "")
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(f"{name}\n" * 20)
    corpus = read_corpus(tmp_path, 0.1)
    texts = [piece.text[:6] for piece in corpus.training]
    assert texts == ["a.txt\n", "a.txt\n", "b.txt\n", "b.txt\n"]
    assert [piece.is_end for piece in corpus.training] == [False, True] * 2
    assert [piece.text for piece in corpus.held_out] == ["a.txt\n" * 3, "b.txt\n" * 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no such file"),
        ("empty.txt", b" \n\n", "is empty"),
        ("latin.txt", "Grüße".encode("latin-1"), "can't decode byte 0xfc in position 2"),
        ("binary.txt", b"ab\0c", "it contains NUL and is not text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchdecodeError, match=re.escape(message)) as caught:
        read_corpus(tmp_path / name, 0.1)
    assert name in str(caught.value)


def test_a_folder_without_texts_or_with_too_many_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(BatchdecodeError, match=r"contains no \.txt file"):
        read_corpus(tmp_path, 0.1)
    monkeypatch.setattr("batcher.training.data.MAX_CORPUS", 10)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("123456")
    with pytest.raises(BatchdecodeError, match="more than 10 characters"):
        read_corpus(tmp_path, 0.1)


# Rows hold every token once, say which text it is of, and predict nothing across texts.


TEXTS = st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1).filter(
    lambda texts: sum(map(len, texts)) >= 12
)
LENGTHS = st.integers(2, 6)


def flat(texts):
    return [
        (token, number, text[place + 1] if place + 1 < len(text) else NO_TARGET)
        for number, text in enumerate(texts)
        for place, token in enumerate(text)
    ]


def cells(rows):
    arrays = (rows.tokens, rows.documents, rows.targets)
    return [list(zip(*(a.tolist() for a in row), strict=True)) for row in zip(*arrays, strict=True)]


@given(TEXTS, LENGTHS)
def test_rows_in_order_are_the_texts_one_after_the_other(texts, seq_length):
    packing = Packing(texts, seq_length)
    found = [cell for row in cells(packing.in_order()) for cell in row]
    assert len(found) == packing.num_rows * seq_length
    assert found == flat(texts)[: len(found)]
    assert packing.num_tokens - len(found) < 2 * seq_length


@given(TEXTS, LENGTHS, st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_each_of_its_rows_once_in_any_order(texts, seq_length, number, seed):
    packing = Packing(texts, seq_length)
    rows = cells(packing.epoch(number, seed))
    first = next(
        first
        for first in range(seq_length)
        if sorted(rows)
        == sorted(
            flat(texts)[start : start + seq_length]
            for start in range(first, first + packing.num_rows * seq_length, seq_length)
        )
    )
    assert first < seq_length
    assert cells(packing.epoch(number, seed)) == rows


def test_epochs_and_seeds_differ_and_targets_stay_in_their_texts():
    packing = Packing([list(range(1000))], 10)
    orders = [
        packing.epoch(number, seed).tokens.tolist() for number, seed in [(0, 0), (1, 0), (0, 1)]
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert len({order[0][0] % 10 for order in orders}) > 1  # they are cut at other places
    rows = Packing([[1, 2, 3], [4, 5, 6, 7], [8, 9]], 3).in_order()
    assert rows.num_targets == 5
    assert rows.targets.tolist() == [[2, 3, NO_TARGET], [5, 6, 7]]
    with pytest.raises(
        BatchdecodeError, match="7 tokens are too few for rows of seq_length 4: use at least 8"
    ):
        Packing([[1, 2, 3], [4, 5, 6, 7]], 4)


@given(st.integers(20, 200), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_the_steps_of_an_epoch_have_all_its_rows(num_tokens, batch_size, accumulate, step):
    settings = TrainingSettings(seq_length=5, batch_size=batch_size, accumulate=accumulate)
    packing = Packing([range(num_tokens)], 5)
    steps_per_epoch = -(-packing.num_rows // (batch_size * accumulate))
    epoch = step // steps_per_epoch
    steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
    sizes = [[len(batch.tokens) for batch in packing.of_step(n, settings)] for n in steps]
    assert all(size == [batch_size] * accumulate for size in sizes[:-1])
    assert len(sizes[-1]) <= accumulate
    assert all(size == batch_size for size in sizes[-1][:-1])
    assert 0 < sizes[-1][-1] <= batch_size
    tokens = np.concatenate([batch.tokens for n in steps for batch in packing.of_step(n, settings)])
    assert (tokens == packing.epoch(epoch, settings.seed).tokens).all()


# There is always a whole file: the old one, or the new one.


def test_a_file_is_written_and_nothing_beside_it(tmp_path):
    for content in (b"old", b"new"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_room_leaves_the_old_file(tmp_path):
    write_whole(tmp_path / "file", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_whole(tmp_path / "file", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "file")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_new_file_has_its_name_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")
    on_disk = []

    def fsync(descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").resolve()
        on_disk.append((place == tmp_path, (tmp_path / "file").read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "file", b"new")
    assert on_disk == [(False, b"old"), (True, b"new")]


# Settings of a run, from --config and options; what they are refused for is said.


def options(**given):
    return TrainOptions(**({"corpus": "corpus.txt", "output": "out"} | given))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: many", '1:1: steps must be an integer from 1 to 2,147,483,648, not "many"'),
        ("seq_lenght: 3", "1:1: unknown setting seq_lenght; did you mean seq_length?"),
        ("seed: 1\nprecision: fp8", '2:1: precision must be fp32, bf16 or fp16, not "fp8"'),
        ("holdout: 0.9", "1:1: holdout must be a number above 0 and up to 0.5, not 0.9"),
        ("hidden_size: 100\nnum_heads: 3", "hidden_size 100 does not divide into 3 heads"),
        ("hidden_size: 12\nnum_heads: 4", "hidden_size 12 does not divide into 4 heads of an even"),
        ("steps: 10\nwarmup_steps: 10", "warmup_steps 10 is not below the 10 steps"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    with pytest.raises(BatchdecodeError, match=re.escape(message)):
        train.train(options(config=str(path)))


def test_options_go_before_the_file_and_the_file_before_defaults(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("steps: 100\nseed: 3\nnum_layers: 2\n")
    found = train.settings_of(options(config=str(path), steps=200, precision="bf16"))
    assert found == TrainingSettings(steps=200, seed=3, num_layers=2, precision="bf16")
    with pytest.raises(BatchdecodeError, match="--accumulate must be an integer from 1 to 4,096, "):
        train.settings_of(options(accumulate=10**6))
    assert TrainingSettings() == msgspec.convert({}, TrainingSettings)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(train, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(BatchdecodeError, match=r"pip install 'batchdecode\[train\]'"):
        train.train(options())


# The learning rate: up in a line, down in half a cosine, and never nothing.


SETTINGS = TrainingSettings(steps=110, warmup_steps=10, learning_rate=0.01)


def test_warm_up_is_a_line_and_the_rest_a_cosine():
    rates = [learning_rate(step, SETTINGS) for step in range(11)]
    assert rates == pytest.approx([0.01 * (step + 1) / 11 for step in range(11)])
    assert learning_rate(60, SETTINGS) == pytest.approx(0.005)
    assert 0 < learning_rate(109, SETTINGS) < 0.01 / 1000


@given(st.integers(1, 500), st.data())
def test_no_step_has_a_rate_of_nothing_and_none_more_than_was_asked_for(steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    settings = TrainingSettings(steps=steps, warmup_steps=warmup)
    rates = [learning_rate(step, settings) for step in range(steps)]
    assert min(rates) > 0
    assert max(rates) == rates[warmup] == settings.learning_rate
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


# The losses of a run as SVG.


SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture):
    return ET.fromstring(picture)  # noqa: S314 - it is our own


def lines_of(picture):
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in parsed(picture).iter(f"{SVG}polyline")
    ]


def test_losses_are_lines_that_fall_with_means_where_they_are_long():
    losses = Losses([4.0, 3.0, 2.0], {3: Evaluation(2.5)})
    training, held_out = lines_of(loss_curve(losses))
    assert [x for x, _ in training] == pytest.approx([256, 464, 672])
    assert [y for _, y in training] == pytest.approx([48, 180, 312])  # down, as y grows
    assert held_out == [(672, 246)]
    losses = Losses([4.0, 2.0], {2: Evaluation(9.0, 3.0, 0.5, 0.5)})
    assert lines_of(loss_curve(losses))[1] == [(672, 180)]
    losses = Losses([1.0, 3.0] * 600, {})
    training, held_out = lines_of(loss_curve(losses))
    assert len(training) == 600
    assert {y for _, y in training} == {48}
    assert held_out == []


# docs/guide/training.md says what each setting is by default.


PAGE = Path(__file__).parents[2] / "docs" / "guide/training.md"


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    documented = {
        name: yaml.safe_load(value)
        for names, values in rows
        for name, value in zip(
            re.findall(r"`(\w+)`", names), values.replace("`", "").split(", "), strict=True
        )
    }
    assert documented == {field.name: field.default for field in fields(TrainingSettings)}


PAIR = ROOT / "samples" / "shakespeare"
COMMON = "the and to of my is not that me in it be you will".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def written():
    target = load_model(str(PAIR / "target"))
    prompt = target.tokenizer.encode("FIRST LORD.\n")
    return prompt, decode([{"prompt": prompt, "max_tokens": 80}], model=target)[0]


def test_the_target_writes_english_and_the_draft_foresees_half_of_it(written):
    words = Counter(written[1].text.lower().split())
    assert sum(words[word] for word in COMMON) > words.total() / 5
    sizes = [path.stat().st_size for path in PAIR.rglob("*") if path.is_file()]
    assert sum(sizes) < 4_000_000
    prompt, result = written
    tokenizers = [(PAIR / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert tokenizers[0] == tokenizers[1]
    rows = [
        {"prompt": [*prompt, *result.tokens[:length]], "max_tokens": 1}
        for length in range(len(result.tokens))
    ]
    drafted = decode(rows, model=load_model(str(PAIR / "draft")), batch_size=16)
    agreed = sum(token == row.tokens[0] for token, row in zip(result.tokens, drafted, strict=True))
    assert agreed > len(rows) / 2
