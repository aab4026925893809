"""What a server answers becomes the results, the events and the numbers of a run like any other."""

import json

import pytest
from fault_server import FaultServer, answer, chunks, reset
from made_events import metrics_of
from msgspec.structs import asdict
from remote_runs import answered, asking, carry_out, engine_of

from batcher.decoding import constraints
from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, FinishEvent, ReceiveEvent
from batcher.request import Request
from batcher.requests.lines import RequestParser
from batcher.result import Result, StepTimes, TokenLogprob, TopLogprob, Usage
from batcher.settings import SchedulingSettings
from batcher.trace.run import RequestFold


def test_each_request_has_the_answer_that_it_asked_for_and_slots_are_never_more_than_the_batch():
    prompts = [f"p{number}" for number in range(40)]
    behaviours = {prompt: [answer(prompt, "!", gap=0.03)] for prompt in prompts}
    server = FaultServer(behaviours)
    run = answered(server, asking(*prompts), batch=5)
    assert {result.id: result.text for result in run.results} == {p: f"{p}!" for p in prompts}
    assert server.most_open == 5
    assert {event.slot for event in run.kinds(AdmitEvent)} == set(range(5))


def test_rows_do_not_wait_for_each_other():
    behaviours = {"slow": [answer("s", first=0.15)], "quick": [answer("q")]}
    run = answered(FaultServer(behaviours), asking("slow", "quick"))
    assert [result.id for result in run.results] == ["quick", "slow"]


def test_what_a_server_does_not_know_is_not_sent_and_what_is_asked_for_is():
    server = FaultServer()
    request = Request(
        prompt="a", max_tokens=5, temperature=0.5, top_p=0.9, seed=7, n=2, stop=["x"], logprobs=1,
        json_schema={"type": "integer"}, stop_sequence="y", extra_body={"top_k": 4, "seed": None},
    )  # fmt: skip
    answered(server, [request], extra_body={"min_p": 0.1, "top_k": 3})
    first, second = server.bodies
    assert first == second
    assert first.pop("response_format")["json_schema"]["schema"] == {"type": "integer"}
    assert first == {
        "prompt": "a", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["y", "x"],
        "logprobs": 1, "min_p": 0.1, "top_k": 4, "model": "tiny", "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_each_sample_is_a_request_with_a_seed_of_its_own():
    server = FaultServer()
    run = answered(server, asking("a", n=3, temperature=1.0, seed=7))
    assert sorted(body["seed"] for body in server.bodies) == [7, 8, 9]
    assert sorted(result.index for result in run.results) == [0, 1, 2]


def test_best_of_is_for_a_server_only_if_it_changes_nothing():
    with FaultServer() as server, engine_of(server) as engine:
        parser = RequestParser(engine.capabilities)
        taken = parser.parse(b'{"prompt": "a", "n": 2, "temperature": 1, "best_of": 2}', 1)
        refused = parser.parse(b'{"prompt": "a", "temperature": 1, "best_of": 2}', 1)
        carry_out(engine, [taken.request])
    assert not any("best_of" in body for body in server.bodies)
    assert [(problem.field, problem.hint) for problem in refused.problems] == [
        ("best_of", "leave it out")
    ]


def test_messages_are_a_chat():
    server = FaultServer()
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    answered(server, [Request(prompt="", extra_body=body)])
    [(path, _, sent)] = server.requests
    assert path == "/v1/chat/completions"
    assert body.items() <= sent.items()
    assert "prompt" not in sent


ENDS = {  # by the reasons of servers: ours, and the code of the error
    ("stop", None): "stop tool_calls function_call eos eos_token stop_sequence STOP",
    ("length", None): "length max_tokens model_length MAX_TOKENS",
    ("error", "server-error"):
        "abort error cancelled insufficient_system_resource repetition end null",
    ("error", "content-filter"): "content_filter CONTENT_FILTER",
}  # fmt: skip


@pytest.mark.parametrize("form", [str, lambda reason: {"type": reason, "matched": 2}])
def test_finish_reasons_are_mapped_and_unknown_ones_are_errors(form):
    expected = {theirs: ours for ours, several in ENDS.items() for theirs in several.split()}
    server = FaultServer({name: [answer("a", finish=form(name))] for name in expected})
    found = answered(server, asking(*expected), max_attempts=1).by_id
    assert {
        name: (result.finish_reason, result.error and result.error.code)
        for name, result in found.items()
    } == expected
    assert {(result.text, result.stop_reason) for result in found.values()} == {("a", None)}


def choices(*parts, then=None):
    """Chunks with one choice each."""
    return chunks(*({"choices": [part]} for part in parts), then=then)


def ended(*parts, **last):
    """Chunks of a chat, and the end of its answer."""
    return choices(*({"delta": part} for part in parts), {"finish_reason": "stop", **last})


def call(name=None, arguments=None, kind="function", **more):
    words = "input" if kind == "custom" else "arguments"
    return {**more, kind: {"name": name, words: arguments}}


HALF = {"text": "a", "finish_reason": ""}
HELLO = {"message": {"content": "Hello"}}
STOP = {"finish_reason": "stop"}
ENDINGS = [
    (choices(HALF, HALF, STOP), "stop", "aa"),
    (choices(HALF, then=reset), "error", "a"),
    (choices(HALF, then=chunks("[DONE]")), "stop", "a"),
    (choices({"text": "a"}, then=chunks({"code": 500, "msg": "boom"}, "[DONE]")), "error", "a"),
    (choices({"text": "a", "error": {"message": "boom"}}, STOP), "error", "a"),
    (choices({"text": "a", "finish_reason": "length"}, then=reset), "length", "a"),
    (choices({"text": "a"}, {"index": 1, "text": "b", "finish_reason": "length"},
             {"text": "c", **STOP}), "stop", "ac"),
    (choices(HELLO | STOP), "stop", "Hello"),
    (choices({"delta": {"content": "Hel"}}, {"delta": {"content": "lo"}}, HELLO | STOP),
     "stop", "Hello"),
    (choices({"message": {"content": "Hel"}}, {"message": {"content": "lo"}}, STOP),
     "stop", "Hello"),
]  # fmt: skip

TEXT = {"type": "text", "text": "Hi"}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
CONTENTS = [  # of a delta or a message: text, reasoning
    ({"content": None}, "", None),
    ({"content": [TEXT, {"type": "reference", "reference_ids": [1]}, TEXT]}, "HiHi", None),
    ({"content": [THOUGHT, TEXT]}, "Hi", "hm"),
    ({"content": "Hi", "reasoning_content": "hm"}, "Hi", "hm"),
    ({"content": "Hi", "reasoning": [{"type": "text", "text": "hm"}]}, "Hi", "hm"),
]

CALLS = [  # parts of calls: the id, name and arguments of each call
    ([call("f", "{}", index=0, id="1"), call("g", "{}", index=0, id="2")],
     [("1", "f", "{}"), ("2", "g", "{}")]),
    ([call("f", "", index=0, id="1"), call("f", "", index=0, id="2"),
      call(None, '{"a": 1}', index=0)], [("1", "f", ""), ("2", "f", '{"a": 1}')]),
    ([call("f", "{", index=0, id="1"), call("f", "}", index=0, id="1")], [("1", "f", "{}")]),
    ([call("f", "{", index=0, id="1"), call(None, "}", index=0, id="2")], [("1", "f", "{}")]),
    ([call("f", "{}", index=0), call("f", "{}", index=0)], [(None, "f", "{}"), (None, "f", "{}")]),
    ([call("f", "{}", id="1"), call("g", "{", id="2"), call(None, "}")],
     [("1", "f", "{}"), ("2", "g", "{}")]),
    ([call("f", "{", index=0, id="1"), call("g", "{", index=1, id="1"),
      call(None, "}", index=0), call(None, "}", index=1)], [("1", "f", "{}"), ("1", "g", "{}")]),
    ([call("f", {"a": True, "b": None, "c": "é"}, index=0, id="1")],
     [("1", "f", '{"a": true, "b": null, "c": "é"}')]),
    ([call("get_", "", index=0, id="1"), call("name", "{}", index=0)], [("1", "get_name", "{}")]),
    ([{"index": 0, "id": "1", "name": "f", "arguments": "{}"}], [("1", "f", "{}")]),
]  # fmt: skip

LOGPROBS = [  # a choice: the tokens and the logprobs
    ({"text": "ab", "logprobs": {"tokens": ["token_id:5", "token_id:6"],
      "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"token_id:5": -1.0}, None]}},
     [5, 6], [TokenLogprob(5, -1.0, [TopLogprob(5, -1.0)]), TokenLogprob(6, -2.0, [])]),
    ({"text": "ab", "logprobs": {"content": [{"id": 5, "token": "a", "logprob": -1.0},
      {"id": 6, "token": "b", "logprob": -2.0}]}},
     [5, 6], [TokenLogprob(5, -1.0, []), TokenLogprob(6, -2.0, [])]),
    ({"text": "a", "logprobs": {"content": [{"token": "a", "logprob": -99999.0,
      "top_logprobs": [{"token": "b", "logprob": -1.0}]}]}},
     None, [TokenLogprob("a", -9999.0, [TopLogprob("b", -1.0)])]),
]  # fmt: skip

REFUSED = {"error": "refusal", "text": "", "refusal": "I cannot."}
LACKING = {"error": "server-error", "text": "a", "logprobs": None}
OTHER_CALLS = ended(
    {"tool_calls": [call("sh", "ls", kind="custom", index=0, id="1", type="custom")]},
    {"function_call": {"name": "f", "arguments": '{"a"'}},
    {"function_call": {"arguments": ": 1}"}},
    finish_reason="function_call",
)
NO_TOKEN = {"prompt_tokens": 3, "completion_tokens": 0}
ANSWERS = [  # chunks, fields that are asked for, what the result says
    *((told, {}, {"finish_reason": reason, "text": text}) for told, reason, text in ENDINGS),
    *((choices({place: {"role": "assistant", **said}}, STOP), {},
       {"text": text, "reasoning": reasoning, "num_tokens": bool(text)})
      for said, text, reasoning in CONTENTS for place in ("delta", "message")),
    *((told, {"logprobs": 1}, {"finish_reason": "stop", "logprobs": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls]})
      for parts, calls in CALLS
      for told in (ended({"tool_calls": parts}), ended(*({"tool_calls": [p]} for p in parts)))),
    (OTHER_CALLS, {}, {"function_call": {"name": "f", "arguments": '{"a": 1}'}, "tool_calls": [
        {"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]}),
    (ended({"refusal": ""}, {"refusal": "I can"}, {"refusal": "not."}), {}, REFUSED),
    (ended({"content": [{"type": "refusal", "refusal": "I cannot."}]}), {}, REFUSED),
    *((choices(choice, STOP), {"logprobs": 1}, {"tokens": tokens, "logprobs": logprobs})
      for choice, tokens, logprobs in LOGPROBS),
    (choices({"text": "ab", "token_ids": [5, 6]}, STOP), {}, {"tokens": [5, 6]}),
    *((choices({"text": "a", "logprobs": logprobs, **STOP}), {"logprobs": 1}, LACKING)
      for logprobs in (None, {"content": []}, {"content": None}, {"tokens": []})),
    (choices(STOP), {"logprobs": 1}, {"error": None, "logprobs": []}),
    (answer("x", "x", "ax b"), {"min_tokens": 2, "stop": "x"}, {"text": "xxa", "stop_reason": "x"}),
    *((choices(*({"text": word, "token_ids": [7 + n]} for n, word in enumerate(words)),
               STOP | {"stop_reason": 8}), {"stop": "b"},
       {"text": "a", "stop_reason": "b", "tokens": tokens})
      for words, tokens in ((["a", "b"], [7, 8]), (["ab", "c"], None), (["a", "bc"], None))),
    *((answer("a", stop_reason=told), {"extra_body": {"stop": "x", "stop_token_ids": [5]}},
       {"text": "a", "stop_reason": reason})
      for told, reason in (("x", "x"), ("end_turn", None), (5, 5), (2, None))),
    *((answer("ab END c"), {"stop": "END", "extra_body": {name: True}},
       {"text": "ab END", "stop_reason": "END"})
      for name in ("include_stop_str_in_output", "no_stop_trim")),
    *((answer("a", "b", usage={"prompt_tokens": count, "completion_tokens": count}), {},
       {"num_tokens": 2}) for count in (-1, 10**30, True, "5", 1.5, None)),
    (answer(usage=NO_TOKEN), {}, {"text": "", "tokens": [], "finish_reason": "stop"}),
]  # fmt: skip


@pytest.mark.parametrize(("told", "fields", "expected"), ANSWERS)
def test_what_a_server_streams_is_what_the_result_says(told, fields, expected):
    server = FaultServer(usual=told)
    [result] = answered(server, asking("a", **fields)).results
    found = asdict(result) | {"num_tokens": result.usage.completion_tokens}
    found["error"] = result.error and result.error.code
    assert {name: found[name] for name in expected} == expected
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("texts", "stops", "text", "stop"),
    [
        (("ab", "END more"), ["END"], "ab", "END"),
        (("ab", "E", "N", "D more"), ["END"], "ab", "END"),
        (("abE", "N"), ["END"], "abEN", None),
        (("abcd",), ["cd", "bc"], "a", "bc"),
        (("abcd",), ["bcd", "d", "x"], "a", "bcd"),
        (("aEND",), ["END"], "a", "END"),
        (("é🙂END", "END"), ["🙂"], "é", "🙂"),
    ],
)
@pytest.mark.parametrize("finish", ["length", "stop", "abort", None])
def test_a_stop_that_the_server_let_pass_ends_the_text(texts, stops, text, stop, finish):
    usage = {"prompt_tokens": 3, "completion_tokens": 9}
    server = FaultServer(usual=answer(*texts, finish=finish, usage=usage, gap=0.005))
    run = answered(server, asking("a", stop_sequence=stops[0], stop=stops[1:] or None),
                   is_streaming=True)  # fmt: skip
    [result] = run.results
    ends = {"abort": "error", None: "error"}
    assert (result.text, result.stop_reason) == (text, stop)
    assert result.finish_reason == ("stop" if stop else ends.get(finish, finish))
    assert result.usage.completion_tokens == (9 if finish else len(texts))
    assert "".join(event.text for event in run.tokens) == text


INTEGER = {"type": "integer"}
STATED = {"type": "json_schema", "json_schema": {"name": "n", "schema": INTEGER}}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json_schema": INTEGER}, "5 ", "five"),
        ({"response_format": STATED}, "5", "5.5"),
        ({"response_format": OBJECT}, '{"a": 1}', "```json\n{}```"),
        ({"regex": r"(?i)\p{L}+"}, "ÄB", "a1"),
        ({"choice": ["yes", "no"]}, "no", "no."),
        ({"lark": 'start: "a" start | "b"'}, "aab", "aa"),
        ({"gbnf": 'root ::= "a" root | "b"'}, "b", "abb"),
        ({"extra_body": {"response_format": OBJECT}}, "{}", "5"),
        ({"extra_body": {"grammar": 'root ::= "é"'}}, "é", "e"),
        ({"extra_body": {"json_schema": json.dumps(INTEGER)}}, "5", "five"),
        ({"extra_body": {"grammar": {"type": "regex", "value": "a+"}}}, "a", "b"),
        ({"response_format": {"type": "json", "value": INTEGER}}, "5", "five"),
    ],
)
def test_constraints_are_checked_as_those_of_our_own_outputs(fields, good, bad):
    ways = {
        "good": answer(good),
        "bad": answer(bad),
        "cut": answer(bad[:-1], finish="length"),
        "calls": ended({"tool_calls": [call("f", "{}")]}),
    }
    with FaultServer({name: [way] for name, way in ways.items()}) as server, engine_of(server) as e:
        parser = RequestParser(e.capabilities)
        lines = [json.dumps({"id": name, "prompt": name, **fields}).encode() for name in ways]
        run = carry_out(e, [parser.parse(line, 1).request for line in lines])
    results = run.by_id
    assert [(results[name].finish_reason, results[name].constraint) for name in ways][:2] == [
        ("stop", "complete"),
        ("error", "incomplete"),
    ]
    assert (results["bad"].error.code, results["bad"].text) == ("constraint-error", bad)
    assert "the output breaks its constraint: " in results["bad"].error.message
    assert results["cut"].constraint in ("incomplete", "complete")
    assert results["cut"].finish_reason == "length" or "choice" in fields
    assert (results["calls"].finish_reason, results["calls"].constraint) == ("stop", None)
    assert {result.constraint_check for result in run.results} == {None}


UNCHECKED = [  # for the server to judge: what is no constraint here, or in another dialect
    ({"extra_body": {"grammar": {"type": "cfg", "value": "x"}}}, (None, None)),
    ({"extra_body": {"response_format": {"type": "text", "value": 1}}}, (None, None)),
    ({"extra_body": {"guided_choice": [1, 2]}}, (None, None)),
    ({"lark": "in the dialect of the server"}, ("complete", "none")),
    ({"json_schema": {"$schema": "https://example.org/unknown"}}, ("complete", "none")),
]


@pytest.mark.parametrize(("fields", "expected"), UNCHECKED)
def test_a_constraint_that_cannot_be_checked_here_is_said_to_be_unchecked(fields, expected):
    [result] = answered(FaultServer(usual=answer("{}")), asking("a", **fields)).results
    assert (result.finish_reason, result.text) == ("stop", "{}")
    assert (result.constraint, result.constraint_check) == expected


def test_a_stop_that_completes_an_output_counts_for_its_constraint():
    server = FaultServer(usual=answer('{"a": 1} and more'))
    for stop, outcome in (("}", "complete"), ("1", "incomplete")):
        [result] = answered(server, asking("a", stop=stop, json_schema=True)).results
        assert (result.finish_reason, result.constraint) == ("stop", outcome)


def test_constraints_are_refused_if_nothing_can_check_them(monkeypatch):
    monkeypatch.setattr(constraints, "find_spec", lambda _: None)
    with FaultServer() as server, engine_of(server) as engine:
        parser = RequestParser(engine.capabilities)
        refused = parser.parse(json.dumps({"prompt": "a", "response_format": OBJECT}).encode(), 1)
        taken = parser.parse(b'{"prompt": "a"}', 1)
    [problem] = refused.problems
    assert problem.code == "unsupported-model"
    assert "pip install 'batchdecode[grammar]'" in problem.message
    assert taken.request.prompt == "a"


def test_usage_is_what_the_server_says_and_its_hidden_tokens_come_with_the_last():
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    run = answered(FaultServer(usual=answer("a", "b", usage=usage)), asking("a"))
    assert run.results[0].usage == Usage(9, 5)
    assert sum(event.tokens for event in run.kinds(ReceiveEvent)) == 5
    [finish] = run.kinds(FinishEvent)
    assert (finish.tokens, finish.prompt_tokens) == (5, 9)


def test_no_tokens_need_no_server():
    server = FaultServer()
    [result] = answered(server, asking("a", max_tokens=0)).results
    assert (result.finish_reason, result.slot, server.requests) == ("length", None, [])


def test_the_numbers_of_a_run_are_those_of_the_wall():
    run = answered(FaultServer(usual=answer("a", "b", "c", first=0.1, gap=0.1)), asking("a"))
    summary = metrics_of(run.events).summary()
    latencies = summary.latencies
    assert 0.1 <= latencies.ttft.mean < latencies.e2e.mean - 0.1
    assert latencies.tpot.mean == pytest.approx(
        (latencies.e2e.mean - latencies.ttft.mean) / 2, abs=1e-5
    )
    assert latencies.itl.count == 2
    assert latencies.itl.mean * 2 <= latencies.e2e.mean - latencies.ttft.mean + 1e-5
    assert (summary.prompt_tokens, summary.generated_tokens) == (3, 3)


def test_policies_and_arrivals_are_those_of_any_run():
    requests = [
        Request(prompt="late", id="late", arrival_time=0.15),
        Request(prompt="b", id="b", priority=2),
        Request(prompt="c", id="c", priority=1),
    ]
    settings = SchedulingSettings(policy="priority")
    run = answered(FaultServer(), requests, batch=1, settings=settings)
    assert [event.id for event in run.kinds(AdmitEvent)] == ["c", "b", "late"]
    assert run.kinds(AdmitEvent)[-1].time >= 0.15


def test_a_policy_that_asks_for_our_cache_is_refused():
    settings = SchedulingSettings(policy="lpm")
    with (
        FaultServer() as server,
        pytest.raises(BatchdecodeError, match="needs a local model"),
        engine_of(server, settings=settings),
    ):
        pass


def test_turns_of_a_session_go_on_from_what_was_said():
    server = FaultServer({"a": [answer("1")]}, usual=answer("2"))
    turns = [
        Request(prompt="a", id="a", session="s"),
        Request(prompt="b", id="b", session="s", think_time=0.1),
    ]
    run = answered(server, turns)
    assert [body["prompt"] for body in server.bodies] == ["a", "a1b"]
    assert [result.id for result in run.results] == ["a", "b"]
    first, second = run.kinds(AdmitEvent)
    assert second.time >= first.time + 0.1


def test_turns_of_a_chat_go_on_from_messages():
    server = FaultServer(usual=answer("1"))
    said = [[{"role": "user", "content": text}] for text in "ab"]
    turns = [
        Request(prompt="", id=str(number), session="s", extra_body={"messages": messages})
        for number, messages in enumerate(said)
    ]
    answered(server, turns)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "1"}


def test_a_session_that_fails_goes_no_further():
    server = FaultServer({"a": [answer("1", finish="content_filter")]})
    run = answered(server, [Request(prompt=p, id=p, session="s") for p in "abc"])
    codes = [result.error.code for result in run.results]
    assert codes == ["content-filter", "session-failed", "session-failed"]
    assert len(server.bodies) == 1
    chat = Request(prompt="", id="b", session="s", extra_body={"messages": [{"role": "user"}]})
    a, c = (Request(prompt=p, id=p, session="s") for p in "ac")
    run = answered(FaultServer(), [a, chat, c])
    codes = [result.error and result.error.code for result in run.results]
    assert codes == [None, "session-failed", "session-failed"]


def test_what_an_earlier_run_has_found_is_not_asked_for_again():
    found = Result(
        id="a", index=0, text="old", tokens=None, finish_reason="stop", stop_reason=None,
        usage=Usage(3, 4), slot=0, steps=StepTimes(0, 0, 0, 9),
    )  # fmt: skip
    with FaultServer() as server, engine_of(server) as engine:
        engine.enqueue(Request(prompt="a", id="a", n=2, temperature=1.0), replayed={0: found})
        engine.enqueue(Request(prompt="t", id="t", session="s"), replayed={0: found})
        engine.enqueue(Request(prompt="u", id="u", session="s"))
        run = carry_out(engine, [])
    assert {(result.id, result.index) for result in run.results} == {("a", 1), ("u", 0)}
    assert sorted(body["prompt"] for body in server.bodies) == ["a", "toldu"]
    assert len(run.kinds(FinishEvent)) == 4


def test_while_it_runs_a_row_has_as_many_tokens_as_have_come():
    run = answered(FaultServer(usual=answer("a", "b", "c", gap=0.05)), asking("x", "y"))
    fold, received = RequestFold(), {"x": 0, "y": 0}
    for event in run.events:
        found = fold.take(event)
        if isinstance(event, ReceiveEvent):
            received[event.id] += event.tokens
            assert found.tokens_after(event.step) == received[event.id]
    assert received == {"x": 3, "y": 3}
