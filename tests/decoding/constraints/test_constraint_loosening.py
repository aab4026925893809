"""What the grammar cannot enforce of a schema is named, and left to the check of whole outputs."""

import itertools
import json

import jsonschema
import pytest
from constrained import compiler, language, source

from batcher import Engine, Request, decode
from batcher.errors import GrammarError

NOT_A_STRING = {"not": {"type": "string"}}
STRING = {"type": "string"}
DRAFT_7 = {"$schema": "https://json-schema.org/draft-07/schema"}

# Every JSON value of the least size over these, in the order that masks follow.
LEAVES = [None, True, 0, 1, 2, 10, 2.5, "", "a", "bb", "0"]
VALUES = [
    *LEAVES,
    *([*items] for size in (0, 1, 2, 3) for items in itertools.product([0, "a"], repeat=size)),
    *({"a": a} for a in LEAVES),
    *({"a": a, "b": b} for a in LEAVES for b in (1, "a")),
    *({"b": 1}, {"c": 1}, {}, {"next": {"a": 1}}, {"next": {"b": 1}}, {"next": 3}),
]

LOOSENED = [
    # schema, the keywords that only the check enforces
    (NOT_A_STRING, ["not"]),
    ({"items": NOT_A_STRING}, ["not"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 3}, ["uniqueItems"]),
    ({"contains": {"const": 0}, "minContains": 2, "type": "array"}, ["contains", "minContains"]),
    ({"oneOf": [STRING, {"minLength": 2}]}, ["oneOf"]),
    ({"anyOf": [{"type": "null"}, {"oneOf": [{"minimum": 1}, {"maximum": 1}]}]}, ["oneOf"]),
    ({"propertyNames": {"pattern": "^a"}, "type": "object"}, ["propertyNames"]),
    ({"if": STRING, "then": {"minLength": 1}, "else": {"type": "null"}}, ["else", "if", "then"]),
    ({"dependentRequired": {"a": ["b"]}, "type": "object"}, ["dependentRequired"]),
    (DRAFT_7 | {"dependencies": {"a": ["b"]}, "type": "object"}, ["dependencies"]),
    ({"dependencies": {"a": {"required": ["b"]}}, "type": "object"}, ["dependencies"]),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, ["unevaluatedProp"]),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 2, "type": "object"}, ["minProperties"]),
    ({"allOf": [{"properties": {"a": {}}}], "minProperties": 1, "type": "object"}, ["minProp"]),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False,
      "type": "object"}, ["minProperties"]),
    ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "type": "object"}, ["maxProperties"]),
    ({"type": "object", "patternProperties": {"a|b": {"type": "integer"}, "a": {"minimum": 1}},
      "additionalProperties": False}, ["additionalProperties", "patternProperties"]),
    ({"type": "string", "pattern": "(^a|b$)b?$"}, ["pattern"]),
    ({"type": "string", "pattern": "^(?!0)"}, ["pattern"]),
    ({"type": "string", "pattern": r"\bb"}, ["pattern"]),
    ({"type": "object", "patternProperties": {"^(?!a$)": {"type": "null"}}}, ["patternProp"]),
    ({"type": "number", "multipleOf": 5e-20}, ["multipleOf"]),
    ({"type": "integer", "multipleOf": 10_000_000_000}, ["multipleOf"]),
    ({"type": "integer", "maximum": 2**53 + 1}, ["maximum"]),
    ({"type": "integer", "minimum": -(10**400)}, ["minimum"]),
    ({"type": "number", "maximum": 1.7976931348623157e308, "minimum": 1}, ["maximum"]),
    ({"minimum": 2**53 + 1, "maximum": 1e19}, ["maximum", "minimum"]),
    # nothing is loosened in these
    ({"minItems": 2.0, "maxItems": 2.0, "type": "array"}, []),
    ({"minLength": 2.0, "format": "nope"}, []),
    ({"maxLength": 10**12, "maxItems": 1e20, "maxProperties": 2**63}, []),
    ({"type": "string", "minLength": 2**32}, []),
    ({"enum": [1.0, 10, "a"]}, []),
    ({"type": "array", "uniqueItems": False}, []),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, []),
    ({"type": ["integer", "null"], "minimum": -9.223372036854776e18}, []),
    ({"type": "integer", "exclusiveMaximum": 9223372036854776000}, []),
    (DRAFT_7 | {"type": "integer"}, []),
    ({"$schema": "https://example.org/my-own", "type": "integer"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "unenforced"), LOOSENED, ids=str)
def test_every_value_of_a_schema_is_one_of_the_loosened_and_the_check_tells_them_apart(
    schema, unenforced
):
    constraint = compiler().compile(source("json_schema", schema))
    names = " ".join(constraint.unenforced)
    assert len(constraint.unenforced) == len(unenforced)
    assert all(name in names for name in unenforced)
    is_whole = language("json_schema", schema)
    told_apart = False
    is_draft_7 = "draft-07" in str(schema) or "dependencies" in schema
    kind = jsonschema.Draft7Validator if is_draft_7 else jsonschema.Draft202012Validator
    for value in VALUES:
        output = json.dumps(value, separators=(",", ":")).encode()
        look = constraint.verifier.look(output)
        expected = kind(schema).is_valid(value)
        assert look.is_decided == ("my-own" not in str(schema))
        assert (look.problem is None) == expected or not look.is_decided
        assert is_whole(output) or not expected
        told_apart |= is_whole(output) and not expected
    assert unenforced or not told_apart


@pytest.mark.parametrize(
    ("schema", "path", "keywords"),
    [
        (NOT_A_STRING, (), "not"),
        ({"properties": {"a": {"items": NOT_A_STRING}, "b": NOT_A_STRING}},
         ("properties", "a", "items"), "not"),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True, "contains": {}}]},
         ("anyOf", 1), "contains, uniqueItems"),
        ({"oneOf": [STRING, {"minLength": 3}]}, (), "oneOf"),
        ({"properties": {"n": {"type": "integer", "maximum": 2**64 - 1}}},
         ("properties", "n"), "maximum"),
    ],
)  # fmt: skip
def test_strict_constraints_refuse_what_is_not_enforced_while_decoding(schema, path, keywords):
    with pytest.raises(GrammarError) as caught:
        compiler(is_strict=True).compile(source("json_schema", schema))
    assert caught.value.path == ("json_schema", *path)
    assert str(caught.value).startswith(f"not enforced while decoding: {keywords}; --strict-con")
    compiler(is_strict=True).compile(source("json_schema", {"oneOf": [STRING, {"type": "null"}]}))


def test_an_engine_is_as_strict_and_as_patient_as_it_is_told():
    engine = Engine("simulated", strict_constraints=True, grammar_timeout=0.1)
    for schema, said in ((NOT_A_STRING, "not enforced"), ({"multipleOf": 99_998}, "more than 0.1")):
        with pytest.raises(GrammarError, match=said):
            engine.capabilities.check_constraint("json_schema", schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": 2**53 + 1}, ("const",)),
        ({"const": -(2**63)}, ("const",)),
        ({"const": 1e19}, ("const",)),
        ({"const": {"id": [10**400]}}, ("const", "id", 0)),
        ({"properties": {"id": {"enum": [7, 1098765432109876543]}}},
         ("properties", "id", "enum", 1)),
        ({"type": "integer", "minimum": 10**19, "maximum": 2**64 - 1}, ("minimum",)),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, ("exclusiveMaximum",)),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, ("minimum",)),
    ],
    ids=str,
)  # fmt: skip
def test_an_integer_that_could_only_be_come_near_to_is_refused(schema, path):
    with pytest.raises(GrammarError, match=r"cannot be exact: an integer beyond 2\^53") as caught:
        compiler().compile(source("json_schema", schema))
    assert caught.value.path == ("json_schema", *path)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, -(2**62), 2**63 - 1, 2**63 - 1024])
def test_a_big_integer_is_the_only_output_where_it_can_be_exact(number):
    for schema in ({"const": number}, {"type": "integer", "enum": [number]}):
        is_whole = language("json_schema", schema)
        assert [n for n in range(number - 3, number + 4) if is_whole(str(n).encode())] == [number]


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"minimum": -(2**63)}, [-(2**63) + 1024, -5, 2**70], [-(2**63) - 1, -(10**19)]),
        ({"maximum": 2**63 - 1}, [2**63 - 1, -(10**30)], [2**63, 10**19]),
        ({"exclusiveMaximum": 2**63}, [2**63 - 1], [2**63, 10**19]),
        ({"exclusiveMinimum": -(2**63) - 1, "minimum": 3}, [3, 2**70], [2, -(2**63) + 2048]),
        ({"minimum": -(2**60), "maximum": 2**60}, [-(2**60), 2**60], [-(2**60) - 1, 2**60 + 1]),
    ],
    ids=str,
)
def test_bounds_of_int64_are_kept_while_decoding(schema, inside, outside):
    is_whole = language("json_schema", {"type": "integer"} | schema)
    assert all(is_whole(str(number).encode()) for number in inside)
    assert not any(is_whole(str(number).encode()) for number in outside)


@pytest.mark.parametrize(
    ("schema", "path", "what"),
    [
        ({"not": {"pattern": "[a"}}, ("not",), r"the pattern '\[a'"),
        ({"not": {}, "patternProperties": {"a++": {}}}, (), "the pattern"),
        ({"$schema": "https://example.org/my-own", "not": {}}, ("$schema",), "a schema of the dia"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False},
         ("unevaluatedProperties",), "`unevaluatedProperties` with patternProperties"),
    ],
    ids=str,
)  # fmt: skip
def test_what_could_neither_be_enforced_nor_checked_is_refused(schema, path, what):
    with pytest.raises(
        GrammarError, match=f"{what}.* cannot be checked, so .* cannot be enforced"
    ) as caught:
        compiler().compile(source("json_schema", schema))
    assert caught.value.path == ("json_schema", *path)


def results_of(schema, **fields):
    return decode([Request(prompt="It is", json_schema=schema, temperature=1.0, **fields)])


def test_a_result_says_what_only_the_check_enforced_and_never_calls_a_broken_one_complete():
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}
    results = results_of(schema | {"maxItems": 2}, n=40, max_tokens=40)
    for result in results:
        if len(set(json.loads(result.text))) == 2:
            assert (result.finish_reason, result.constraint) == ("stop", "complete")
            assert result.constraint_verified == ("uniqueItems",)
            assert result.constraint_check is result.error is None
        else:
            assert (result.finish_reason, result.constraint) == ("error", "incomplete")
            assert result.constraint_verified is None
            assert result.error.code == "constraint-error"
            assert "`$` violates `uniqueItems` of the schema" in result.error.message
    assert {result.finish_reason for result in results} == {"stop", "error"}
    [cut] = results_of(schema, max_tokens=1)
    assert (cut.constraint, cut.constraint_verified) == ("incomplete", None)
