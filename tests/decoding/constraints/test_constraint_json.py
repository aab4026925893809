"""Random outputs under JSON schemas: every one parses and keeps its schema, says jsonschema."""

import json

import jsonschema
import pytest
from constrained import compiler, random_outputs, source

from batcher.decoding.verification import Look
from batcher.models.tokenizers import EOS_TOKEN_ID, byte_id

NUM_OUTPUTS = 20  # of each of the 24 schemas
# What ends a string, an object or an array is drawn more often, or outputs would not end.
WEIGHTS = {byte_id('"'): 40, byte_id("}"): 40, byte_id("]"): 20, EOS_TOKEN_ID: 60}

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 12}, "number": {"type": "integer"}},
    "required": ["street", "number"],
    "additionalProperties": False,
}
SCHEMAS = [
    {"type": "object", "properties": {"to": ADDRESS, "from": ADDRESS}, "required": ["to"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
    {"enum": ["red", "green", 7, None, {"a": [1]}]},
    {"const": {"kind": "fixed", "values": [1, 2.5, "é"]}},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}( [0-9]+)?$"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": {"type": "string", "format": "uuid"}, "minItems": 1, "maxItems": 2},
    {"type": "integer", "minimum": -17, "maximum": 230},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 3.25},
    {"type": "integer", "multipleOf": 7, "minimum": 0},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, ADDRESS]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {
                "type": "object",
                "properties": {"k": {"const": "b"}, "n": {"type": "integer"}},
                "required": ["k", "n"],
            },
        ]
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "object", "properties": {"größe": {"enum": ["é", "€", "😀"]}}, "required": ["größe"]},
    {"type": "string", "maxLength": 30, "pattern": r"^(?:\S+\s+){0,5}\S+$"},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 12.5},
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,2}$": {"type": "null"}, "^[^a-z]": {"const": 0.1}},
        "additionalProperties": False,
    },
    {"type": "string", "pattern": r"\d[^\s\d]", "maxLength": 9},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": ["string", "null", "array"], "items": {"type": "boolean"}, "maxItems": 3},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_output_parses_and_keeps_its_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    constraint = compiler().compile(source("json_schema", schema))
    outputs = random_outputs(constraint, NUM_OUTPUTS, seed=len(str(schema)), weights=WEIGHTS)
    assert len(outputs) == NUM_OUTPUTS
    for output in outputs:
        validator.validate(json.loads(output.decode()))
        assert constraint.verifier.look(output) == Look(problem=None)


def test_outputs_have_no_white_space_unless_the_schema_asks_for_it():
    plain = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    spaced = plain | {"x-guidance": {"item_separator": ", "}}
    assert random_outputs(compiler().compile(source("json_schema", plain)), 1, 0) == [b"[1,1]"]
    assert random_outputs(compiler().compile(source("json_schema", spaced)), 1, 0) == [b"[1, 1]"]
