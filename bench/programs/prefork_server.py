# SPDX-License-Identifier: MIT OR Apache-2.0
"""A prefork server: a child for each 6 MiB. A request makes many children read all of their memory at once.

Usage: prefork_server.py SOCKET MIB. It forks MIB / 6 children, which fill their memory, then listens on the unix
socket SOCKET. A client connects, sends the line "SEED COUNT" and reads one line, a checksum.
bench/src/programs/answer.rs computes the same.
"""

import array
import os
import socket
import sys
import zlib

# 64-bit words of one child: 6 MiB.
WORDS = 786432


def main():
    path, mib = sys.argv[1], int(sys.argv[2])
    children = []
    for number in range(mib // 6):
        children.append(fork(number, children))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            seed, count = map(int, stream.readline().split())
            stream.write(f"{answer(children, seed, count)}\n")


def fork(number, others):
    """Returns the pipes of a new child: it answers each byte that it reads."""
    (question, ask), (answer, reply) = os.pipe(), os.pipe()
    if os.fork() != 0:
        os.close(question)
        os.close(reply)
        return ask, answer
    for pipe in [*others, (ask, answer)]:
        for end in pipe:
            os.close(end)
    words = array.array("Q", range(number * WORDS + 1, (number + 1) * WORDS + 1))
    while os.read(question, 1):
        os.write(reply, zlib.adler32(words).to_bytes(4, "little"))
    os._exit(0)


def answer(children, seed, count):
    chosen = [children[(seed + step) % len(children)] for step in range(count)]
    for ask, _ in chosen:
        os.write(ask, b"?")
    checksum = seed
    for _, answer in chosen:
        checksum = (checksum * 31 + int.from_bytes(os.read(answer, 4), "little")) % 2**64
    return checksum


main()
