"""Attributes of objects that people bring: one that is not there is not one whose code fails."""

from inspect import getattr_static
from typing import Any

ABSENT: Any = object()


def attribute_of(holder: Any, name: str, default: Any = ABSENT) -> Any:
    """Return an attribute of `holder`, `default` if it has none of this name.

    What the code behind the attribute raises, be it an AttributeError, passes through.
    """
    try:
        return getattr(holder, name)
    except AttributeError as error:
        is_about_it = error.obj is holder and error.name == name
        if not is_about_it or getattr_static(holder, name, ABSENT) is not ABSENT:
            raise
        return default


def has_attribute(holder: Any, name: str) -> bool:
    """Return whether `holder` has an attribute of this name; raises what the attribute does."""
    return attribute_of(holder, name) is not ABSENT
