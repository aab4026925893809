"""A name of the Hub where there is no network: what was downloaded before, or an error at once."""

import shutil
import socket
from threading import Thread

import pytest
from consoles import ROOT

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("transformers")

from batcher import BatchdecodeError, decode, load_model  # noqa: E402 - needs the Hub's library
from batcher.hf import hub  # noqa: E402 - as above

NAME = "somebody/tiny"


@pytest.fixture(params=["refused", "silent"])
def hub_that_is_away(request, monkeypatch, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if request.param == "refused":
        listener.close()
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    yield tmp_path / "cache"
    listener.close()


def download(cache):
    folder = cache / f"models--{NAME.replace('/', '--')}"
    target = ROOT / "samples" / "shakespeare" / "target"
    shutil.copytree(target, folder / "snapshots" / "0123abcd")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abcd")


def test_what_was_not_downloaded_is_an_error_of_one_line(hub_that_is_away, capfd):
    with pytest.raises(BatchdecodeError) as caught:
        load_model(f"hf:{NAME}")
    assert str(caught.value) == (
        f"{NAME} was not downloaded before, and {constants.ENDPOINT} does not answer within 0.2 s"
    )
    assert capfd.readouterr() == ("", "")  # it was not tried again and again
    assert not hub_that_is_away.exists()


def test_what_was_downloaded_before_is_used(hub_that_is_away):
    download(hub_that_is_away)
    request = {"prompt": "To be, or", "max_tokens": 3, "ignore_eos": True}
    [result] = decode([request], model=f"hf:{NAME}")
    assert len(result.tokens) == 3


def test_no_hub_is_asked_where_somebody_wants_none(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_answers", lambda: pytest.fail("it was asked"))
    with pytest.raises(BatchdecodeError, match="and HF_HUB_OFFLINE is set"):
        load_model(f"hf:{NAME}")


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
def test_a_hub_that_answers_whatever_is_there(status, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)

        def answer():
            with listener.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        answering = Thread(target=answer)
        answering.start()
        assert not hub.is_offline(NAME)
        answering.join()
