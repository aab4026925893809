"""`batchdecode profiles` and `batchdecode calibrate`, from their arguments to their output."""

import json
import re

import pytest
import yaml
from process import ROOT, batchdecode

from batcher.timing.profiles import shipped_profiles
from cli.commands.profiles import details_of, reports_of, table_of

SAMPLES = ROOT / "samples" / "timing"


def test_profiles_lists_all_with_terms_error_source_room_and_verdict():
    done = batchdecode("profiles")
    text = done.stdout.decode()
    assert done.returncode == 0
    for name, profile in shipped_profiles().items():
        assert name in text
        assert profile.error in text
        assert profile.source in text
        is_measured = profile.error.startswith("replay: TTFT mean ")
        assert is_measured == ("replayed: a run of" in profile.source)
        assert is_measured != profile.error.startswith("not replayed; MAPE of the fit: ")
        assert ("states its KV tokens" in profile.source) == (profile.kv_tokens is not None)
    assert " 41,408\n" in text
    assert text.count(" ~") == 15, "no engine has reported these"
    assert "~ no engine has reported it: 90 % of the memory on the data sheet" in text
    assert "possible" in text
    assert "too fast" not in text


def test_profiles_are_as_wide_as_the_terminal_and_tell_the_same():
    def words_of(text):
        return {word for word in re.split(r"[\s;]+", text) if re.search("[a-z]|~", word)}

    reports = reports_of(None)
    narrow, wide = table_of(reports, 80), table_of(reports)
    assert max(map(len, narrow.splitlines())) <= 80
    assert words_of(wide) - words_of(narrow) == set()
    for name in ("rtx4090_llama3.1-8b", "roofline:llama-3.1-8b:h100-sxm", "constant:0.02"):
        (report,) = reports_of(name)
        told = details_of(report, 80)
        assert max(map(len, told.splitlines())) <= 80
        assert told.split() == details_of(report).split()


def test_profiles_say_what_beats_hardware_and_times_by_tokens():
    text = batchdecode("profiles", SAMPLES / "profiles.yaml").stdout.decode()
    assert "our-gpu   unchecked" in text
    assert "too-good  too fast" in text
    assert "too-good is faster than its hardware: prefill 2,048: 1.27 times as fast as" in text
    text = batchdecode("profiles", "rtx4090_llama3.1-8b").stdout.decode()
    assert "\n  by_tokens 15: 15.73  20: 16.73  64: 17.37  176: 20.87" in text
    listed = batchdecode("profiles").stdout.decode()
    assert "*88.12   8.456" in listed
    assert (
        "\n* for each token beyond its by_tokens, which batchdecode profiles NAME shows" in listed
    )
    (report,) = json.loads(batchdecode("profiles", "rtx4090_llama3.1-8b", "--json").stdout)
    assert report["settings"]["by_tokens"][:2] == [[15, 15.73], [20, 16.73]]
    assert (report["kv_tokens"], report["physics"]["verdict"]) == (41408, "possible")


def test_calibrate_writes_a_profile_that_can_be_used(tmp_path):
    flags = ["--hardware", "rtx-4090", "--model", "llama-3.1-8b", "--name", "mine"]
    done = batchdecode("calibrate", SAMPLES / "steps.jsonl", *flags, "-o", "p.yaml", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == b""
    assert "MAPE 2." in done.stderr
    assert "physics   possible" in done.stderr
    profile = yaml.safe_load((tmp_path / "p.yaml").read_text())["mine"]
    assert profile["t0"] == pytest.approx(9.159, rel=0.1)
    assert "MAPE 2." in profile["error"]
    shown = batchdecode("profiles", "p.yaml", cwd=tmp_path).stdout.decode()
    assert "physics   possible" in shown
