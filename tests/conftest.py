"""Random tests draw new examples at every desk; in continuous integration they draw the same."""

import os

from examples import PART, USUAL
from hypothesis import settings

is_same = "CI" in os.environ
settings.register_profile("quick", max_examples=USUAL // PART, deadline=None, derandomize=is_same)
settings.register_profile("thorough", max_examples=USUAL, deadline=None, derandomize=is_same)
settings.load_profile("quick")
