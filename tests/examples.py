"""How many examples the random tests draw: a third of them, and all in the profile `thorough`.

`pytest -m hypothesis --hypothesis-profile thorough` is run by continuous integration.
"""

from hypothesis import settings

USUAL = 100  # where a test does not say how many
PART = 3


def examples(number: int) -> settings:
    """Return the settings of a test that draws so many examples when it is thorough."""
    is_thorough = settings.default is settings.get_profile("thorough")
    return settings(max_examples=number if is_thorough else -(-number // PART))
