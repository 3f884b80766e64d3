# SPDX-License-Identifier: MIT OR Apache-2.0
"""What zdtm.py uses of CRIU's Python package: the counts of pages in stats-dump."""
import struct


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        yield key >> 3, value


class images:
    @staticmethod
    def load(file):
        data = file.read()
        size = struct.unpack_from("<I", data, 8)[0]
        dump = dict(fields(dict(fields(data[12:12 + size]))[1]))
        return {"entries": [{"dump": {"pages_written": dump.get(7, 0), "shpages_written": dump.get(14, 0)}}]}
