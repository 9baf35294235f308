"""Messages of the conversion cache, and of files that are loaded."""

from __future__ import annotations

from collections.abc import Callable

from pytest_edgeq.errors import warn_user


class CacheLog:
    """
    Receiver of the cache's messages: a warning by default, or the plugin.

    They are no Python warnings inside pytest, because a suite that turns warnings into errors would
    fail for a damaged entry, which only costs time.
    """

    def __init__(
        self,
        warn: Callable[[str], None] = warn_user,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.warn = warn
        self.note = note
