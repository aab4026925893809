"""`batchdecode profiles` and `batchdecode calibrate`, from their arguments to their output."""

import re

from process import batchdecode

from batcher.timing.profiles import shipped_profiles
from cli.commands.profiles import details_of, reports_of, table_of


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
    assert "~ estimated: 90% of the memory on the data sheet" in text
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
