"""Everything a program can do to a running engine, in any order, checked after each move."""

from collections import defaultdict

import pytest
from control_requests import control_requests
from examples import examples
from followed_schedule import FollowedSchedule, Row
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger import LedgerModel
from msgspec import structs
from reference import ENGLISH, decode_alone, english_requests
from scheduling_settings import BLOCK_SIZES, blocks_needed, scheduling_settings, sharing, step_times
from soaking import kept

from batcher import Engine, RequestError
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent
from batcher.prompts import read_prompt
from batcher.request import is_plain
from batcher.requests.validation import num_slots_needed
from batcher.settings import DEFAULT_SCHEDULING

SESSIONS = ["morning", "evening"]


def decode_control_alone(request, request_id):
    """Return every sample or beam of a request that has a batch to itself, by index."""
    everything = structs.replace(
        request, id=request_id, arrival_time=0.0, n=request.best_of or request.n
    )
    engine = Engine(LedgerModel(), num_slots_needed(request))
    engine.add(everything)
    results = []
    while engine.has_work:
        results += engine.step().results
    return {result.index: timeless(result) for result in results}


def timeless(result):
    return structs.replace(result, slot=None, steps=None, error=None)


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts and steps; what must be true follows from events and results alone."""

    def __init__(self):
        super().__init__()
        self.requests = {}
        self.sessions = defaultdict(list)
        self.aborted = set()
        self.results = defaultdict(list)
        self.told = defaultdict(list)
        self.text = defaultdict(str)

    @initialize(
        batch_size=st.sampled_from([1, 2, 3, 7]), is_plain_run=st.booleans(), data=st.data()
    )
    def start(self, *, batch_size, is_plain_run, data):
        self.model = LedgerModel(is_attentive=True)
        self.is_streaming = data.draw(st.booleans())
        self.is_plain_run = is_plain_run
        chosen, step_time = DEFAULT_SCHEDULING, None
        if not is_plain_run:
            num_blocks = st.one_of(st.integers(4, 40), st.integers(40, 200), st.none())
            block_size = data.draw(st.sampled_from(BLOCK_SIZES))
            chosen = data.draw(scheduling_settings(batch_size, num_blocks, block_size))
            step_time = data.draw(step_times())
        self.engine = Engine(
            self.model,
            batch_size,
            settings=chosen,
            step_time=step_time,
            is_streaming=self.is_streaming,
            is_checked=True,
        )
        self.schedule = FollowedSchedule(batch_size, chosen)

    @rule(
        request=sharing(st.one_of(english_requests(), control_requests())),
        delay=st.sampled_from([-5.0, 0.0, 0.5, 3.0]),
        session=st.sampled_from([None, None, *SESSIONS]),
        think_time=st.sampled_from([0.0, 0.0, 2.5]),
    )
    def add(self, request, delay, session, think_time):
        arrival = max(0.0, self.engine.now + delay)
        deadline = None if request.deadline is None else arrival + 8.0
        request = structs.replace(request, arrival_time=arrival, deadline=deadline)
        if session is not None and can_be_a_turn(request):
            request = structs.replace(request, session=session, think_time=think_time)
        if num_slots_needed(request) > self.engine.batch_size:
            with pytest.raises(RequestError, match="slots"):
                self.engine.add(request)
            return
        request_id = self.engine.add(request)
        assert request_id == str(len(self.requests) + 1)
        self.requests[request_id] = request
        self.schedule.add(request, request_id)
        if request.session is not None:
            self.sessions[request.session].append(request_id)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(self.living()))
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    def living(self):
        schedule = self.schedule
        firsts = [*schedule.pending, *schedule.waiting, *schedule.running]
        known = {first.id for first in firsts} - self.aborted
        return sorted((id_ for id_ in known if id_ in self.engine._num_open), key=int)

    @rule()
    def step(self):
        had_work = self.engine.has_work
        step, held = self.engine.num_steps, self.engine.num_running
        outcome = self.engine.step()
        now = self.engine._clock.start_of(step)
        is_planned = False
        for event in outcome.events:
            if isinstance(event, FinishEvent) and event.slot is not None and event.step == step:
                if not is_planned:
                    self.schedule.check_no_slot_is_wasted(now)
                is_planned = True
            assert not (is_planned and isinstance(event, ArriveEvent | AdmitEvent))
            self.schedule.follow(event)
        if not is_planned:
            self.schedule.check_no_slot_is_wasted(now)
        self.check_arrivals(outcome)
        self.take(outcome)
        progress = outcome.events or self.engine.num_steps > step
        assert progress or not had_work, "a step with work left did nothing (invariant 6)"
        assert self.engine.num_steps in (step, step + 1)
        assert held == 0 or self.engine.num_steps == step + 1

    def take(self, outcome):
        for told in outcome.tokens:
            assert self.is_streaming
            self.told[told.id, told.index] += told.tokens
            self.text[told.id, told.index] += told.text
        for result in outcome.results:
            others = {other.index for other in self.results[result.id]}
            assert result.index not in others, "two results for one output (invariant 1)"
            self.results[result.id].append(result)
            assert len(others) < self.requests[result.id].n, "too many results (invariant 1)"
            self.check_stream(self.requests[result.id], result)
            self.check_tokens_by_steps(self.requests[result.id], result)

    def check_arrivals(self, outcome):
        arrivals = [event for event in outcome.events if isinstance(event, ArriveEvent)]
        order = [(event.time, int(event.id), event.index) for event in arrivals]
        assert order == sorted(order)

    def check_tokens_by_steps(self, request, result):
        """Without limits a row has a token for every step, and those that it jumped."""
        row = Row(result.id, result.index, "sample")
        if not self.is_plain_run or result.finish_reason == "error" or request.num_beams > 1:
            return
        if result.steps.admitted is not None and result.steps.finished is not None:
            num_steps = result.steps.finished - result.steps.admitted + 1
            if request.output_limit == 0:  # the log-probabilities of its prompt take a step
                assert num_steps == 1
                num_steps = 0
            assert len(result.tokens) == num_steps + self.schedule.jumped[row]

    def check_stream(self, request, result):
        is_told = self.is_streaming and request.best_of is None and request.num_beams == 1
        told = self.told[result.id, result.index]
        assert told == (result.tokens if is_told else [])
        if is_told and result.steps.admitted is not None:
            text = "".join(segment.text for segment in result.segments or [])
            if result.segments is None:
                prompt = str(request.prompt) if request.echo else ""
                text = result.text.removeprefix(prompt)
            assert self.text[result.id, result.index] == text

    @invariant()
    def time_never_goes_back(self):
        if hasattr(self, "engine"):
            assert self.schedule.times == sorted(self.schedule.times), "invariant 4"
            assert self.engine.now >= self.schedule.times[-1]

    @invariant()
    def slots_and_places_agree_with_the_events(self):
        if not hasattr(self, "engine"):
            return
        engine, schedule, ended = self.engine, self.schedule, self.aborted
        assert schedule.to_admit + schedule.to_end + schedule.to_preempt == []
        held = [slot for slot, row in sorted(schedule.holders.items()) if row.id not in ended]
        holders = engine._batch.slots
        assert [slot for slot, holder in enumerate(holders) if holder is not None] == held
        assert engine.num_running == len(held) <= engine.batch_size, "invariant 2"
        assert set(self.model.rows) <= set(held)
        if self.is_plain_run:
            samples = {slot for slot in held if schedule.holders[slot].role != "beam"}
            assert samples <= set(self.model.rows)
        waiting = [first for first in schedule.waiting if first.id not in ended]
        assert engine.num_waiting == len(waiting)

    @invariant()
    def blocks_are_free_or_held(self):
        if not hasattr(self, "engine") or self.engine.scheduler.kv_cache is None:
            return
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.kv_cache.pool
        scheduler.check()
        held = {block for row in scheduler.batch.slots if row for block in row.block_table}
        assert len(held) + pool.num_free == pool.num_total, "invariant 10"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        self.check_that_nothing_is_left()
        histories = self.check_sessions()
        for request_id, request in self.requests.items():
            results = self.results[request_id]
            assert len(results) == request.n, "invariant 1"
            num_samples = (request.best_of or request.n) if request.output_limit else request.n
            assert self.schedule.drops[request_id] == num_samples - request.n
            if self.has_failed_before_it_ran(request, results[0]):
                continue
            if histories.get(request_id):
                tokens = [*histories[request_id], *tokens_of(request)]
                request = structs.replace(request, prompt=tokens)  # noqa: PLW2901 - of all turns
            if is_plain(request):
                self.check_plain(request, results[0])
            else:
                self.check_control(request, results)

    def check_that_nothing_is_left(self):
        schedule = self.schedule
        assert schedule.pending | schedule.waiting | schedule.running == {}
        assert schedule.holders == {}
        assert self.model.rows == {}
        assert kept(self.engine) == {}
        if schedule.computed:
            assert len(schedule.computed) <= self.engine.num_steps

    def check_sessions(self):
        """Return what each turn goes on from, after making sure that all behind a failure fail."""
        histories = {}
        for turns in self.sessions.values():
            history = []
            end, has_failed = -1, False
            for request_id in turns:
                (result,) = self.results[request_id]
                histories[request_id] = history
                is_cut_off = result.error is not None and result.error.code == "session-failed"
                assert is_cut_off == (has_failed and request_id not in self.aborted)
                if has_failed:
                    continue
                if result.steps.admitted is not None:
                    assert result.steps.admitted > end, "it has not waited for its turn"
                    end = result.steps.finished
                history = [*history, *tokens_of(self.requests[request_id]), *result.tokens]
                has_failed = has_failed or result.finish_reason in {"error", "aborted"}
        return histories

    def has_failed_before_it_ran(self, request, result):
        """Return whether that is so, after making sure that there was a reason."""
        if result.error is None or result.error.code not in {"session-failed", "kv-too-small"}:
            return False
        assert (result.tokens, result.slot) == ([], None)
        if result.error.code == "session-failed":
            assert request.session is not None
        elif request.session is None:
            settings = self.engine.settings
            assert blocks_needed(request, settings.block_size) > settings.kv_blocks
        return True

    def check_plain(self, request, result):
        alone = decode_alone(structs.replace(request, prompt=tokens_of(request)), ENGLISH)
        if result.finish_reason == "aborted":
            assert result.tokens == alone.tokens[: len(result.tokens)], "invariant 7"
        else:
            got = (result.tokens, result.text, result.finish_reason, result.stop_reason)
            assert got == alone, "invariant 7"

    def check_control(self, request, results):
        request = structs.replace(request, session=None, think_time=0.0)
        alone = decode_control_alone(request, results[0].id)
        if request.num_beams > 1 and results[0].id in self.aborted:
            return  # the best beams so far; better ones might have come
        for result in results:
            expected = alone[result.index]
            if result.finish_reason == "aborted":
                assert result.tokens == expected.tokens[: len(result.tokens)], "invariant 7"
            elif request.num_beams == 1 or result.error is None:
                assert timeless(result) == expected, "invariant 7"
        if (request.best_of or 1) > request.n and results[0].id not in self.aborted:
            best = sorted(alone.values(), key=likeliest_first)
            assert [r.index for r in results] == [r.index for r in best[: request.n]]


def likeliest_first(result):
    return result.finish_reason == "error", -(result.cumulative_logprob or 0.0), result.index


def can_be_a_turn(request):
    has_one_output = request.n == request.num_beams == 1 and request.best_of is None
    has_own_prompt = request.heal or request.echo or request.prompt_logprobs is not None
    return has_one_output and request.cfg_scale == 1 and not has_own_prompt


def tokens_of(request):
    return read_prompt(request.prompt, "prompt", "", LedgerModel()).tokens


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(examples(60), stateful_step_count=30)
