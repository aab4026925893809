"""What a planned step computes, as far as its duration depends on that."""

from batcher.scheduling.clock import StepLoad
from batcher.scheduling.plan import StepPlan
from batcher.scheduling.running import rows_of
from batcher.scheduling.scheduler import Scheduler


def load_of(scheduler: Scheduler, plan: StepPlan) -> StepLoad:
    """Return what the step of `plan` computes, before it has ended."""
    chunks, begun = plan.chunks, plan.begun
    num_decodes = num_read = 0
    if plan.decodes:
        decoding, decode_step = scheduler.decoding, scheduler.decode_step
        num_decodes, num_read = decoding.num_rows, decoding.num_read(decode_step)
        for leader in begun:  # they compute chunks
            for row in rows_of(leader):
                num_decodes -= 1
                num_read -= row.offset + decode_step
    if not (chunks or begun):
        return StepLoad(num_decodes, num_decodes, num_read, 0)
    num_known = work = 0
    for _, start, num_tokens in chunks:
        num_known += num_tokens
        work += num_tokens * (2 * start + num_tokens)
    num_empty = sum(not leader.num_tokens for leader in begun)  # they have no chunk
    num_rows = num_decodes + len(chunks) + num_empty
    return StepLoad(num_decodes + num_known, num_rows, num_read, work)
