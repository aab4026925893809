"""Random tests draw new examples at every desk; in continuous integration they draw the same."""

import os

# Two workers with two threads each wait for each other; numpy reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from examples import PART, USUAL
from hypothesis import settings

is_same = "CI" in os.environ
settings.register_profile("quick", max_examples=USUAL // PART, deadline=None, derandomize=is_same)
settings.register_profile("thorough", max_examples=USUAL, deadline=None, derandomize=is_same)
settings.load_profile("quick")
