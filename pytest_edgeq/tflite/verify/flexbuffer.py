"""Check that bytes are a whole flexbuffer, which the kernels read without a look."""

from __future__ import annotations

_INLINE = (0, 1, 2, 3, 26)
"""NULL, INT, UINT, FLOAT, BOOL: the value itself stands there."""

_KEY, _STRING, _MAP, _VECTOR, _KEYS, _BLOB = 4, 5, 9, 10, 14, 25
_INDIRECT = (6, 7, 8)
_NUMBERS = (11, 12, 13, 36)
"""Vectors of INT, UINT, FLOAT and BOOL."""

_FIXED = {kind: 2 + (kind - 16) // 3 for kind in range(16, 25)}
"""Vectors of 2, 3 and 4 numbers, by type."""

_DEEPEST = 32


def is_flexbuffer(data: bytes) -> bool:
    """
    Return whether every offset and length in a flexbuffer lies inside of it.

    The format: https://flatbuffers.dev/internals/#flexbuffers. Types stand in six bits, the width
    of what they lead to in two.
    """
    if len(data) < 3 or data[-1] not in (1, 2, 4, 8):
        return False
    try:
        _Checker(data).value(len(data) - 2 - data[-1], data[-1], data[-2], 0)
    except _OutsideError:
        return False
    return True


class _OutsideError(Exception):
    """Something leads out of the buffer."""


class _Checker:
    """Follows the values of one buffer; as many as it has bytes, so that none is followed twice."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = len(data)

    def value(self, at: int, parent_width: int, packed: int, depth: int) -> None:
        """Check the value that a container of this width holds at a place."""
        kind, width = packed >> 2, 1 << (packed & 3)
        self._left -= 1
        self._require(self._left >= 0 and depth < _DEEPEST)
        if kind in _INLINE:
            self._inside(at, parent_width)
            return
        start = self._follow(at, parent_width)
        if kind == _KEY:
            self._key(start)
        elif kind in _INDIRECT:
            self._inside(start, width)
        elif kind in _FIXED:
            self._inside(start, _FIXED[kind] * width)
        else:
            self._vector(kind, start, width, depth)

    def _vector(self, kind: int, start: int, width: int, depth: int) -> None:
        size = self._number(start - width, width)
        if kind in (_STRING, _BLOB):
            self._inside(start, size)
            # A string ends with a zero behind its length.
            self._require(kind == _BLOB or self._number(start + size, 1) == 0)
        elif kind in _NUMBERS:
            self._inside(start, size * width)
        elif kind == _KEYS:
            self._keys(start, size, width)
        elif kind in (_MAP, _VECTOR):
            self._inside(start, size * (width + 1))
            if kind == _MAP:
                keys = self._follow(start - 3 * width, width)
                key_width = self._number(start - 2 * width, width)
                self._require(key_width in (1, 2, 4, 8))
                self._require(self._number(keys - key_width, key_width) == size)
                self._keys(keys, size, key_width)
            for index in range(size):
                packed = self._data[start + size * width + index]
                self.value(start + index * width, width, packed, depth + 1)
        else:
            raise _OutsideError

    def _keys(self, start: int, size: int, width: int) -> None:
        self._inside(start, size * width)
        for index in range(size):
            self._key(self._follow(start + index * width, width))

    def _key(self, start: int) -> None:
        self._inside(start, 1)
        self._require(self._data.find(b"\0", start) >= 0)

    def _follow(self, at: int, width: int) -> int:
        """Return where an offset leads: backwards, by so many bytes."""
        return at - self._number(at, width)

    def _number(self, at: int, width: int) -> int:
        self._inside(at, width)
        return int.from_bytes(self._data[at : at + width], "little")

    def _inside(self, at: int, length: int) -> None:
        self._require(0 <= at <= at + length <= len(self._data))

    @staticmethod
    def _require(holds: bool) -> None:
        if not holds:
            raise _OutsideError
