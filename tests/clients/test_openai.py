"""OpenAI's own client, unchanged: sync, async, streams, structured outputs, errors."""

import asyncio
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from batcher import decode

SAID = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture
def client(url):
    with OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def story(length):
    [result] = decode([{"messages": SAID, "max_tokens": length}])
    return result.text


def test_models_are_listed_and_errors_have_the_types_it_knows(client):
    assert [model.id for model in client.models.list()] == ["story"]
    assert client.models.retrieve("story").id == "story"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="story", prompt="Once", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Once")
    with pytest.raises(openai.APIError, match="nothing"):
        client.completions.create(model="story", prompt="Once", extra_body={"nothing": 1})


def test_a_list_of_prompts_and_fields_that_change_nothing(client):
    prompts = ["Once", "A fox"]
    more = {"model": "story", "prompt": prompts, "max_tokens": 5}
    whole = client.completions.create(
        **more,
        user="u",
        extra_body={"store": True, "metadata": {"a": "b"}, "safety_identifier": "s"},
    )
    alone = [decode([{"prompt": prompt, "max_tokens": 5}])[0].text for prompt in prompts]
    assert [choice.text for choice in whole.choices] == alone
    texts = ["", ""]
    for chunk in client.completions.create(**more, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def test_chats_whole_and_streamed(client):
    whole = client.chat.completions.create(model="story", messages=SAID, max_tokens=9)
    assert whole.choices[0].message.content == story(9)
    chunks = list(
        client.chat.completions.create(
            model="story",
            messages=SAID,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == story(9)
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_its_own_helper_for_streams(client):
    *words, last = story(9).split(" ")  # with a stop: it raises where a limit ends an answer
    stream = client.chat.completions.stream(model="story", messages=SAID, max_tokens=9, stop=last)
    with stream as events:
        kinds = {event.type for event in events}
        told = events.get_final_completion().choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert told == " ".join([*words, ""])


def test_many_at_once(url):
    async def main():
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:

            async def ask(length):
                chunks = await client.chat.completions.create(
                    model="story", messages=SAID, max_tokens=length, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            return await asyncio.gather(*(ask(length) for length in range(1, 40)))

    assert asyncio.run(main()) == [story(length) for length in range(1, 40)]


class Animal(BaseModel):
    name: Literal["cat", "owl"]
    legs: Literal[2, 4]


def test_structured_outputs(client):
    answer = client.chat.completions.parse(
        model="story", messages=SAID, max_tokens=400, response_format=Animal
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
