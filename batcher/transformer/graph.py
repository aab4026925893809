"""Operations of a model, computed by ONNX Runtime.

A graph records operations in order. Consecutive operators become one session; a function of this
process between them, such as attention over paged keys and values, ends it.

Rows must not depend on their neighbours. Products with constant weights add the terms of a row in
one order, however many rows there are; see `Program.least_rows` for processors where they do not.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batcher.processes import num_threads

Array = NDArray[Any]
Value = str
"""The name of an array [rows, ...] in a graph."""

_DOMAINS = dict.fromkeys(
    ("FusedMatMul", "MatMulNBits", "QuickGelu", "RotaryEmbedding"), "com.microsoft"
)
_OPSETS = {"": 21, "com.microsoft": 1}
_IR_VERSION = 10
_ERRORS = 3  # the least severity that is logged
_MAX_INLINE = 127  # bytes: shapes and axes are read when a session is made, so not from outside


class _Operator(NamedTuple):
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]


class _Call(NamedTuple):
    function: Callable[..., Array]
    inputs: tuple[Value, ...]
    output: Value


class Graph:
    """Operations, in the order of their computation."""

    def __init__(self) -> None:
        self._parts: list[list[_Operator] | _Call] = []
        self._constants: dict[Value, Callable[[], Array]] = {}
        self._num_values = 0

    @property
    def num_parts(self) -> int:
        """The number of sessions and functions so far."""
        return len(self._parts)

    def constant(self, numbers: Any) -> Value:
        return self.weight(lambda: np.asarray(numbers))

    def weight(self, read: Callable[[], Array]) -> Value:
        """Return a constant that is read when its session is made, and then released."""
        value = self._new()
        self._constants[value] = read
        return value

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> Value:
        """Record an operator of ONNX, or of ONNX Runtime, with one output."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, num_outputs: int, /, *inputs: Value, **attributes: Any) -> list[Value]:
        """Record an operator with several outputs."""
        outputs = [self._new() for _ in range(num_outputs)]
        if not self._parts or isinstance(self._parts[-1], _Call):
            self._parts.append([])
        part = self._parts[-1]
        if isinstance(part, list):
            part.append(_Operator(kind, inputs, tuple(outputs), attributes))
        return outputs

    def call(self, function: Callable[..., Array], *inputs: Value) -> Value:
        """Record a function of the context of a run and the arrays of `inputs`."""
        output = self._new()
        self._parts.append(_Call(function, inputs, output))
        return output

    def compiled(self, output: Value, integers: tuple[Value, ...] = ()) -> "Program":
        """Return the program that computes `output`.

        integers: inputs that are not float32 but int64.
        """
        needed, steps = {output}, list[_Step]()
        while self._parts:
            part = self._parts.pop()
            if isinstance(part, list):
                made = {value for operator in part for value in operator.outputs}
                used = {value for operator in part for value in operator.inputs}
                own = {value: self._constants.pop(value) for value in used & {*self._constants}}
                inputs = tuple(sorted(used - made - own.keys()))
                outputs = tuple(sorted(made & needed))
                compute: _Session | _Call = _Session(part, own, inputs, outputs, integers)
            else:
                inputs, compute = part.inputs, part
            steps.append(_Step(compute, tuple({*inputs} - needed)))
            needed |= {*inputs}
        return Program(steps[::-1], output)

    def _new(self) -> Value:
        self._num_values += 1
        return f"v{self._num_values}"


class _Session:
    """Consecutive operators as a session of ONNX Runtime."""

    def __init__(
        self,
        operators: Sequence[_Operator],
        constants: dict[Value, Callable[[], Array]],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        integers: tuple[Value, ...],
    ) -> None:
        import onnxruntime  # noqa: PLC0415 - an extra
        from onnx import TensorProto, helper  # noqa: PLC0415 - as above

        self.inputs, self.outputs = inputs, outputs
        weights, external = [], {}
        for name, read in constants.items():
            array = np.ascontiguousarray(read())
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            weight = TensorProto(name=name, data_type=kind, dims=array.shape)
            if array.nbytes <= _MAX_INLINE:
                weight.raw_data = array.tobytes()
            else:
                weight.data_location = TensorProto.EXTERNAL
                weight.external_data.add(key="location", value="memory")
                external[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            weights.append(weight)
        taken, given = (
            [
                helper.make_tensor_value_info(
                    value, TensorProto.INT64 if value in integers else TensorProto.FLOAT, None
                )
                for value in values
            ]
            for values in (inputs, outputs)
        )
        nodes = [
            helper.make_node(
                operator.kind,
                operator.inputs,
                operator.outputs,
                domain=_DOMAINS.get(operator.kind, ""),
                **operator.attributes,
            )
            for operator in operators
        ]
        model = helper.make_model(
            helper.make_graph(nodes, "part", taken, given, weights),
            opset_imports=[helper.make_opsetid(*opset) for opset in _OPSETS.items()],
            ir_version=_IR_VERSION,
        )
        share_threads()
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = _ERRORS
        options.add_external_initializers([*external], [*external.values()])
        self._run = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run

    def __call__(self, arrays: list[Array], least_rows: int | None) -> list[Array]:
        num_rows = len(arrays[0])
        if least_rows is None:
            rows = [
                self._run(self.outputs, self._named([array[row : row + 1] for array in arrays]))
                for row in range(num_rows)
            ]
            return [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        if num_rows < least_rows:
            missing = least_rows - num_rows
            arrays = [
                np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
                for array in arrays
            ]
        found = self._run(self.outputs, self._named(arrays))
        return [array[:num_rows] for array in found]

    def _named(self, arrays: Sequence[Array]) -> dict[Value, Array]:
        return dict(zip(self.inputs, arrays, strict=True))


@cache
def share_threads() -> None:
    """Make one pool of threads for all sessions.

    With a pool for each, threads that wait for work would take the processors of others.
    """
    import onnxruntime  # noqa: PLC0415 - an extra

    with suppress(onnxruntime.capi.onnxruntime_pybind11_state.Fail):  # a caller has made one
        onnxruntime.set_global_thread_pool_sizes(num_threads(), 1)


class _Step(NamedTuple):
    """A session or a function, and the values that nothing needs after it."""

    compute: _Session | _Call
    dead: tuple[Value, ...]


class Program:
    """Sessions and functions, in order.

    least_rows: sessions compute at least as many rows, padded with zeros; None: each row alone.
    """

    least_rows: int | None = 1

    def __init__(self, steps: list[_Step], output: Value) -> None:
        self._steps, self._output = steps, output

    def __call__(self, context: Any, **values: Array) -> Array:
        """Return the output; `context` is passed to the functions."""
        return self.run(context, values)[self._output]

    def run(
        self, context: Any, values: dict[Value, Array], num_steps: int | None = None
    ) -> dict[Value, Array]:
        """Compute all steps, or the first few of them; return the values that remain."""
        for compute, dead in self._steps[:num_steps]:
            arrays = [values[value] for value in compute.inputs]
            if isinstance(compute, _Call):
                values[compute.output] = compute.function(context, *arrays)
            else:
                values |= zip(compute.outputs, compute(arrays, self.least_rows), strict=True)
            for value in dead:
                del values[value]
        return values
