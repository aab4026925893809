"""What the slow scheduler keeps of jobs, and the plan that it makes of them."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Job(NamedTuple):
    """What a schedule depends on: tokens that many have in common, and how long the output is."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None
    salt: str | None = None
    negative: tuple[int, ...] | None = None


@dataclass(eq=False)
class SlowRow:
    """A sample, or the negative prompt beside it."""

    job: Job
    role: str
    prompt: tuple[int, ...]
    num_generated: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    cached_from: object = None
    parent: object = None
    blocks: list[int] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + self.num_generated

    @property
    def name(self) -> tuple[str, str]:
        return self.job.id, self.role

    def tokens(self, start: int, stop: int) -> tuple[object, ...]:
        """Return some of its tokens; what it generates is its own."""
        own = [(self.name, place) for place in range(stop - len(self.prompt))]
        return (*self.prompt, *own)[start:stop]


@dataclass(eq=False)
class SlowUnit:
    """What is admitted together, in the order of the group."""

    job: Job
    rows: list[SlowRow]
    queue_number: int
    admission: int = -1
    slots: list[int] = field(default_factory=list)
    is_decoding: bool = False

    @property
    def name(self) -> str:
        return self.job.id


@dataclass
class SlowPlan:
    """A step: names, in order."""

    preempted: list[tuple[str, str, str, dict[tuple[str, str], int]]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    chunks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    decodes: bool = True
    hold: tuple[str, str] | None = None
