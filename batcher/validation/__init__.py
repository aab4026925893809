"""What makes a request decodable: the rules shared by the Python API and the line parser.

Rule: every check works on any value whatever, because a Request built by hand may hold anything.
"""

from batcher.validation.capabilities import (
    CONSTRAINT_FIELDS,
    LOGIT_FIELDS,
    ConstraintField,
    ModelCapabilities,
    constraint_fields_of,
    logit_fields_of,
    num_slots_needed,
)
from batcher.validation.plain import has_plain_stops, plain_copy, plain_types, token_type
from batcher.validation.problems import MAX_PROBLEMS, find_problems
from batcher.validation.ranges import LOGIT_BIAS, RANGES, SEGMENT_LENGTH, Range
from batcher.validation.states import ANY_STATE, MAX_NAME, initial_state_of
from batcher.validation.stops import MAX_STOP_LENGTH
from batcher.validation.values import DEFAULTS, cut, show

__all__ = [
    "ANY_STATE",
    "CONSTRAINT_FIELDS",
    "DEFAULTS",
    "LOGIT_BIAS",
    "LOGIT_FIELDS",
    "MAX_NAME",
    "MAX_PROBLEMS",
    "MAX_STOP_LENGTH",
    "RANGES",
    "SEGMENT_LENGTH",
    "ConstraintField",
    "ModelCapabilities",
    "Range",
    "constraint_fields_of",
    "cut",
    "find_problems",
    "has_plain_stops",
    "initial_state_of",
    "logit_fields_of",
    "num_slots_needed",
    "plain_copy",
    "plain_types",
    "show",
    "token_type",
]
