"""Profiles: how long a step of a real engine takes, and where that comes from."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import PipelineStepTime, ProfileStepTime
from batcher.timing.least import LeastStepTime
from batcher.timing.step_time import StepTime

TERMS = ("t0", "w", "f", "g", "d", "h", "e")
MORE_TERMS = ("c", "x")
"""Terms that only some profiles have: 0 where they are not stated."""

YAML_SUFFIXES = (".yaml", ".yml")


class Profile(Struct, frozen=True, kw_only=True):
    """What a step takes, in milliseconds; see ProfileStepTime, and docs/timing.md for each term.

    by_tokens: (tokens of a step, what they take), in place of max(w, f*T).
    num_experts, num_experts_per_tok: those of a layer, of which x is the cost; None without them.
    least: no step takes less; see overhead.py.
    hardware, model: names of hardware.yaml and models.yaml, or of something not there.
    tensor_parallel: the GPUs that share every layer.  pipeline_parallel: the stages of so many GPUs
    that have some of the layers each; the terms are those of all in one part.  kv_tokens: how many
    tokens the engine had room for.  error: how far it is from what was measured.
    """

    t0: catalog.Amount
    w: catalog.Amount
    f: catalog.Amount
    g: catalog.Amount
    d: catalog.Amount
    h: catalog.Amount
    e: catalog.Amount
    c: catalog.Amount = 0.0
    x: catalog.Amount = 0.0
    by_tokens: catalog.Points = ()
    num_experts: catalog.OptionalCount = None
    num_experts_per_tok: catalog.OptionalCount = None
    least: catalog.Amount = 0.0
    hardware: catalog.OptionalText = None
    model: catalog.OptionalText = None
    tensor_parallel: catalog.Count = 1
    pipeline_parallel: catalog.Stages = 1
    kv_tokens: catalog.OptionalCount = None
    error: catalog.Text = "not stated"
    source: catalog.Text = "not stated"

    @property
    def terms(self) -> dict[str, float]:
        """The terms by their names, of MORE_TERMS those that are not 0."""
        more = [term for term in MORE_TERMS if getattr(self, term)]
        return {term: getattr(self, term) for term in (*TERMS, *more)}

    @property
    def experts(self) -> tuple[int, int] | None:
        """How many experts a layer has, and how many of them are for each token, if any."""
        if self.num_experts is None or self.num_experts_per_tok is None:
            return None
        return self.num_experts, self.num_experts_per_tok

    def step_time(self, name: str) -> StepTime:
        """Return the step time that a profile of this name stands for."""
        passes = [
            ProfileStepTime(name, self.terms, self.by_tokens, self.experts, parts)
            for parts in range(1, self.pipeline_parallel + 1)
        ]
        step_time: StepTime = passes[0]
        if len(passes) > 1:
            settings = passes[0].settings | {"pipeline_parallel": self.pipeline_parallel}
            step_time = PipelineStepTime(name, settings, passes)
        return LeastStepTime(step_time, self.least) if self.least else step_time


@cache
def shipped_profiles() -> dict[str, Profile]:
    """Return the profiles that come with the project, by name."""
    return _as_profiles(catalog.shipped("profiles.yaml"), "profiles.yaml")


def read_profiles(path: str) -> dict[str, Profile]:
    """Return the profiles of a YAML file by name; one that stands alone has that of the file.

    Raises:
        CatalogError: the file cannot be read, or one of its profiles is none.
    """
    content = catalog.read_mapping(path)
    named = content.keys() - set(Profile.__struct_fields__)
    if any(isinstance(content[name], dict) for name in named):
        return _as_profiles(content, path)
    name = Path(path).stem
    return _as_profiles({name: content}, path)


def is_file(text: str) -> bool:
    """Return whether `text` names a file of profiles, and none of them."""
    return text.endswith(YAML_SUFFIXES)


def find_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile that `text` names: a shipped one, FILE.yaml, FILE.yaml:NAME.

    Raises:
        CatalogError: there is none, or a file has several and none is named.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not is_file(path):
        path, name = text, ""
    if not is_file(path):
        return text, catalog.find(text, shipped_profiles(), "profile")
    profiles = read_profiles(path)
    if name:
        return name, catalog.find(name, profiles, f"profile in {path}:")
    if len(profiles) != 1:
        known = ", ".join(profiles)
        raise CatalogError(f"{path} has {len(profiles)} profiles: {path}:NAME; known: {known}")
    return next(iter(profiles.items()))


def _as_profiles(content: dict[str, Any], place: str) -> dict[str, Profile]:
    """Return what a file holds as profiles, or raise a CatalogError."""
    profiles = {}
    for name, values in content.items():
        profile = catalog.as_record(values, Profile, f"{place}: profile {name}")
        if fault := _fault(profile):
            raise CatalogError(f"{place}: profile {name}: {fault}")
        profiles[name] = profile
    return profiles


def _fault(profile: Profile) -> str | None:
    """Return what is wrong with a profile whose values are each allowed; None if nothing is."""
    for (before, _), (after, _) in pairwise(profile.by_tokens):
        if after <= before:
            return f"by_tokens: {after} comes after {before}: expected tokens that ascend"
    if (profile.x > 0) != (profile.experts is not None):
        return "x is for experts: it needs num_experts and num_experts_per_tok, and they need it"
    if profile.experts is not None and profile.experts[1] > profile.experts[0]:
        return f"num_experts_per_tok: expected 1 to {profile.num_experts}"
    if not profile.step_time("it").ticks(1, 1, 0, 0):
        return "t0, w, f and g are 0: a step takes time"
    return None
