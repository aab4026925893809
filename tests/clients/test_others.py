"""The command `llm` and LangChain's client, unchanged."""

import asyncio
import subprocess
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from batcher import decode

EXTRA_MODELS = """
- model_id: story
  model_name: story
  api_base: {url}
"""


def story(role_messages, length):
    [result] = decode([{"messages": role_messages, "max_tokens": length}])
    return result.text


def test_llm_prints_what_decode_gives(url, tmp_path, monkeypatch):
    (tmp_path / "extra-openai-models.yaml").write_text(EXTRA_MODELS.format(url=url))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    for more in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "story", "-o", "max_tokens", "9", "Hello"]
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = [{"role": "user", "content": "Hello"}]
        assert done.stdout.rstrip("\n") == story(said, 9)


class Animal(BaseModel):
    name: Literal["cat", "owl"]
    legs: Literal[2, 4]


def test_langchain_chats_streams_and_structures(url):
    chat = ChatOpenAI(base_url=url, api_key="any", model="story", max_tokens=9, temperature=0)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = chat.invoke([("system", "Be brief."), ("user", "Hello")])
    assert answer.content == story(said, 9)
    assert answer.usage_metadata["output_tokens"] == 9
    parts = [part.content for part in chat.stream([("system", "Be brief."), ("user", "Hello")])]
    assert "".join(parts) == answer.content
    assert len(parts) > 1
    alike = asyncio.run(chat.abatch(["Hello"] * 5))
    assert {one.content for one in alike} == {story(said[1:], 9)}
    long = ChatOpenAI(base_url=url, api_key="any", model="story", max_tokens=400)
    animal = long.with_structured_output(Animal, method="json_schema").invoke("An animal!")
    assert isinstance(animal, Animal)


def test_langchain_completes(url):
    model = OpenAI(base_url=url, api_key="any", model="story", max_tokens=9, temperature=0)
    [result] = decode([{"prompt": "Once", "max_tokens": 9}])
    assert model.invoke("Once") == result.text
