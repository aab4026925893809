"""Check once whether the Hub answers: its library retries five times for each file."""

from contextlib import suppress
from threading import Event, Thread

from huggingface_hub import constants, get_session, try_to_load_from_cache

from batcher.errors import BatchdecodeError

SECONDS = 2.0
"""How long the Hub may take to answer, looking up its address included."""


def is_offline(name: str) -> bool:
    """Return whether the Hub does not answer, so that only the local cache can be used."""
    if not constants.HF_HUB_OFFLINE and _answers():
        return False
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    reason = f"{constants.ENDPOINT} does not answer within {SECONDS:g} s"
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    raise BatchdecodeError(f"{name} was not downloaded before, and {reason}")


def _answers() -> bool:
    has_answered = Event()

    def ask() -> None:
        with suppress(Exception):  # of whichever library it asks by
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
            has_answered.set()

    asking = Thread(target=ask, name="ask-hub", daemon=True)  # no timeout ends a look-up of a name
    asking.start()
    asking.join(SECONDS)
    return has_answered.is_set()
