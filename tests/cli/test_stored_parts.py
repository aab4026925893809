"""Parts of results in a store: whatever breaks off, what is there is whole lines, once."""

import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.run.files import record_path, rest_path
from cli.run.parts import Parts
from cli.run.sums import sums_path
from cli.run.urls import Store, StoreError


class Crash(BaseException):
    """The machine is lost."""


class Shaky:
    """A store in memory that lets the machine be lost after `num_left` changes of it."""

    name, path = "memory://out", "/out"

    def __init__(self):
        self.held, self.num_left = {}, None

    def _change(self):
        if self.num_left == 0:
            raise Crash
        if self.num_left is not None:
            self.num_left -= 1

    def sizes(self, folder):
        start = f"{folder}/"
        return {p[len(start) :]: len(b) for p, b in self.held.items() if p.startswith(start)}

    def read(self, path, num_bytes):
        if path not in self.held:
            raise StoreError("gone") from FileNotFoundError()
        return self.held[path][:num_bytes]

    def get(self, path, file):
        file.write(self.held[path])
        file.flush()
        file.seek(0)

    def put(self, path, file):
        self._change()
        file.seek(0)
        self.held[path] = file.read()

    def write(self, path, content):
        self._change()
        self.held[path] = content

    def remove(self, paths):
        for path in paths:
            self._change()
            self.held.pop(path, None)

    def remove_folder(self, path):
        pass


class Machine:
    """The files of a run on a machine, and the parts of them in a store."""

    def __init__(self, store, folder):
        self.output = str(Path(folder) / uuid4().hex)
        self.parts = Parts(store)
        self.parts.look()
        for path in (self.output, sums_path(self.output)):
            Path(path).touch()
        if self.parts.is_there:
            Path(record_path(self.output)).write_bytes(self.parts.read_record())
            self.parts.fetch(self.output)

    def content(self):
        paths = record_path(self.output), self.output, rest_path(self.output)
        return tuple(Path(p).read_bytes() if Path(p).exists() else None for p in paths)

    def write(self, record, results, rest):
        Path(record_path(self.output)).write_bytes(record)
        Path(self.output).write_bytes(results)
        Path(sums_path(self.output)).write_bytes(b"s" * results.count(b"\n"))
        Path(rest_path(self.output)).unlink(missing_ok=True)
        if rest is not None:
            Path(rest_path(self.output)).write_bytes(rest)

    def append(self, text):
        with Path(sums_path(self.output)).open("ab") as sums:
            sums.write(b"s" * text.count(b"\n"))
        with Path(self.output).open("ab") as results:
            results.write(text)


LINES = st.lists(st.sampled_from([b"a\n", b"bb\n", b"\n", b"c" * 9 + b"\n"]), max_size=4)
TEXT = LINES.map(b"".join)
WRITING = st.tuples(st.just("write"), TEXT, st.none() | TEXT)
APPENDING = st.tuples(st.just("append"), TEXT, st.booleans())
MOVING = st.tuples(st.just("move"), st.just(None), st.just(None))
ACTIONS = st.lists(WRITING | APPENDING | MOVING, min_size=1, max_size=8)


@given(actions=ACTIONS, num_left=st.integers(0, 30))
def test_what_is_there_is_what_was_saved_last_or_what_was_being_saved(actions, num_left):
    store = Shaky()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(store, folder)
        machine.write(b"0", b"", None)
        machine.parts.claim()
        machine.parts.begin_anew(machine.output)
        saved = machine.content()
        store.num_left = num_left
        wanted = saved
        try:
            for number, (kind, text, more) in enumerate(actions, start=1):
                if kind == "move":
                    machine = Machine(store, folder)
                    assert machine.content() == saved
                    machine.parts.claim()
                    continue
                if kind == "write":
                    machine.write(str(number).encode(), text, more)
                    wanted = machine.content()
                    machine.parts.begin_anew(machine.output)
                else:
                    machine.append(text)
                    wanted = machine.content()
                    torn = b"torn" if more else b""
                    with Path(machine.output).open("ab") as file:
                        file.write(torn)
                    machine.parts.add(machine.output)
                    with Path(machine.output).open("r+b") as file:
                        file.truncate(len(wanted[1]))
                saved = wanted
        except Crash:
            pass
        store.num_left = None
        found = Machine(store, folder)
        assert found.content() in (saved, wanted)
        num_sums = Path(sums_path(found.output)).stat().st_size
        assert num_sums == found.content()[1].count(b"\n")
        found.parts.remove()
        assert not store.held


def test_a_machine_that_is_overtaken_writes_nothing_more(tmp_path):
    store = Shaky()
    first = Machine(store, tmp_path)
    first.write(b"0", b"a\n", None)
    first.parts.claim()
    first.parts.begin_anew(first.output)
    second = Machine(store, tmp_path)
    second.parts.claim()
    held = dict(store.held)
    first.append(b"b\n")
    with pytest.raises(StoreError, match="another run goes on with it"):
        first.parts.add(first.output)
    assert store.held == held
    second.append(b"c\n")
    second.parts.add(second.output)
    assert Machine(store, tmp_path).content()[1] == b"a\nc\n"


def test_a_machine_that_was_overtaken_before_it_began_does_not_begin(tmp_path):
    store = Shaky()
    first, second = Machine(store, tmp_path), Machine(store, tmp_path)
    first.write(b"0", b"a\n", None)
    first.parts.claim()
    first.parts.begin_anew(first.output)
    with pytest.raises(StoreError, match="another run is writing it"):
        second.parts.claim()


def test_a_store_of_fsspec_does_all_of_it(tmp_path):
    store = Store(f"memory://{uuid4().hex}/out.jsonl")
    assert store.size(store.path) is None
    assert store.sizes(f"{store.path}.parts") == {}
    machine = Machine(store, tmp_path)
    machine.write(b"0", b"a\nb\n", b"r\n")
    machine.parts.try_writing()
    machine.parts.claim()
    machine.parts.begin_anew(machine.output)
    machine.append(b"c\n")
    machine.parts.add(machine.output)
    again = Machine(store, tmp_path)
    assert again.content() == (b"0", b"a\nb\nc\n", b"r\n")
    again.write(b"1", b"b\n", None)
    again.parts.claim()
    again.parts.begin_anew(again.output)
    assert Machine(store, tmp_path).content() == (b"1", b"b\n", None)
    assert store.sizes(f"{store.path}.parts").keys() == {
        "starting",
        "writer",
        *(f"1/{name}" for name in ("00000.jsonl", "00000.sums", "run.json")),
    }
    again.parts.remove()
    assert store.sizes(f"{store.path}.parts") == {}
    with Path(again.output).open("rb") as file:
        store.put(store.path, file)
    assert (store.size(store.path), store.read(store.path, 1)) == (2, b"b")
    with pytest.raises(StoreError, match="it is a folder"):
        store.size(store.path.rpartition("/")[0])
