"""Messages of the conversion cache, and of files that are loaded."""

from __future__ import annotations

from collections.abc import Callable

from pytest_edgeq.errors import warn_user


class CacheLog:
    """
    Takes the cache's messages: a warning by default, or whatever the plugin does with them.

    They are no warnings of Python inside pytest, because a suite that turns warnings into errors
    would fail of a damaged entry, which costs nothing but time.
    """

    def __init__(
        self,
        warn: Callable[[str], None] = warn_user,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.warn = warn
        self.note = note
