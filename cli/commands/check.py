"""`batchdecode check`: validates requests and shows what a run would do."""

from contextlib import nullcontext
from dataclasses import dataclass

from msgspec import Struct

from batcher.engine.engine import Engine
from batcher.models.base import ANY_LENGTH, Context, Tokenizer, number_of
from batcher.prompts import count_tokens, has_segments, prefix_of
from batcher.request import NUM_TOKENS, TO_THE_END, ServerRequest
from batcher.requests.lines import BadLine, RequestParser
from batcher.requests.validation import num_slots_needed

from ..command import OUTPUT, command, flag
from ..models import capabilities_of, load
from ..options import Color, RequestOptions, color_option, whole_config_option
from ..run.files import print_json, print_text
from ..run.input import Line, OpenInput, RequestReader, open_requests
from ..run.problems import InvalidInput, ProblemReport, say
from ..screen.terminal import FEW_SLOTS, HALF, MANY, counted
from ..signals import user_code_prints_to_stderr


@dataclass(frozen=True, kw_only=True)
class CheckOptions(RequestOptions):
    """The options of `batchdecode check`; docs/reference/cli.md has a table of them."""

    config: str | None = whole_config_option()
    json: bool = flag(OUTPUT, "Print the plan as JSON.", common=True)
    color: Color = color_option()


class ArrivalSpan(Struct, frozen=True):
    """The first and the last arrival time, in seconds."""

    first: float
    last: float


class InputPlan(Struct, kw_only=True):
    """The counts of `batchdecode check`.

    slot_steps: the sum over slots of occupied steps if every request generates max_tokens.
    least_steps: a lower bound on steps with `batch` slots; stops, EOS and forced tokens reduce it,
    arrival times increase it.
    max_context: tokens per row, None without a limit.
    too_long: prompts without capacity for output; may_outgrow: others with less capacity than
    max_tokens.  to_the_end: chats without max_tokens, which may fill the context.
    default_limit: outputs of other requests without max_tokens.
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
    default_limit: int = 0

    def add(self, parsed: Line, tokenizer: Tokenizer) -> None:
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
        self.outputs += request.n
        has_limit = request.max_tokens is not None or isinstance(request, ServerRequest)
        self.default_limit += 0 if has_limit else request.n
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


def _make_plan(options: CheckOptions, requests: OpenInput, report: ProblemReport) -> InputPlan:
    """Read all of `requests`, count them and report problems."""
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
    for _, _, line in reader:
        plan.add(line, model.tokenizer)
        if isinstance(line, BadLine):
            report.add(line)
    plan.blank = lines.num_blank
    return plan


def _describe(plan: InputPlan, name: str) -> str:
    prompts = _counts(
        {
            "of text": plan.text_prompts,
            "of token ids": plan.token_prompts,
            "of segments": plan.segment_prompts,
        }
    )
    num_tokens = counted(plan.prompt_tokens, "token")
    output = f"at most {counted(plan.output_tokens, 'token')}, longest {plan.longest_output:,}"
    if plan.to_the_end:
        output += f"; {counted(plan.to_the_end, 'chat')} without max_tokens"
    if plan.outputs != plan.requests:
        output = f"{plan.outputs:,} outputs, {output}"
    context = ""
    if plan.max_context is not None and (plan.too_long or plan.may_outgrow):
        context = counted(plan.max_context, "token")
        if plan.too_long:
            context += f"; {counted(plan.too_long, 'prompt')} too long"
        if plan.may_outgrow:
            context += f"{',' if plan.too_long else ';'} "
            context += f"{counted(plan.may_outgrow, 'output')} may be cut by it"
    span = plan.arrivals
    if span is None or span.first == span.last:
        arrivals = f"all at {span.first if span else 0:g}"
    else:
        order = "in order"
        if not plan.arrivals_in_order:
            order = "out of order in the input, so not for --workers"
        arrivals = f"from {span.first:g} to {span.last:g}, {order}"
    steps = f"at least {plan.least_steps:,} in {counted(plan.batch, 'slot')}, without any stop"
    rows = [
        ("prompts", f"{prompts}; {num_tokens}, longest {plan.longest_prompt:,}"),
        ("output", output),
        ("context", context),
        ("stops", _counts({"with stops": plan.with_stops, "ignoring EOS": plan.ignoring_eos})),
        ("arrivals", arrivals),
        ("OpenAI rows", f"{plan.openai_rows:,}" if plan.openai_rows else ""),
        ("steps", steps),
        ("invalid", f"{plan.invalid:,} of {counted(plan.lines, 'line')}" if plan.invalid else ""),
    ]
    blank = f", {counted(plan.blank, 'blank line')}" if plan.blank else ""
    lines = [f"{name}: {counted(plan.requests, 'request')}{blank}"]
    if plan.requests:
        lines += [f"  {title:<12}{text}" for title, text in rows if text]
    return "".join(f"{line}\n" for line in lines)


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)


def advice(plan: InputPlan) -> str | None:
    """Return the oddest thing about the requests, and what to do, in one line, or None."""
    outputs = counted(plan.outputs, "output")
    if plan.too_long:
        context = f"the context of {counted(plan.max_context or 0, 'token')}"
        return f"hint: shorten {counted(plan.too_long, 'prompt')} to fit {context}"
    if plan.default_limit > MANY * plan.outputs:
        cut = f"the default limit of {NUM_TOKENS} tokens applies to {plan.default_limit:,}"
        return f"hint: {cut} of {outputs}: set max_tokens or --max-tokens"
    if plan.batch > max(FEW_SLOTS, plan.outputs) and plan.slot_steps < (
        HALF * plan.batch * plan.least_steps
    ):
        slots = f"most of the {plan.batch:,} slots will be empty"
        return f"hint: {slots}: use a smaller --batch for {outputs}"
    return None


def check(options: CheckOptions) -> None:
    """Validate requests and show what a run would do; decode nothing."""
    with open_requests(options, nullcontext) as requests:
        report = ProblemReport(requests.name, options.color, requests.place_of)
        with user_code_prints_to_stderr():
            plan = _make_plan(options, requests, report)
    say(requests.take_notes() + report.closing())
    if options.json:
        print_json(plan)
    else:
        print_text(_describe(plan, requests.name))
    if plan.invalid:
        raise InvalidInput(report, plan.lines, "run would decode nothing without --keep-going.")
    if (hint := advice(plan)) is not None:
        say(f"{hint}\n")


COMMANDS = {"check": command(check, CheckOptions)}
