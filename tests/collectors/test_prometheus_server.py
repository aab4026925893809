"""Prometheus itself scrapes a run: it counts as the summary does, and each panel has data.

It needs `apt install prometheus`.
"""

import json
import shutil
import subprocess
import urllib.parse
from contextlib import closing
from urllib.request import urlopen

import pytest
from runs import LIMITS, ROOT, free_port, requests, start, wait_for

from batcher.metrics.prometheus import COUNTS, GAUGES, SPREADS

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
DASHBOARD = json.loads((ROOT / "samples/grafana/batchdecode.json").read_text())
CONFIGURATION = """
scrape_configs:
  - job_name: batchdecode
    scrape_interval: 200ms
    scrape_timeout: 200ms
    static_configs:
      - targets: ["{}"]
"""

if PROMETHEUS is None:
    pytest.skip("prometheus is not installed", allow_module_level=True)


class Server:
    """A Prometheus that scrapes one target, and what it has found there."""

    def __init__(self, folder, target):
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(target))
        self._port = free_port()
        self._process = subprocess.Popen(
            [
                *(PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
                *(f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=error"),
            ],
            cwd=folder,
        )

    def ask(self, expression):
        """Return the value of `expression` now, by the labels of its series."""
        query = urllib.parse.urlencode({"query": expression})
        with urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{query}") as answer:
            said = json.load(answer)
        assert said["status"] == "success"
        return {
            tuple(sorted(series["metric"].items())): float(series["value"][1])
            for series in said["data"]["result"]
        }

    def total(self, expression):
        try:
            return sum(self.ask(expression).values())
        except OSError:
            return None

    def close(self):
        self._process.terminate()
        self._process.wait(20)


# Until it is known that nothing arrives before it, which the end of the pipe tells, the run waits.
LAST = b'{"id": "last", "prompt": [9], "arrival_time": 1e6}\n'
OPTIONS = (*LIMITS, "--draft", "ngram")


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = start(folder, *OPTIONS)
    _, said = run.communicate(requests(30))
    assert run.returncode == 0, said
    return json.loads((folder / "summary").read_text())


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, summary):
    folder = tmp_path_factory.mktemp("run")
    with start(folder, *OPTIONS, "--metrics-port", "0", "--metrics-file", "m.prom") as run:
        url = run.stderr.readline().decode().removeprefix("metrics at ").strip()
        with closing(Server(folder, urllib.parse.urlsplit(url).netloc)) as server:
            wait_for(lambda: server.total("up"))
            run.stdin.write(requests(30) + LAST)
            run.stdin.flush()
            wait_for(lambda: server.total("vllm:request_success_total") == summary["outputs"])
            num_scrapes = server.total("count_over_time(up[1h])")
            wait_for(lambda: server.total("count_over_time(up[1h])") > num_scrapes + 2)
            yield server, folder / "m.prom"
            _, said = run.communicate()
            assert run.returncode == 0, said


def test_prometheus_has_each_metric(scraped):
    server, _ = scraped
    names = {*GAUGES, *(f"{name}_total" for name in COUNTS)}
    names |= {f"{name}_{of}" for name in SPREADS for of in ("bucket", "sum", "count")}
    names.discard("batchdecode_dropped_samples_total")  # of `best_of`
    assert [name for name in sorted(names) if not server.ask(name)] == []


def expressions():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")


@pytest.mark.parametrize("expression", [*expressions()])
def test_a_panel_has_data(scraped, expression):
    server, _ = scraped
    for name, value in {
        "$__rate_interval": "1m",
        "$job": "batchdecode",
        "$model_name": ".*",
    }.items():
        expression = expression.replace(name, value)
    assert server.ask(expression)


def test_promtool_reads_the_file(scraped):
    """A file that it cannot read has another status than names that it would not have chosen."""
    _, path = scraped
    wait_for(path.exists)
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=path.read_bytes(), capture_output=True, check=False
    )
    assert done.returncode in (0, 3), done.stderr
