"""Many clients at once, some of which go: each gets its own answer, and nothing is left of any."""

import asyncio
import random

import pytest
from examples import mostly_heavy
from in_process import CHATS, COMPLETIONS, served

from batcher import decode
from batcher.settings import SchedulingSettings

NUM_CLIENTS = 30
WORDS = ("once", "upon", "time", "the cat", "found", "my", "red", "boat", "every owl", "key")


def any_body(draw):
    """Return a body and where it goes to, with a prompt like many others."""
    words = " ".join(draw.choices(WORDS, k=draw.randrange(1, 30)))
    url, body = COMPLETIONS, {"prompt": words}
    if draw.random() < 0.4:
        url, body = CHATS, {"messages": [{"role": "user", "content": words}]}
    body["max_tokens"] = draw.randrange(40)
    if draw.random() < 0.5:
        body |= {"temperature": draw.choice([0.5, 1.0, 1.5]), "seed": draw.randrange(3)}
        if draw.random() < 0.3:
            body["n"] = draw.randrange(1, 4)
    if draw.random() < 0.3:
        body["stop"] = draw.choice(WORDS)
    if draw.random() < 0.2:
        body |= {"logprobs": True} if url == CHATS else {"logprobs": 1}
    return url, body


def expected(body):
    """Return the tokens and texts of a body that is decoded alone."""
    request = dict(body)
    if request.get("logprobs") is True:  # as rows of chats say it
        request["logprobs"] = 0
    return [(result.tokens, result.text) for result in decode([request])]


async def answer_of(server, url, body, *, stream):
    """Return what a client got: tokens and text of each output, and the id of the answer."""
    sent = {**body, "return_token_ids": True, "headers": {"X-Request-Id": "same-for-all"}}
    parts = (
        await server.chunks(url, **sent) if stream else [(await server.post(url, **sent)).json()]
    )
    outputs = [([], "") for _ in range(body.get("n", 1))]
    for choice in (choice for part in parts for choice in part["choices"]):
        tokens, text = outputs[choice["index"]]
        said = choice.get("delta", choice.get("message", choice))
        more = said.get("content", said.get("text", ""))
        outputs[choice["index"]] = tokens + choice["token_ids"], text + more
    [answer_id] = {part["id"] for part in parts}
    return outputs, answer_id


SETTINGS = [
    SchedulingSettings(),
    SchedulingSettings(kv_blocks=40, block_size=4, capacity="on-demand"),
    SchedulingSettings(max_batch_tokens=12),
]


@pytest.mark.parametrize(
    "settings", mostly_heavy(SETTINGS, SETTINGS[1]), ids=["plain", "paged", "budget"]
)
def test_each_client_gets_the_tokens_that_run_gives_whatever_others_do(settings):
    draw = random.Random(f"{settings}")
    bodies = [any_body(draw) for _ in range(NUM_CLIENTS)]
    answers = {}

    async def client(server, number):
        url, body = bodies[number]
        await asyncio.sleep(draw.random() * 0.1)
        asked = answer_of(server, url, body, stream=draw.random() < 0.5)
        if draw.random() < 0.3:  # it goes, at some time
            asking = asyncio.create_task(asked)
            await asyncio.sleep(draw.random() * 0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        else:
            answers[number] = await asked

    async def main():
        async with served(batch=5, settings=settings, is_checked=True) as server:
            await asyncio.gather(*(client(server, number) for number in range(NUM_CLIENTS)))
            async with asyncio.timeout(20):
                while server.engine.has_work or len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - a thread changes it
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(answers) > NUM_CLIENTS // 2
    assert len({answer_id for _, answer_id in answers.values()}) == len(answers)
    for number, (outputs, _) in answers.items():
        assert outputs == expected(bodies[number][1]), bodies[number]
