"""Results at URLs: what a store has during a run, after it, and after one that was killed."""

import gzip
import json
import signal
import subprocess
import time

import pytest
from command_server import command_line
from examples import mostly_heavy
from process import ENVIRONMENT, ROOT, batchdecode, lines_of, workload

SHELF = {"COMMAND_SETUP": str(ROOT / "tests" / "shelf.py")}
REQUESTS = lines_of(*workload(40))
pytestmark = pytest.mark.timeout(300)  # each starts several commands


class Place:
    """A folder with requests, a store in it, and a machine that runs go to it from."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "store"
        self.store.mkdir()
        (folder / "requests.jsonl").write_bytes(REQUESTS)
        self.url = f"shelf://{self.store}/out.jsonl"
        self.faults, self.log = folder / "faults", folder / "log"
        self.machine("a")

    def machine(self, name):
        """Let the next runs be on another machine."""
        self.temporary = self.folder / name
        self.temporary.mkdir(exist_ok=True)

    def start(self, *arguments, output=None):
        environment = {
            **ENVIRONMENT,
            **SHELF,
            "TMPDIR": str(self.temporary),
            "SHELF_FAULTS": str(self.faults),
            "SHELF_LOG": str(self.log),
        }
        return subprocess.Popen(
            [
                *command_line(),
                *("run", "requests.jsonl", "-o", output or self.url, "-q"),
                *map(str, arguments),
            ],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments, output=None):
        process = self.start(*arguments, output=output)
        out, told = process.communicate(timeout=200)
        assert (out, "Traceback" in told, "hidden" in told) == ("", False, False), told
        return process.returncode, told

    def start_slowly(self, *arguments, delay=0.02):
        """Start a run that is not soon over, and wait until the store has some of its results."""
        process = self.start("-b", 2, "--step-delay", delay, *arguments)
        self.wait_for(lambda: len(self.parts()) > 1)
        return process

    def wait_for(self, condition):
        deadline = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_another_part(self, process):
        num_before = len(self.parts())
        self.wait_for(lambda: len(self.parts()) > num_before or process.poll() is not None)

    def names(self):
        return sorted(
            str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file()
        )

    def parts(self):
        return sorted(self.store.glob("out.jsonl.parts/*/*.jsonl"))

    def left_here(self):
        return [path for path in self.temporary.rglob("*") if path.is_file()]

    def puts(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def local_run(folder, *arguments):
    done = batchdecode("run", "requests.jsonl", "-o", "here.jsonl", "-q", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "here.jsonl").read_bytes()


WHOLE = ["out.jsonl", "out.jsonl.run.json", "out.jsonl.run.sums"]


@pytest.mark.parametrize(
    "more",
    mostly_heavy([[], ["--keep-order"], ["--workers", 1], ["--stream"], ["--resume"]], []),
)
def test_at_the_end_the_store_has_the_files_of_a_local_run(place, more):
    local_run(place.folder, *more)
    assert place.run(*more) == (0, "")
    here = [name.replace("out", "here") for name in place.names()]
    assert here == [path.name for path in sorted(place.folder.glob("here*"))]
    for name in place.names():
        local = place.folder / name.replace("out", "here")
        assert (place.store / name).read_bytes() == local.read_bytes()
    assert place.left_here() == []


def test_by_its_name_it_is_compressed(place):
    expected = local_run(place.folder)
    url = f"{place.url}.gz"
    assert place.run(output=url) == (0, "")
    assert gzip.decompress((place.store / "out.jsonl.gz").read_bytes()) == expected
    assert place.run("--resume", output=url) == (0, "")
    status, told = place.run(output=url)
    assert status == 2
    assert "holds the complete results of a run: --force replaces them" in told


def test_results_in_the_way_are_refused_before_a_model_is_loaded(place):
    (place.store / "out.jsonl").write_text("a list\n")
    status, told = place.run("--model", "nothing:at_all")
    assert status == 2
    assert f"{place.url} holds something that is not known to be results" in told
    assert place.names() == ["out.jsonl"]
    assert place.run("--force") == (0, "")
    before = {name: (place.store / name).read_bytes() for name in place.names()}
    status, told = place.run("--model", "nothing:at_all")
    assert "holds the complete results of a run" in told
    status, told = place.run("--resume", "--seed", 1)
    assert f"cannot resume {place.url}: --seed was not set, now it is 1." in told
    assert {name: (place.store / name).read_bytes() for name in place.names()} == before
    assert place.left_here() == []


def test_a_finished_run_that_goes_on_puts_nothing_again(place):
    place.run()
    place.log.unlink()
    assert place.run("--resume") == (0, "")
    assert "out.jsonl" not in place.puts()
    assert place.names() == WHOLE


@pytest.mark.parametrize("where", mostly_heavy(["here", "elsewhere"], "elsewhere"))
@pytest.mark.parametrize(
    "more", mostly_heavy([[], ["--keep-order"], ["--workers", 2]], [], ["--workers", 2])
)
def test_a_killed_run_goes_on_and_loses_nothing(place, more, where):
    if more[:1] == ["--workers"]:
        (place.folder / "requests.jsonl").write_bytes(lines_of(*workload(15_000)))
    expected = local_run(place.folder, "-b", 2, *more)
    resume = []
    for number in range(2):
        if "--workers" in more:
            process = place.start("-b", 2, *more, *resume)
            place.wait_for_another_part(process)
        else:
            process = place.start_slowly(*more, *resume)
        process.kill()
        process.communicate()
        kept = b"".join(path.read_bytes() for path in place.parts())
        assert kept.endswith(b"\n") or kept == b""
        assert set(kept.splitlines()) <= set(expected.splitlines()) or "--workers" in more
        if where == "elsewhere":
            place.machine(str(number))
        resume = ["--resume"]
    status, told = place.run("-b", 2, *more)
    assert status == 2
    assert "did not finish: add --resume to continue it" in told
    assert place.run("-b", 2, *more, "--resume") == (0, "")
    results = (place.store / "out.jsonl").read_bytes()
    if "--workers" in more:
        found, wanted = (map(of_tokens, text.splitlines()) for text in (results, expected))
        assert sorted(found) == sorted(wanted)
    elif "--keep-order" in more:
        assert results == expected
    else:
        assert sorted(results.splitlines()) == sorted(expected.splitlines())
    assert place.names() == WHOLE
    assert place.left_here() == []


def of_tokens(line):
    result = json.loads(line)
    return json.dumps({k: v for k, v in result.items() if k not in {"slot", "steps"}})


@pytest.mark.parametrize("number", mostly_heavy([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_saves_what_is_there_and_tells_how_to_go_on(place, number):
    expected = local_run(place.folder, "-b", 2)
    process = place.start_slowly()
    process.send_signal(number)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert f"results went to {place.url}.parts/" in told
    assert f"-o {place.url}" in told
    assert told.rstrip().endswith("--resume")
    assert place.left_here() == []
    num_there = b"".join(path.read_bytes() for path in place.parts()).count(b"\n")
    assert f" {num_there} results went" in told
    place.machine("b")
    assert place.run("-b", 2, "--resume") == (0, "")
    results = (place.store / "out.jsonl").read_bytes()
    assert sorted(results.splitlines()) == sorted(expected.splitlines())


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("denied", "Access Denied"),
        ("gone", "The specified bucket does not exist"),
        ("full", "No space left on device"),
        ("broken", "503 Service Unavailable at shelf://host/a"),
        ("torn", "bytes 0 have arrived"),
    ],
)
def test_a_store_that_takes_nothing_is_told_before_a_model_is_loaded(place, fault, why):
    place.faults.write_text(fault)
    status, told = place.run("--model", "nothing:at_all")
    assert status == 2
    assert told.startswith(f"error: cannot write {place.url}: ")
    assert why in told
    assert told.count("\n") == 1
    assert len(place.puts()) == (4 if fault in {"broken", "torn"} else 1)


@pytest.mark.parametrize(
    "fault", mostly_heavy(["denied", "gone", "full", "broken", "torn"], "denied", "torn")
)
def test_a_store_that_fails_on_the_way_ends_the_run_and_nothing_is_lost(place, fault):
    expected = local_run(place.folder, "-b", 2)
    process = place.start_slowly()
    place.faults.write_text(fault)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 1
    assert told.startswith(f"error: cannot write {place.url}: ")
    assert "hidden" not in told
    assert told.rstrip().endswith("--resume")
    (here,) = [path for path in place.left_here() if path.name == "results.jsonl"]
    assert f"results went to {here}" in told
    num_here = here.read_bytes().count(b"\n")
    status, _ = place.run("-b", 2, "--resume")
    assert status == 2
    assert here.read_bytes().count(b"\n") == num_here  # whatever that one could not do
    place.faults.unlink()
    place.log.unlink()
    process = place.start("-b", 2, "--resume")
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0
    results = (place.store / "out.jsonl").read_bytes()
    assert sorted(results.splitlines()) == sorted(expected.splitlines())
    assert place.names() == WHOLE
    assert place.left_here() == []


@pytest.mark.parametrize("fault", mostly_heavy(["broken 3", "torn 3"], "torn 3"))
def test_what_passes_is_tried_again(place, fault):
    expected = local_run(place.folder)
    place.faults.write_text(fault)
    assert place.run() == (0, "")
    assert (place.store / "out.jsonl").read_bytes() == expected
    assert place.names() == WHOLE


def test_a_store_that_hangs_is_left_by_two_signals(place):
    process = place.start_slowly()
    place.faults.write_text("hangs")
    num_puts = len(place.puts())
    place.wait_for(lambda: len(place.puts()) > num_puts)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"results went to {place.temporary}" in told
    assert told.rstrip().endswith("--resume")


def test_of_two_runs_the_later_one_goes_on(place):
    expected = local_run(place.folder, "-b", 2)
    first = place.start_slowly(delay=0.2)
    status, told = place.run("-b", 2, "--resume")
    assert (status, told) == (2, f"error: {place.url} is being written by another run\n")
    place.machine("b")
    while (ended := place.run("-b", 2, "--resume")) != (0, ""):
        assert "another run is writing it" in ended[1]  # it has added something in between
    _, told = first.communicate(timeout=200)
    assert first.returncode == 1
    assert f"cannot write {place.url}: " in told
    results = (place.store / "out.jsonl").read_bytes()
    assert sorted(results.splitlines()) == sorted(expected.splitlines())
    assert place.names() == WHOLE


def test_a_run_that_starts_over_leaves_nothing_of_the_one_before(place):
    for num_parts, more in ((5, []), (1, ["--force", "--seed", 1])):
        place.log.unlink(missing_ok=True)
        process = place.start_slowly(*more)
        place.wait_for(lambda wanted=num_parts: len(set(place.puts())) > 2 * wanted + 3)
        process.kill()
        process.communicate()
        place.machine("b")
    assert place.run("-b", 2, "--seed", 1, "--resume") == (0, "")
    results = (place.store / "out.jsonl").read_bytes()
    expected = local_run(place.folder, "-b", 2, "--seed", 1)
    assert sorted(results.splitlines()) == sorted(expected.splitlines())


def test_what_was_changed_in_the_store_is_found(place):
    process = place.start_slowly()
    process.kill()
    process.communicate()
    part = place.parts()[0]
    part.write_bytes(part.read_bytes().replace(b'"tokens":[', b'"tokens":[1,', 1))
    place.machine("b")
    status, told = place.run("-b", 2, "--resume")
    assert status == 2
    assert "it was changed, or put there; --resume=repair drops such lines" in told
    assert place.run("-b", 2, "--resume=repair") == (0, "")
    results = (place.store / "out.jsonl").read_bytes()
    assert sorted(results.splitlines()) == sorted(local_run(place.folder, "-b", 2).splitlines())


def test_a_missing_part_is_told(place):
    process = place.start_slowly()
    process.kill()
    process.communicate()
    place.parts()[0].unlink()
    place.machine("b")
    status, told = place.run("-b", 2, "--resume")
    assert status == 2
    assert "parts/0/00000.jsonl is missing" in told


def test_other_files_of_a_run_are_put_when_they_are_whole(place):
    files = {"--trace": "t.jsonl.gz", "--summary-json": "s.json", "--report": "r.html"}
    files |= {"--timeseries": "c.csv"}
    local = [word for option, name in files.items() for word in (option, name)]
    local_run(place.folder, *local)
    there = [w for option, name in files.items() for w in (option, f"shelf://{place.store}/{name}")]
    assert place.run(*there) == (0, "")
    for name in files.values():
        held = (place.store / name).read_bytes(), (place.folder / name).read_bytes()
        unpacked = [gzip.decompress(one) for one in held] if name.endswith(".gz") else held
        assert unpacked[0] == unpacked[1]
    (place.store / "s.json").write_text("{}")
    status, told = place.run("--force", *there[:2])
    assert status == 0
    status, told = place.run("--resume", *there[2:4])
    assert status == 2
    assert "s.json: the file holds something that would be lost: --force overwrites it" in told


def test_a_file_that_cannot_be_put_is_an_error_and_the_results_are_there(place):
    url = f"shelf://{place.store}/trace.jsonl"
    place.faults.write_text("denied@trace.jsonl")
    status, told = place.run("--trace", f"{url}?signature=hidden")
    assert status == 1
    assert told.startswith(f"error: cannot write {url}: Access Denied; ")
    assert f"results went to {place.url}.parts/" in told
    assert "trace.jsonl?***' -q --resume" in told or "trace.jsonl?***' --resume" in told
    assert place.run("--resume") == (0, "")
    assert (place.store / "out.jsonl").read_bytes() == local_run(place.folder)


@pytest.mark.parametrize(
    ("option", "url", "why"),
    [
        ("-o", "https://host/a", "such a server takes no files"),
        ("-o", "shelf://{}/", "it is a folder"),
        ("-o", "simplecache::shelf://{}/a", "what is written goes to one store"),
        ("--metrics-file", "shelf://{}/a", "it is for the node exporter of this machine"),
        ("--trace", "shelf://{}/out.jsonl", "they must be different files"),
        ("--trace", "shelf://{}/out.jsonl.run.json", "they must be different files"),
    ],
)
def test_what_no_url_can_be(place, option, url, why):
    status, told = place.run(option, url.format(place.store))
    assert (status, told.count("\n")) == (2, 1)
    assert why in told
    assert place.names() == []


def test_the_input_is_no_output(place):
    (place.store / "out.jsonl").write_bytes(REQUESTS)
    process = subprocess.run(
        [*command_line(), "run", place.url, "-o", place.url],
        capture_output=True,
        env=ENVIRONMENT | SHELF,
        check=False,
    )
    assert process.returncode == 2
    assert b"is the input too: they must be different files" in process.stderr
