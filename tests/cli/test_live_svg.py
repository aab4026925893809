"""The picture that the README opens with is what the live view draws."""

import pytest
from live_svg import PICTURE, picture


@pytest.mark.heavy
def test_the_picture_of_the_live_view_is_what_it_draws():
    assert PICTURE.read_text() == picture(), "run tests/cli/live_svg.py, and look at the file"
