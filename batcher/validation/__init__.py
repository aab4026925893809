"""What makes a request decodable: the rules shared by the Python API and the line parser."""

from batcher.validation.problems import (
    MAX_MODELS,
    MAX_PROBLEMS,
    OF_STREAMS,
    constraint_fields_of,
    logit_fields_of,
    num_slots_needed,
)
from batcher.validation.quick import (
    FREE_FIELDS,
    checked_copy,
    checked_type,
    find_problems,
    goes_together,
)
from batcher.validation.stops import ANY_STATE, MAX_NAME, MAX_STOP_LENGTH, initial_state_of
from batcher.validation.values import ModelCapabilities, cut, show

__all__ = [
    "ANY_STATE",
    "FREE_FIELDS",
    "MAX_MODELS",
    "MAX_NAME",
    "MAX_PROBLEMS",
    "MAX_STOP_LENGTH",
    "OF_STREAMS",
    "ModelCapabilities",
    "checked_copy",
    "checked_type",
    "constraint_fields_of",
    "cut",
    "find_problems",
    "goes_together",
    "initial_state_of",
    "logit_fields_of",
    "num_slots_needed",
    "show",
]
