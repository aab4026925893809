"""From what a person says of drafts to what proposes them, for a model and the rows of a runner."""

from functools import partial
from typing import Any, NamedTuple

import msgspec

from batcher.engine.draft_model import DraftModel
from batcher.engine.draft_tree_model import DraftTreeModel
from batcher.engine.model_runner import ModelRunner
from batcher.engine.recorder import Recorder
from batcher.engine.sequence import Sequence
from batcher.engine.speculator import MeasuredCosts, Speculator
from batcher.errors import BatchdecodeError, InvariantError
from batcher.fields import check_types
from batcher.foreign import check_members
from batcher.models.base import (
    Model,
    PagedModel,
    can_page,
    can_verify,
    can_verify_trees,
    eos_token_ids_of,
    kv_block_bytes_of,
    number_of,
)
from batcher.models.loading import as_model, cache_windows_of
from batcher.models.simulated import SimulatedSettings
from batcher.models.simulated_draft import simulated_draft
from batcher.scheduling.batch import RunningBatch
from batcher.scheduling.clock import BatchStats, Clock, ConstantClock, WallClock
from batcher.scheduling.scheduler import Scheduler
from batcher.speculation.auto_lengths import AutoLengths
from batcher.speculation.drafter import CheckedDrafter, Drafter
from batcher.speculation.lengths import FixedLengths
from batcher.speculation.loading import make_text_drafter
from batcher.speculation.settings import (
    AUTO,
    DEFAULT_DRAFT_TOKENS,
    SPECULATION_SETTINGS,
    Acceptance,
    SpeculationSettings,
)
from batcher.speculation.spec import (
    LINE,
    LayersDraft,
    ModelDraft,
    TreeShape,
    parse_draft,
    parse_tree,
)
from batcher.transformer.settings import is_checkpoint

MAX_AUTO_TOKENS = 16


def make_speculator(
    speculation: SpeculationSettings | Drafter,
    model: Model,
    runner: ModelRunner,
    scheduler: Scheduler[Sequence],
    recorder: Recorder,
    clock: Clock,
) -> Speculator:
    """Return what speculates for the rows of `runner`, whose model is `model`.

    Raises:
        BatchdecodeError: the model cannot verify drafts, there is nothing that would draft, or a
            setting has no value that it may have.
    """
    if not can_verify(model):
        raise BatchdecodeError(
            f"drafts need a model that verifies them: {model.name} does not say it does"
        )
    made = partial(Speculator, scheduler, runner, recorder, clock)
    if not isinstance(speculation, SpeculationSettings):
        check_members("speculation", speculation, Drafter)
        settings: dict[str, Any] = {"draft": type(speculation).__qualname__}
        checked = CheckedDrafter(speculation, takes_trees=can_verify_trees(model))
        return made(checked, FixedLengths(DEFAULT_DRAFT_TOKENS), settings)
    check_types(speculation, SPECULATION_SETTINGS)
    shape = _shape(speculation, model)
    drafter = _drafter(speculation, model, runner, shape.num_branches)
    settings = msgspec.to_builtins(speculation)
    made = partial(made, shape=shape)
    if speculation.draft_tokens != AUTO:
        default = DEFAULT_DRAFT_TOKENS if shape is LINE else shape.size
        return made(drafter, FixedLengths(speculation.draft_tokens or default), settings)
    if isinstance(clock, WallClock):
        costs = MeasuredCosts()
        lengths = AutoLengths(MAX_AUTO_TOKENS, costs.steps.estimate, costs.draft_seconds)
        return made(drafter, lengths, settings, costs)
    return made(drafter, _lengths_by(clock, scheduler.batch), settings)


def _shape(speculation: SpeculationSettings, model: Model) -> TreeShape:
    """Return the shape of what is proposed for a row.

    Raises:
        BatchdecodeError: it is to be a tree, and cannot.
    """
    if speculation.draft_tree is None:
        return LINE
    shape = parse_tree(speculation.draft_tree)
    if speculation.draft_tokens == AUTO:
        raise BatchdecodeError(
            "--draft-tokens auto is for drafts in a line: how many pay is not known of a "
            "--draft-tree"
        )
    if speculation.acceptance != "exact":
        raise BatchdecodeError(
            f"--acceptance {speculation.acceptance} is for drafts in a line, and not for a "
            "--draft-tree"
        )
    if not can_verify_trees(model):
        raise BatchdecodeError(
            f"--draft-tree needs a model that verifies trees: {model.name} does not, as no model "
            "with recurrent layers does"
        )
    return shape


def _lengths_by(clock: Clock, batch: RunningBatch[Sequence]) -> AutoLengths:
    """Return as many drafts as are worth their time by what a clock says of steps.

    Raises:
        BatchdecodeError: it does not tell what steps take.
    """
    if isinstance(clock, ConstantClock):
        raise BatchdecodeError(
            "--draft-tokens auto needs to know how long steps take, and all take one second here: "
            "give a --profile, such as wall, or a number of drafts"
        )

    def step_seconds(num_rows: int, num_tokens: int) -> float:
        return clock.estimate(BatchStats(num_tokens, num_rows, batch.num_read, 0))

    return AutoLengths(MAX_AUTO_TOKENS, step_seconds)


def _drafter(
    speculation: SpeculationSettings, model: Model, runner: ModelRunner, num_branches: int
) -> Drafter:
    name, rule = speculation.draft, speculation.acceptance
    draft = parse_draft(name)
    match draft:
        case LayersDraft():
            drafting = _first_layers(model, draft.num_layers)
            return _draft_model(drafting, model, runner, rule, num_branches, shares_cells=True)
        case ModelDraft():
            drafting = _fitting(_load(draft.name, model), model, name)
            return _draft_model(drafting, model, runner, rule, num_branches)
        case _:  # drawn from nothing: to draw a token and compare accepts as many as any rule
            return make_text_drafter(draft, model.tokenizer, model.vocab_size, num_branches)


class DraftCache(NamedTuple):
    """What the cache of a second model takes, in bytes; None if it does not say.

    It is beside that of the model it drafts for: every block has room for both.
    """

    per_token: int | None
    per_block: int | None


def draft_cache_of(
    speculation: SpeculationSettings, model: Model, block_size: int
) -> DraftCache | None:
    """Return what is kept of drafts in blocks of `block_size` tokens; None if no second model is.

    Raises:
        BatchdecodeError: there is no such model, or it tells nonsense of its cache.
    """
    draft = parse_draft(speculation.draft)
    if not isinstance(draft, ModelDraft):
        return None
    if is_checkpoint(draft.name):
        from batcher.models.checkpoints import cache_size_of  # noqa: PLC0415 - for checkpoints only

        size = cache_size_of(draft.name)
        return DraftCache(size.per_token, size.of_block(block_size))
    drafting = _load(draft.name, model)
    return DraftCache(
        number_of(drafting, "kv_bytes_per_token"), kv_block_bytes_of(drafting, block_size)
    )


def _first_layers(model: Model, num_layers: int) -> PagedModel:
    """Return the first layers of a checkpoint.

    Raises:
        BatchdecodeError: it is none, or they cannot draft.
    """
    from batcher.models.first_layers import FirstLayersModel  # noqa: PLC0415 - for checkpoints only
    from batcher.models.transformer import TransformerModel  # noqa: PLC0415 - as above

    inner = getattr(model, "inner", model)
    if not isinstance(inner, TransformerModel):
        raise BatchdecodeError(
            f"--draft layers:{num_layers} is for checkpoints, and {model.name} is none"
        )
    return FirstLayersModel(inner, num_layers)


def _load(name: str, model: Model) -> Model:
    """Return the model that drafts; a simulated one drafts for one of the same settings.

    Raises:
        BatchdecodeError: there is none.
    """
    if name.partition(":")[0] != "simulated":
        return as_model(name)
    settings = model.settings if model.name == "simulated" else {}
    return simulated_draft(name, msgspec.convert(settings, SimulatedSettings))


def _draft_model(
    drafting: PagedModel,
    model: Model,
    runner: ModelRunner,
    rule: Acceptance,
    num_branches: int,
    *,
    shares_cells: bool = False,
) -> DraftModel | DraftTreeModel:
    """Return what drafts with a model.

    Raises:
        BatchdecodeError: it is to draft trees, and cannot.
    """
    rows, eos = runner.decoder.speculating, eos_token_ids_of(model)
    if runner.pages is None or rows is None:
        raise InvariantError("rows that speculate have no pages")
    held = drafting, runner.num_slots, runner.pages
    if num_branches == 1:
        look_ahead = rows.look_ahead if rule == "exact" else rows.draft
        return DraftModel(*held, look_ahead, eos, shares_cells=shares_cells)
    if not can_verify_trees(drafting):
        raise BatchdecodeError(
            f"--draft-tree: {drafting.name} cannot compute a tree, as a draft of trees has to"
        )
    return DraftTreeModel(*held, rows.best_after, eos, num_branches, shares_cells=shares_cells)


def _fitting(drafting: Model, model: Model, name: str) -> PagedModel:
    """Return a model that drafts for another, if it can.

    Raises:
        BatchdecodeError: it cannot; the message says why.
    """
    own, others = drafting.vocab_size, model.vocab_size
    if own != others:
        raise BatchdecodeError(
            f"--draft {name} has a vocabulary of {own} tokens, and {model.name} one of {others}: "
            "a draft needs the same"
        )
    if not can_page(drafting) or drafting.gives == "tokens":
        raise BatchdecodeError(f"--draft {name} has to give logits, and to be paged")
    if getattr(drafting, "recomputes_drafts", False):
        raise BatchdecodeError(
            f"--draft {name} has recurrent layers, whose states do not go back to before its drafts"
        )
    if cache_windows_of(drafting) != cache_windows_of(model):
        raise BatchdecodeError(
            f"the layers of --draft {name} do not read as far back as those of {model.name}: "
            "both share their block tables"
        )
    return drafting
