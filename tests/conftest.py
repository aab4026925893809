"""Random tests draw new examples at every desk; in continuous integration they draw the same."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if "CI" in os.environ:
    settings.load_profile("ci")
