"""Automata by the slowest obvious means: everything since the state was entered, again."""

from typing import NamedTuple

from batcher.decoding.stops import END, Exit, StopAutomaton
from batcher.models.base import Tokenizer, join_bytes


class Found(NamedTuple):
    """An exit that was taken: its pattern is text[begin:end], and token `number` completed it."""

    way: Exit
    begin: int
    end: int
    number: int


class SlowReader:
    """What one output has come to."""

    def __init__(
        self, automaton: StopAutomaton, tokenizer: Tokenizer, skip: int = 0, min_tokens: int = 0
    ) -> None:
        self.automaton, self.tokenizer, self.skip = automaton, tokenizer, skip
        self.min_tokens = min_tokens
        self.tokens: list[int] = []
        self.owners: list[int] = []  # of every byte of the text, the number of its token
        self.stands_at: list[int] = []  # where in the text every token begins
        self.of_prompt: set[int] = set()  # the numbers of tokens that are all of the prompt
        self.text = b""
        self.found: list[Found] = []
        self.state = 0
        self.entered_at = 0
        self.ids: list[int] = []  # since the state was entered

    @property
    def has_ended(self) -> bool:
        return self.state == END

    def read(self, token_id: int) -> None:
        assert not self.has_ended
        self.stands_at.append(len(self.text))
        self.tokens.append(token_id)
        token = self.bytes_of_ids([token_id])
        if 0 < self.skip >= len(token):
            self.skip -= len(token)
            self.of_prompt.add(len(self.tokens) - 1)
            return
        self.ids.append(token_id)
        self.skip, token = max(0, self.skip - len(token)), token[self.skip :]
        for place in range(len(token)):
            self.text += token[place : place + 1]
            self.owners.append(len(self.tokens) - 1)
            self.take_best(has_new_byte=True, is_token_done=place == len(token) - 1)
            if self.has_ended:
                self.owners += [len(self.tokens) - 1] * (len(token) - place - 1)
                self.text += token[place + 1 :]
                return
        if not token:
            self.take_best(has_new_byte=False, is_token_done=True)

    def bytes_of_ids(self, ids: list[int]) -> bytes:
        return join_bytes(ids, self.tokenizer.token_bytes)

    def take_best(self, *, has_new_byte: bool, is_token_done: bool) -> None:
        complete = []
        for place, way in enumerate(self.automaton.exits[self.state]):
            if way.target == END and len(self.tokens) < self.min_tokens:
                continue
            if isinstance(way.pattern, bytes):
                if has_new_byte and self.text[self.entered_at :].endswith(way.pattern):
                    complete.append(((-len(way.pattern), 0, place), way))
            elif is_token_done and tuple(self.ids[-len(way.pattern) :]) == way.pattern:
                num_ids = 0 if way.given is None else len(way.pattern)
                size = len(self.bytes_of_ids(list(way.pattern)))
                complete.append(((-size, -num_ids, place), way))
        if complete:
            (minus_size, _, _), way = min(complete, key=lambda each: each[0])
            end = len(self.text)
            self.found.append(Found(way, max(0, end + minus_size), end, len(self.tokens) - 1))
            self.state, self.entered_at, self.ids = way.target, end, []

    def final_text(self) -> bytes:
        return self.text[: self.found[-1].begin] if self.has_ended else self.text

    def stop_reason(self) -> object:
        return self.found[-1].way.stop_reason if self.has_ended else None

    def segments(self) -> list[tuple[str, bytes, list[int]]]:
        """All of them, the empty ones too."""
        segments = []
        state = begin = first = 0
        for found in [*self.found, None]:
            if state == END:
                break
            end = len(self.text) if found is None else found.begin
            last = len(self.tokens) if found is None else found.number + 1
            if found is not None and isinstance(found.way.pattern, tuple):
                last -= len(found.way.pattern)
            numbers = [
                number
                for number in range(len(self.tokens))
                if number in self.owners[begin:end]
                or (
                    number not in self.owners
                    and number not in self.of_prompt
                    and first <= number < last
                    and self.stands_at[number] <= end
                )
            ]
            tokens = [self.tokens[number] for number in numbers]
            segments.append((self.automaton.names[state], self.text[begin:end], tokens))
            if found is not None:
                state, begin, first = found.way.target, found.end, found.number + 1
        return segments
