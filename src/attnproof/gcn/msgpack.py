"""The part of msgpack that an AMDGPU metadata note uses (msgpack specification: maps, arrays, strings, integers).

A reader of 60 lines in place of a dependency: the note is the only msgpack that attnproof meets.
"""

from __future__ import annotations

import struct
from typing import Any

# first byte -> (struct format of the value that follows)
_SCALARS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# first byte -> (what, struct format of its length)
_SIZED = {
    0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("list", ">H"),
    0xDD: ("list", ">I"),
    0xDE: ("dict", ">H"),
    0xDF: ("dict", ">I"),
}


class _Reader:
    """A cursor over the bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        """One big-endian value."""
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def many(self, what: str, count: int) -> Any:
        """A string, list or map of known length."""
        if what == "list":
            return [self.value() for _ in range(count)]
        if what == "dict":
            return {self.value(): self.value() for _ in range(count)}
        raw = self.data[self.at : self.at + count]
        self.at += count
        return raw.decode() if what == "str" else raw

    def value(self) -> Any:
        """The value that starts here."""
        first: int = self.number(">B")
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self.many("dict", first & 15)
        if first < 0xA0:
            return self.many("list", first & 15)
        if first < 0xC0:
            return self.many("str", first & 31)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _SCALARS:
            return self.number(_SCALARS[first])
        if first in _SIZED:
            what, form = _SIZED[first]
            return self.many(what, self.number(form))
        raise ValueError(
            f"msgpack: expected a type that AMDGPU metadata uses, got byte {first:#x} at {self.at - 1}"
        )


def unpack(data: bytes) -> Any:
    """Read one msgpack value.

    >>> unpack(bytes([0x81, 0xA1, 0x61, 0x05]))
    {'a': 5}
    """
    return _Reader(data).value()
