"""From what the model says of all rows to what each is given: chosen, forced, stopped.

Rows that are only sampled, stopped and cut at max_tokens are never looked at one by one; what else
a row asks for is in its Row.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from batcher.decoding.constraints import allowed_tokens
from batcher.decoding.history import TokenHistory
from batcher.decoding.machine import Progress
from batcher.decoding.machine_table import MachineTable
from batcher.decoding.sampling.sampler import Masks, Sampled, Sampler
from batcher.errors import Failure, InvariantError
from batcher.events import TokenEvent
from batcher.models.base import NO_SLOTS, IntArray, Model, ModelOutput
from batcher.request import NUM_DIGITS, FinishReason
from batcher.rows.beam_rows import BeamRows
from batcher.rows.generated import Generated
from batcher.rows.grammars import Grammars
from batcher.rows.row import Row, make_row, partner_slot, sampling_row
from batcher.rows.row_stream import RowStream
from batcher.rows.suspended import SuspendedRow, SuspendedRows
from batcher.sequence import Sequence
from batcher.validation import logit_fields_of


class Decoded(NamedTuple):
    """What a step has led to, beside one more token in every row; by the slots of leaders.

    stopped: rows that have come to their end.  failed: rows that got no token.
    jumps: the tokens of rows that got several.
    forks: (source, target) of beams: target goes on from what the model holds for source.
    """

    stopped: list[int]
    failed: Mapping[int, Failure]
    jumps: Mapping[int, list[int]]
    forks: list[tuple[int, int]]


NOTHING_DECODED = Decoded([], {}, {}, [])


class Decoder:
    """The decoding side of every row.

    is_streaming: whether the text of each sample is told as it comes.
    grammars: what constraints and healed prompts come to with this model.
    logit_slots: [logit rows] the slots whose logits are needed, ascending.
    """

    def __init__(self, model: Model, num_slots: int, *, is_streaming: bool) -> None:
        self.grammars = Grammars(model)
        self.logit_slots = NO_SLOTS
        self._tokenizer, self._eos_token_id = model.tokenizer, model.eos_token_id
        self._samples_all = model.gives == "logits"
        self._is_streaming = is_streaming
        self._history = TokenHistory(num_slots)
        self._machines = MachineTable(num_slots, model.vocab_size, model.tokenizer)
        self._sampler: Sampler | None = None
        if model.gives != "tokens" and model.vocab_size is not None:
            self._sampler = Sampler(num_slots, model.vocab_size, model.tokenizer)
        self._rows: dict[int, Row] = {}  # those that have to be looked at, by slot
        self._beams: dict[int, BeamRows] = {}  # by the slot of the leader
        self._leaders: dict[int, int] = {}  # slot of a companion -> that of its leader
        self._streamed: list[TokenEvent] = []
        self._step = 0

    # -- a row comes and goes --------------------------------------------------------------------

    def open(self, leader: Sequence) -> list[int]:
        """Begin the row of `leader`, or its first beam; return the tokens it has from the outset.

        Those are what its constraint allows nothing beside.
        """
        slot = leader.slot
        if leader.role == "beam":
            self._beams[slot] = BeamRows(leader)
        else:
            self._history.open(slot)
        for companion in leader.companions:
            self._leaders[companion.slot] = slot
        is_sampled = not leader.is_plain and bool(logit_fields_of(leader.request))
        if self._sampler is not None and (is_sampled or self._samples_all):
            self._sampler.open(slot, sampling_row(leader, self._eos_token_id))
            self.logit_slots = self._sampler.slots
        row = None
        if self._is_streaming or not leader.is_plain:
            row = make_row(leader, self.grammars, self._stream_of(leader))
        if row is None:
            self._machines.open(slot, leader.machine)
            return []
        self._rows[slot] = row
        self._machines.open(slot, row.machine, Progress(skip=len(leader.healing)))
        forced = row.untold = self._force(slot, row)
        if forced:
            self._history.extend(slot, forced)
        return forced

    def _stream_of(self, leader: Sequence) -> RowStream | None:
        """Return what tells of a sample as it comes; of those that compete, nothing can be told."""
        request = leader.request
        is_sure = leader.role == "sample" and request.best_of is None and request.max_tokens > 0
        return RowStream(leader, self._tokenizer) if self._is_streaming and is_sure else None

    def close(self, slot: int, num_tokens: int, reason: FinishReason) -> Generated:
        """Return the first `num_tokens` tokens of the row in `slot`, and forget the row."""
        generated = Generated(self._history.close(slot, num_tokens), reason)
        if not self._rows and self.logit_slots is NO_SLOTS:
            self._machines.close(slot)
            return generated
        row = self._rows.get(slot)
        if row is not None:
            sampler = self._sampler
            logprob = None if sampler is None else sampler.cumulative_logprob(slot)
            generated = self._close_row(row, generated, logprob)
        self._forget(slot)
        return generated

    def close_beams(self, slot: int, reason: FinishReason) -> list[Generated]:
        """Return the best beams of the request whose leader is in `slot`, and forget its rows."""
        beams, row = self._beams.pop(slot), self._rows[slot]
        for beam_slot in beams.slots:
            self._forget(beam_slot)
        return self._beam_outputs(beams, row, reason)

    def read(self, slot: int, start: int, stop: int) -> list[int]:
        """Return tokens number `start` to `stop`, exclusive, of those the row in `slot` has."""
        leader = self._leaders.get(slot, slot)
        if leader in self._beams:
            return self._beams[leader].tokens_in(slot)[start:stop]
        return self._history.read(leader, start, stop)

    # -- a row is out of the batch for a while ---------------------------------------------------

    def suspend(self, leader: Sequence, num_tokens: int) -> SuspendedRows:
        """Take the rows of `leader` out of their slots, to be resumed in others, or closed.

        num_tokens: how many of the row's tokens are its output; beams know that themselves.
        """
        slot = leader.slot
        if leader.role == "beam":
            beams = self._beams.pop(slot)
            rows = [self._suspend_row(beam_slot) for beam_slot in beams.slots]
            return SuspendedRows(beams.tokens(), rows, beams)
        tokens = [self._history.close(slot, num_tokens)]
        if not self._rows and self.logit_slots is NO_SLOTS:
            return SuspendedRows(tokens, [SuspendedRow(self._machines.suspend(slot))])
        return SuspendedRows(tokens * leader.num_slots, [self._suspend_row(slot)])

    def resume(self, leader: Sequence, suspended: SuspendedRows) -> None:
        """Let suspended rows go on in the slots that `leader` and its companions have by now."""
        slot = leader.slot
        if suspended.beams is None:
            self._history.resume(slot, suspended.tokens[0])
        else:
            suspended.beams.move()
            self._beams[slot] = suspended.beams
        for companion in leader.companions:
            self._leaders[companion.slot] = slot
        for sequence, row in zip((leader, *leader.companions), suspended.rows, strict=False):
            self._resume_row(cast(Sequence, sequence), row)

    def close_suspended(self, suspended: SuspendedRows, reason: FinishReason) -> list[Generated]:
        """Return what suspended rows had generated: the row's output, or those of its beams."""
        first = suspended.rows[0]
        if suspended.beams is not None:
            return self._beam_outputs(suspended.beams, cast(Row, first.row), reason)
        generated = Generated(suspended.tokens[0], reason)
        if first.row is None:
            return [generated]
        sampling = first.sampling
        logprob = None if sampling is None else sampling.cumulative_logprob
        return [self._close_row(first.row, generated, logprob)]

    def _suspend_row(self, slot: int) -> SuspendedRow:
        sampling = None if self._sampler is None else self._sampler.suspend(slot)
        row = SuspendedRow(self._machines.suspend(slot), self._rows.get(slot), sampling)
        self._forget(slot)
        return row

    def _resume_row(self, sequence: Sequence, suspended: SuspendedRow) -> None:
        slot = sequence.slot
        self._machines.resume(slot, suspended.place)
        if suspended.row is not None:
            self._rows[slot] = suspended.row
        if suspended.sampling is not None and self._sampler is not None:
            self._sampler.resume(slot, suspended.sampling, partner_slot(sequence))
            self.logit_slots = self._sampler.slots

    # -- what comes of a row ---------------------------------------------------------------------

    def _beam_outputs(self, beams: BeamRows, row: Row, reason: FinishReason) -> list[Generated]:
        return [
            row.check(generated, self._tokenizer, self._eos_token_id)
            for generated in beams.results(reason)
        ]

    def _close_row(
        self, row: Row, generated: Generated, cumulative_logprob: float | None
    ) -> Generated:
        if row.stream is not None:
            if row.untold:
                self._streamed += row.stream.push(row.untold, self._step)
            self._streamed += row.stream.finish(self._step)
        generated = row.check(generated, self._tokenizer, self._eos_token_id)
        if row.sequence.request.logprobs is not None:
            generated = replace(generated, logprobs=row.logprobs)
        if cumulative_logprob is not None and row.needs_cumulative:
            logprob = round(cumulative_logprob, NUM_DIGITS)
            generated = replace(generated, cumulative_logprob=logprob)
        return generated

    def _forget(self, slot: int) -> None:
        if self._leaders:
            self._leaders = {s: leader for s, leader in self._leaders.items() if leader != slot}
        self._machines.close(slot)
        self._rows.pop(slot, None)
        if self._sampler is not None and self.logit_slots is not NO_SLOTS:
            self._sampler.close(slot)
            self.logit_slots = self._sampler.slots if self._sampler.slots.size else NO_SLOTS

    # -- a step ----------------------------------------------------------------------------------

    def decode(self, output: ModelOutput, step: int) -> Decoded:
        """Take in what the model gave in `step`; writes the tokens that were chosen into it."""
        tokens = output.tokens
        failed = self._as_failures(output.failed) if output.failed else {}
        if not self._rows and self.logit_slots is NO_SLOTS:
            self._history.append(tokens)
            stopped = self._machines.advance(tokens)
            return Decoded(stopped, failed, {}, []) if stopped or failed else NOTHING_DECODED
        self._step = step
        return self._decode_rows(output, failed)

    def _decode_rows(self, output: ModelOutput, failed: dict[int, Failure]) -> Decoded:
        """Do what `decode` does where some rows have to be sampled or looked at."""
        tokens = output.tokens
        stopped: list[int] = []
        forks: list[tuple[int, int]] = []
        for slot, row in self._rows.items():
            self._let_end(slot, row)
        if self._sampler is not None and self.logit_slots is not NO_SLOTS:
            sampled = self._sample(self._sampler, output, failed)
            tokens[self.logit_slots] = sampled.tokens[self.logit_slots]
            if self._beams:
                stopped, forks = self._search(self._sampler, sampled, tokens, failed)
                self.logit_slots = self._sampler.slots
        self._history.append(tokens)
        is_over = {*failed, *stopped}  # those have no token
        given = {
            slot: int(tokens[slot])
            for slot in self._rows
            if self._leaders.get(slot, slot) not in is_over
        }
        stopped += self._machines.advance(tokens)
        return Decoded(stopped, failed, self._look_at_rows(given, stopped), forks)

    def fail(self, failed: Mapping[int, str | Failure]) -> Decoded:
        """Return the outcome of a step in which the model failed these rows, and gave no other."""
        return Decoded([], self._as_failures(failed), {}, [])

    def take_streamed(self) -> list[TokenEvent]:
        """Return what was told of samples since the last call."""
        streamed, self._streamed = self._streamed, []
        return streamed

    def _as_failures(self, failed: Mapping[int, str | Failure]) -> dict[int, Failure]:
        """Return the failures of rows as those of their leaders."""
        return {
            self._leaders.get(slot, slot): why
            if isinstance(why, Failure)
            else Failure("model-error", why)
            for slot, why in failed.items()
        }

    def _sample(self, sampler: Sampler, output: ModelOutput, failed: dict[int, Failure]) -> Sampled:
        """Choose the tokens of the rows with logits; add the rows for which there is none."""
        if output.logits is None:
            raise InvariantError("the model gave no logits")
        constraints = {
            slot: row.constraint for slot, row in self._rows.items() if row.constraint is not None
        }
        masks = None
        if constraints:
            allowed = allowed_tokens(list(constraints.values()), output.logits.shape[1])
            masks = Masks(np.array(list(constraints)), allowed)
        sampled = sampler.sample(output.logits, masks, output.failed)
        for slot, failure in sampled.failed.items():
            why = constraints[slot].failure if slot in constraints else None
            told = failure if why is None else Failure("constraint-error", why)
            failed.setdefault(self._leaders.get(slot, slot), told)
        for slot, logprob in sampled.logprobs.items():
            self._rows[slot].logprobs.append(logprob)
        return sampled

    def _search(
        self, sampler: Sampler, sampled: Sampled, tokens: IntArray, failed: dict[int, Failure]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Let every request's beams go on; return (leaders that are done, forks), fill `tokens`."""
        done, forks = [], []
        for leader, beams in self._beams.items():
            if leader in failed:
                continue
            step = beams.advance(sampled.beam_scores, self._would_end)
            if step is None:
                done.append(leader)
                if beams.failure is not None:
                    failed[leader] = beams.failure
                continue
            for beam, parent in enumerate(step.parents):
                if parent != beam:
                    source, target = beams.slots[parent], beams.slots[beam]
                    self._rows[target] = self._rows[source].fork(beams.sequences[beam])
                    self._machines.fork(source, target)
                    sampler.fork(source, target)
                    forks.append((source, target))
            for slot, token in zip(beams.slots, step.tokens, strict=True):
                tokens[slot] = token
                sampler.append(slot, token)
        return done, forks

    def _let_end(self, slot: int, row: Row) -> None:
        """Watch for the end of a row from now on if its next token may be the last."""
        if row.has_to_go_on and row.num_tokens + 1 >= row.sequence.request.min_tokens:
            row.has_to_go_on = False
            self._machines.switch(slot, row.machine)

    def _would_end(self, slot: int, token: int) -> bool:
        """Return whether `token` would be the last of the row in `slot`."""
        row = self._rows[slot]
        is_end = row.constraint is not None and token == self._eos_token_id
        return is_end or self._machines.would_end(slot, token)

    def _look_at_rows(self, given: Mapping[int, int], stopped: list[int]) -> dict[int, list[int]]:
        """Move on the rows of which more is known than tables hold; return what was forced.

        given: slot -> the token of the step.  stopped: gets those that end for want of tokens.
        """
        jumps: dict[int, list[int]] = {}
        has_stopped = set(stopped)
        for slot, token in given.items():
            row, tokens = self._rows[slot], [token]
            row.num_tokens += 1
            is_cut_short = False
            if row.constraint is not None and slot not in has_stopped:
                is_cut_short = token == self._eos_token_id  # below min_tokens: nothing else is left
                if is_cut_short:
                    stopped.append(slot)
                else:
                    row.follow(token)
                    tokens += self._force(slot, row)
            if len(tokens) > 1:
                self._history.extend(slot, tokens[1:])
                jumps[slot] = tokens
            if row.stream is not None:
                told = row.stream.end if is_cut_short else row.stream.push
                self._streamed += told(row.untold + tokens, self._step)
                row.untold = []
        return jumps

    def _force(self, slot: int, row: Row) -> list[int]:
        """Return the tokens that are the only ones allowed next in a row, after moving it on.

        The last token of a row, and one that ends it, are left to the model: a row ends in a step.
        """
        forced: list[int] = []
        max_tokens = row.sequence.request.max_tokens
        while row.may_jump and row.constraint is not None and row.num_tokens + 1 < max_tokens:
            token = row.constraint.forced_token()
            if token is None:
                break
            self._let_end(slot, row)
            if self._machines.would_end(slot, token):
                break
            self._machines.advance_row(slot, token)
            if self._sampler is not None:
                self._sampler.append(slot, token)
            row.num_tokens += 1
            row.follow(token)
            forced.append(token)
        return forced
