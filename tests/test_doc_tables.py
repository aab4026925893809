"""The tables in docs/ that are made of those in the code are up to date, and leave out nothing."""

import pytest
from doc_tables import PAGES, TABLE, renewed

from batcher.request import REQUEST_FIELDS
from batcher.settings import SETTINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_code(page):
    assert page.read_text() == renewed(page.read_text()), "run `python tests/doc_tables.py`"


def test_every_field_and_every_setting_is_in_one_table():
    tables = "".join(match[4] for page in PAGES for match in TABLE.finditer(page.read_text()))
    for name in REQUEST_FIELDS:
        assert sum(line.startswith(f"| `{name}` | ") for line in tables.splitlines()) >= 1, name
    for setting in SETTINGS.values():
        assert f"\n| `{setting.option}` {setting.metavar} | " in tables
