"""What a run of an input would have to do, as far as it can be told without decoding anything."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.engine.engine import Engine
from batcher.models.base import ANY_LENGTH, Context, Tokenizer, number_of
from batcher.prompts import count_tokens, has_segments, prefix_of
from batcher.request import TO_THE_END, Request
from batcher.requests.lines import BadLine, RequestParser
from batcher.requests.validation import num_slots_needed

from ..models import capabilities_of, load
from ..screen.terminal import counted
from .files import print_json, print_text
from .input import Line, OpenInput, RequestReader, open_input
from .problems import InvalidInput, ProblemReport, say
from .stdout import user_code_prints_to_stderr

if TYPE_CHECKING:
    from ..commands.check import CheckOptions


class ArrivalSpan(Struct, frozen=True):
    """The first and the last of the times at which something arrives, in seconds."""

    first: float
    last: float


class InputPlan(Struct, kw_only=True):
    """The counts of `batchdecode check`.

    slot_steps: for how long all slots together are held if every request generates all it may.
    least_steps: what any schedule needs for that in `batch` slots; stops, EOS and what a constraint
    forces only make it less, arrival times only more.
    max_context: how many tokens a row may have, None if there is no limit.
    too_long: prompts that leave no room for output; may_outgrow: others with less room than
    max_tokens.  to_the_end: chats without max_tokens, which may fill the context.
    """

    lines: int = 0
    invalid: int = 0
    blank: int = 0
    requests: int = 0
    openai_rows: int = 0
    text_prompts: int = 0
    token_prompts: int = 0
    segment_prompts: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    outputs: int = 0
    output_tokens: int = 0
    longest_output: int = 0
    with_stops: int = 0
    ignoring_eos: int = 0
    arrivals: ArrivalSpan | None = None
    arrivals_in_order: bool = True
    batch: int
    slot_steps: int = 0
    least_steps: int = 0
    max_context: int | None = None
    too_long: int = 0
    may_outgrow: int = 0
    to_the_end: int = 0

    def add(self, parsed: Line, tokenizer: Tokenizer) -> None:
        """Count one line in."""
        self.lines += 1
        if isinstance(parsed, BadLine):
            self.invalid += 1
            return
        request = parsed.request
        self.requests += 1
        self.openai_rows += parsed.form != "result"
        num_before = len(prefix_of(request.prompt, tokenizer))
        num_tokens = num_before + count_tokens(request.prompt, tokenizer)
        context = ANY_LENGTH if self.max_context is None else Context(self.max_context)
        most = context.output_limit(request.output_limit, num_tokens)
        self.to_the_end += request.max_tokens == TO_THE_END
        self._add_prompt(request, num_tokens, most)
        self.outputs += request.n
        self.output_tokens += request.n * most
        self.longest_output = max(self.longest_output, most)
        num_admissions = 1 if request.num_beams > 1 else request.best_of or request.n
        self.slot_steps += num_admissions * num_slots_needed(request) * most
        self.least_steps = max(-(-self.slot_steps // self.batch), self.longest_output)
        stops = (request.stop_token, request.stop_sequence, request.stop)
        self.with_stops += any(stop not in (None, []) for stop in stops)
        self.ignoring_eos += request.ignore_eos
        time = request.arrival_time
        span = self.arrivals or ArrivalSpan(time, time)
        self.arrivals = ArrivalSpan(min(span.first, time), max(span.last, time))
        self.arrivals_in_order &= time >= span.last

    def _add_prompt(self, request: Request, num_tokens: int, most: int) -> None:
        prompt = request.prompt
        if isinstance(prompt, str):
            self.text_prompts += 1
        elif has_segments(prompt):
            self.segment_prompts += 1
        else:
            self.token_prompts += 1
        self.prompt_tokens += num_tokens
        self.longest_prompt = max(self.longest_prompt, num_tokens)
        if self.max_context is not None:
            is_too_long = num_tokens + min(most, 1) > self.max_context
            self.too_long += is_too_long
            self.may_outgrow += not is_too_long and num_tokens + most > self.max_context


def _make_plan(options: "CheckOptions", requests: OpenInput, report: ProblemReport) -> InputPlan:
    """Read all of `requests`, count and report."""
    model = load(options)
    engine = Engine(
        model,
        options.batch,
        grammar_timeout=options.grammar_timeout,
        strict_constraints=options.strict_constraints,
    )
    parser = RequestParser(capabilities_of(engine, options))
    plan = InputPlan(batch=options.batch, max_context=number_of(model, "max_context"))
    lines = requests.lines()
    reader = RequestReader(lines, parser)
    while (line := reader.read()) is not None:
        plan.add(line, model.tokenizer)
        if isinstance(line, BadLine):
            report.add(line)
    plan.blank = lines.num_blank
    return plan


def _describe(plan: InputPlan, name: str) -> str:
    """Return the plan as a person reads it."""
    rows = [
        ("prompts", _prompts(plan)),
        ("output", _output(plan)),
        ("context", _context(plan)),
        ("stops", _stops(plan)),
        ("arrivals", _arrivals(plan)),
        ("OpenAI rows", f"{plan.openai_rows:,}" if plan.openai_rows else ""),
        (
            "steps",
            f"at least {plan.least_steps:,} in {counted(plan.batch, 'slot')}, without any stop",
        ),
        ("invalid", f"{plan.invalid:,} of {counted(plan.lines, 'line')}" if plan.invalid else ""),
    ]
    blank = f", {counted(plan.blank, 'blank line')}" if plan.blank else ""
    lines = [f"{name}: {counted(plan.requests, 'request')}{blank}"]
    if plan.requests:
        lines += [f"  {title:<12}{text}" for title, text in rows if text]
    return "".join(f"{line}\n" for line in lines)


def _prompts(plan: InputPlan) -> str:
    kinds = {
        "of text": plan.text_prompts,
        "of token ids": plan.token_prompts,
        "of segments": plan.segment_prompts,
    }
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    tokens = counted(plan.prompt_tokens, "token")
    return f"{shown}; {tokens}, longest {plan.longest_prompt:,}"


def _output(plan: InputPlan) -> str:
    tokens = counted(plan.output_tokens, "token")
    text = f"at most {tokens}, longest {plan.longest_output:,}"
    if plan.to_the_end:
        text += f"; {counted(plan.to_the_end, 'chat')} without max_tokens"
    return text if plan.outputs == plan.requests else f"{plan.outputs:,} outputs, {text}"


def _context(plan: InputPlan) -> str:
    kinds = (
        ("prompt", plan.too_long, "too long"),
        ("output", plan.may_outgrow, "may be cut by it"),
    )
    counts = [f"{counted(count, noun)} {what}" for noun, count, what in kinds if count]
    if plan.max_context is None or not counts:
        return ""
    return f"{counted(plan.max_context, 'token')}; {', '.join(counts)}"


def _stops(plan: InputPlan) -> str:
    kinds = {"with stops": plan.with_stops, "ignoring EOS": plan.ignoring_eos}
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)


def _arrivals(plan: InputPlan) -> str:
    span = plan.arrivals
    if span is None or span.first == span.last:
        return f"all at {span.first if span else 0:g}"
    order = (
        "in order" if plan.arrivals_in_order else "out of order in the input, so not for --workers"
    )
    return f"from {span.first:g} to {span.last:g}, {order}"


def print_plan(options: "CheckOptions") -> None:
    """Carry out `batchdecode check`.

    Raises:
        BatchdecodeError: the input has bad lines, which have been reported, or cannot be read.
        WriteError: stdout takes no more.
    """
    with open_input(options.input, nullcontext) as requests:
        report = ProblemReport(requests.name, options.color)
        with user_code_prints_to_stderr():
            plan = _make_plan(options, requests, report)
    say(requests.take_notes() + report.closing())
    if options.json:
        print_json(plan)
    else:
        print_text(_describe(plan, requests.name))
    if plan.invalid:
        raise InvalidInput(report, plan.lines, "run would decode nothing without --keep-going.")
