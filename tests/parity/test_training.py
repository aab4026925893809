"""Training, with torch: gradients of a plain loop, precisions, resuming, and the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from batcher import decode, load_model  # noqa: E402 - torch may be missing
from batcher.errors import BatchdecodeError  # noqa: E402 - as above
from batcher.models.checkpoints import open_checkpoint  # noqa: E402 - as above
from batcher.training.data import (  # noqa: E402 - as above
    NO_TARGET,
    STATE,
    Packing,
    TrainingSettings,
    read_material,
    write_model,
)
from batcher.training.trainer import (  # noqa: E402 - as above
    Llama,
    Objective,
    Trainer,
    accumulate_gradients,
    loss_scaler,
    update,
)
from batcher.transformer.config import RopeSettings, TransformerConfig  # noqa: E402 - as above

functional = torch.nn.functional
torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
SETTINGS = TrainingSettings(
    vocab_size=300,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=48,
    seq_length=16,
    batch_size=3,
    steps=12,
    warmup_steps=2,
    holdout=0.2,
    save_every=4,
)
VERSE = "The fox sees a river, and the river sees the fox; who keeps what {} takes?\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "verses.txt"
    path.write_text("".join(VERSE.format(number) for number in range(60)))
    return path


@pytest.fixture(scope="module")
def material(corpus):
    return read_material(corpus, SETTINGS, None)


def tiny(vocab_size=50, num_kv_heads=2):
    torch.manual_seed(1)
    return Llama(
        TransformerConfig(
            "llama",
            vocab_size=vocab_size,
            num_layers=2,
            hidden_size=16,
            num_heads=2,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            intermediate_size=24,
            rms_norm_eps=1e-5,
            max_position_embeddings=64,
            rope=RopeSettings(),
            ties_embeddings=True,
            eos_token_ids=(0,),
        )
    )


def gradients_of(model):
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


def close(found, wanted, within=1e-6):
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=within), name


def plain_loop(model, rows):
    """Gradients of the mean loss over all targets: each text of each row alone, as torch has it."""
    total, num_targets = 0, 0
    for tokens, targets, documents in zip(rows.tokens, rows.targets, rows.documents, strict=True):
        for document in np.unique(documents):
            own = documents == document
            alone = torch.from_numpy(tokens[own][None])
            wanted = torch.from_numpy(targets[own])
            logits = model(alone, torch.zeros_like(alone))[0]
            total = total + functional.cross_entropy(logits, wanted, reduction="sum")
            num_targets += int((wanted != NO_TARGET).sum())
    (total / num_targets).backward()
    return gradients_of(model), total.item() / num_targets


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=9).filter(lambda sizes: sum(sizes) >= 40),
    st.integers(1, 5),
)
def test_packed_and_accumulated_gradients_are_those_of_a_plain_loop(sizes, batch_size):
    draw = np.random.default_rng(sizes)
    rows = Packing([draw.integers(0, 50, size) for size in sizes], 8).epoch(0, seed=0)
    model = tiny()
    wanted, wanted_loss = plain_loop(model, rows)
    batches = rows.batches(batch_size)  # the last of which may be ragged
    objective = Objective(model, "fp32")
    loss = accumulate_gradients(batches, objective.loss_sum, loss_scaler("fp32"))
    close(gradients_of(model), wanted)
    assert loss == pytest.approx(wanted_loss, abs=1e-5)


def test_a_token_attends_to_its_own_text_alone():
    model = tiny()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    logits = model(tokens, documents)
    alone = model(tokens[:, 3:], documents[:, 3:])
    assert torch.allclose(logits[:, 3:], alone, atol=1e-5)
    changed = model(torch.tensor([[9, 9, 9, 4, 5, 6]]), documents)
    assert torch.equal(changed[:, 3:], logits[:, 3:])
    later = model(torch.tensor([[1, 2, 9, 9, 9, 9]]), documents)
    assert torch.equal(later[:, :2], logits[:, :2])


def test_a_folder_is_the_model_for_transformers_and_for_us(tmp_path, material):
    trainer = Trainer(SETTINGS, material)
    trainer.advance()
    weights = {name: weight.half().float().numpy() for name, weight in weights_of(trainer).items()}
    write_model(tmp_path, trainer.model.config, weights, material.tokenizer)
    trainer.model.load(open_checkpoint(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode(VERSE)) == VERSE
    tokens = torch.from_numpy(Packing(material.training, 16).in_order().tokens[:4])
    with torch.no_grad():
        logits = trainer.model(tokens, torch.zeros_like(tokens))
        assert torch.allclose(logits, theirs(tokens).logits, atol=1e-5)
    prompt = material.training[0][:7]
    greedy = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    decoded = decode([{"prompt": prompt, "max_tokens": 8}], model=load_model(str(tmp_path)))[
        0
    ].tokens
    assert decoded == greedy[0, len(prompt) :].tolist()


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loss_curves_of_the_precisions_agree(corpus, material, precision):
    curves = {}
    for kind in ("fp32", precision):
        trainer = Trainer(msgspec.structs.replace(SETTINGS, precision=kind, steps=60), material)
        curves[kind] = [trainer.advance() for _ in range(60)]
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert curves[precision] != curves["fp32"]
    assert curves[precision][-1] < curves["fp32"][0] / 1.5
    assert curves[precision] == pytest.approx(curves["fp32"], rel=0.02)


def test_a_gradient_that_overflows_is_no_step_and_halves_the_scale():
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = loss_scaler("fp16")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = Packing([np.arange(40)], 8).in_order()
    objective = Objective(model, "fp16")
    for is_skipped, scale in [(True, 2.0**15), (False, 2.0**15)]:
        accumulate_gradients(rows.batches(2), objective.loss_sum, scaler)
        if is_skipped:
            model.model.norm.weight.grad[0] = float("inf")
        update(model, optimizer, scaler, max_grad_norm=1.0)
        same = all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        assert same == is_skipped
        assert scaler.get_scale() == scale
        assert all(weight.grad is None for weight in model.parameters())


def test_a_loss_that_is_not_a_number_is_an_error_and_changes_nothing(material):
    trainer = Trainer(SETTINGS, material)
    trainer.advance()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    before = weights_of(trainer)
    with pytest.raises(
        BatchdecodeError, match="loss of step 2 is nan: use a smaller learning_rate"
    ):
        trainer.advance()
    assert trainer.step == 1
    for name, weight in weights_of(trainer).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num())


def test_a_draft_learns_what_its_target_says(tmp_path, corpus, material):
    target = Trainer(msgspec.structs.replace(SETTINGS, steps=60), material)
    while not target.is_done:
        target.advance()
    weights = {name: weight.numpy() for name, weight in target.model.state_dict().items()}
    write_model(tmp_path, target.model.config, weights, material.tokenizer)
    small = msgspec.structs.replace(SETTINGS, num_layers=1, hidden_size=16, steps=80)
    draft = Trainer(small, read_material(corpus, small, tmp_path))
    assert draft.material.training == material.training
    before = draft.evaluate()
    while not draft.is_done:
        draft.advance()
    after = draft.evaluate()
    assert after.divergence < before.divergence / 2
    assert after.acceptance > before.acceptance + 0.1
    assert 0 < after.agreement <= 1
    assert target.evaluate().loss < after.loss < before.loss


def test_the_loss_of_a_draft_is_the_divergence_from_its_target():
    target, rows = tiny(), Packing([np.arange(40)], 8).in_order()
    assert Objective(target, "fp32", target).loss_sum(rows).item() == pytest.approx(0, abs=1e-4)
    draft = tiny()
    with torch.no_grad():
        draft.model.embed_tokens.weight *= 3
    found = Objective(draft, "fp32", target)
    tokens, documents = torch.from_numpy(rows.tokens), torch.from_numpy(rows.documents)
    said, wanted = (model(tokens, documents).softmax(-1) for model in (draft, target))
    divergence = (wanted * (wanted / said).log()).sum()
    assert found.loss_sum(rows).item() == pytest.approx(divergence.item(), rel=1e-4)
    evaluation = found.evaluate(rows.batches(2))
    assert evaluation.acceptance == pytest.approx(
        torch.minimum(said, wanted).sum(-1).mean().item(), rel=1e-4
    )
    assert evaluation.agreement == pytest.approx(
        (said.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("step", [1, 5, 11])
def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path, material, precision, step):
    settings = msgspec.structs.replace(SETTINGS, precision=precision, accumulate=2)
    whole, first = Trainer(settings, material), Trainer(settings, material)
    while not whole.is_done:
        whole.advance()
    for _ in range(step):
        first.advance()
    first.evaluate()
    first.save(tmp_path)
    torch.manual_seed(99)
    second = Trainer(settings, material)
    second.load(tmp_path)
    assert second.losses == first.losses
    while not second.is_done:
        second.advance()
    assert second.losses.training == whole.losses.training
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(second)[name], weight), name


def test_the_scale_of_a_loss_is_that_of_the_run_before(tmp_path, material):
    settings = msgspec.structs.replace(SETTINGS, precision="fp16")
    first, second = Trainer(settings, material), Trainer(settings, material)
    objective, first._objective = first._objective, Overflowing(first.model)
    first.advance()
    first._objective = objective
    first.advance()
    first.save(tmp_path)
    second.load(tmp_path)
    assert second._scaler.get_scale() == first._scaler.get_scale() == 2.0**15


class Overflowing:
    """An objective whose gradients, times the scale, are infinite."""

    def __init__(self, model):
        self._model = model

    def loss_sum(self, rows):
        return self._model.model.norm.weight.sum() * 1e34 * rows.num_targets


def test_what_another_run_has_left_is_refused(tmp_path, corpus, material):
    Trainer(SETTINGS, material).save(tmp_path)
    other = msgspec.structs.replace(SETTINGS, learning_rate=0.1)
    with pytest.raises(BatchdecodeError, match=r"learning_rate is 0\.003, not 0\.1"):
        Trainer(other, material).load(tmp_path)
    with pytest.raises(BatchdecodeError, match="its corpus is sha256:"):
        Trainer(SETTINGS, material._replace(digest="another")).load(tmp_path)
    content = (tmp_path / STATE).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no zip"):
        (tmp_path / STATE).write_bytes(damaged)
        with pytest.raises(BatchdecodeError, match=r"training\.pt: it is damaged"):
            Trainer(SETTINGS, material).load(tmp_path)


CONFIG = """\
vocab_size: 300
num_layers: 1
hidden_size: 16
num_heads: 2
intermediate_size: 24
seq_length: 16
batch_size: 2
warmup_steps: 2
holdout: 0.2
save_every: 2
"""


@pytest.fixture
def folder(tmp_path, corpus):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "corpus.txt").write_bytes(corpus.read_bytes())
    return tmp_path


def command(*arguments):
    start = "from cli.main import main; main()"
    return [sys.executable, "-c", start, "train", "corpus.txt", "--config", "tiny.yaml", *arguments]


def train(folder, *arguments, limit=""):
    shell = ["bash", "-c", f'{limit} exec "$@"', "bash"]
    environment = {"PYTHONPATH": str(ROOT), "CI": "1"}
    if limit:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # half a .pyc would be left
    return subprocess.run(
        [*shell, *command(*arguments)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != STATE}


def test_the_same_command_writes_the_same_bytes_killed_or_not(folder):
    for name in ("one", "two"):
        done = train(folder, "--steps", "40", "-o", name)
        assert done.returncode == 0, done.stderr
    assert "40 steps" in done.stdout
    assert files_of(folder / "one") == files_of(folder / "two")
    assert set(files_of(folder / "one")) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "loss.svg",
    }
    killed = subprocess.Popen(
        command("--steps", "40", "-o", "three"),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    while b"step 10 " not in killed.stderr.readline():
        pass
    killed.kill()
    killed.communicate()
    assert "model.safetensors" not in files_of(folder / "three")
    done = train(folder, "--steps", "40", "-o", "three", "--resume")
    assert "step 10 " not in done.stderr
    assert files_of(folder / "three") == files_of(folder / "one")
    (folder / "one" / "model.safetensors").unlink()  # as if it had been killed before it was there
    done = train(folder, "--steps", "40", "-o", "one", "--resume")
    assert "40 steps" in done.stdout
    assert files_of(folder / "one") == files_of(folder / "two")


def test_a_signal_stops_after_the_step_and_says_how_to_go_on(folder):
    stopped = subprocess.Popen(
        command("--steps", "5000", "-o", "my\nout"),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while "step 4 " not in stopped.stderr.readline():
        pass
    stopped.send_signal(signal.SIGTERM)
    said = stopped.communicate()[1]
    assert stopped.returncode == 128 + signal.SIGTERM
    last = said.splitlines()[-1]
    assert last.endswith(
        "of 5,000 steps; continue with: batchdecode train corpus.txt --config tiny.yaml "
        r"--steps 5000 -o $'my\nout' --resume"
    )
    trainer_step = int(last.split()[2].replace(",", ""))
    state = torch.load(folder / "my\nout" / STATE, weights_only=True)
    assert state["step"] == trainer_step


def test_a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_room(folder):
    train(folder, "--steps", "40", "-o", "whole")
    full = train(folder, "--steps", "40", "-o", "part", limit="ulimit -f 8;")
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == "error: part/training.pt: File too large"
    assert [path.name for path in (folder / "part").iterdir()] == []
    done = train(folder, "--steps", "40", "-o", "part", "--resume")
    assert done.returncode == 0
    assert files_of(folder / "part") == files_of(folder / "whole")


def test_a_draft_is_trained_by_the_command(folder):
    train(folder, "--steps", "20", "-o", "target")
    done = train(folder, "--steps", "20", "--distill", "target", "-o", "draft", "-q")
    assert done.stderr == ""
    assert "acceptance" in done.stdout
    assert (folder / "draft/tokenizer.json").read_bytes() == (
        folder / "target/tokenizer.json"
    ).read_bytes()
    lost = train(folder, "--distill", "nowhere", "-o", "other")
    assert (lost.returncode, lost.stderr) == (
        2,
        "error: nowhere: there is no such file or folder\n",
    )


def test_a_target_that_cannot_be_learnt_from_is_refused(tmp_path, corpus, material):
    def refused(path, message, **changed):
        settings = msgspec.structs.replace(SETTINGS, **changed)
        with pytest.raises(BatchdecodeError, match=message):
            Trainer(settings, read_material(corpus, settings, path))

    refused(ROOT / "samples" / "tiny.gguf", r"tiny\.gguf: it is not a folder: a draft also needs")
    trainer = Trainer(SETTINGS, material)
    weights = {name: weight.numpy() for name, weight in trainer.model.state_dict().items()}
    write_model(tmp_path, trainer.model.config, weights, material.tokenizer)
    refused(tmp_path, "the target: its context of 16 tokens is shorter than rows", seq_length=17)
    fields = json.loads((tmp_path / "config.json").read_text())
    for changed, message in [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "it is not a Llama with SiLU"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "it is not a Llama with SiLU and unscaled RoPE"),
        ({"architectures": ["MistralForCausalLM"]}, "the target: it is not a Llama"),
        ({"eos_token_id": None}, r"it has no token that ends a text \(eos_token_id\)"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        refused(tmp_path, message)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(tmp_path, "its tokenizer cannot be used")


def test_settings_options_and_a_corpus_that_do_not_fit_are_refused(folder):
    for arguments, message in [
        (["-o", "out", "--steps", "2"], "warmup_steps 2 is not below the 2 steps"),
        (["-o", "."], "the folder is not empty: use --resume"),
        (["-o", "corpus.txt"], "cannot write corpus.txt: Not a directory"),
        (["-o", "out", "--config", "bad.yaml"], "bad.yaml:1:1: unknown setting num_layer; did you"),
    ]:
        (folder / "bad.yaml").write_text("num_layer: 3\n")
        done = train(folder, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (folder / "out").exists()
    (folder / "corpus.txt").write_text("so short\n" * 4)
    done = train(folder, "-o", "out")
    assert done.returncode == 2
    assert "error: the corpus: " in done.stderr
    assert "tokens are too few for rows of seq_length 16: use at least 32" in done.stderr
    assert not (folder / "out").exists()
