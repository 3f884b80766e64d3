# SPDX-License-Identifier: MIT OR Apache-2.0
"""A numeric server: it multiplies a vector with dense matrices, one after another.

Usage: matrix_server.py SOCKET MIB. It fills MIB MiB of matrices, then listens on the unix socket SOCKET. A client
connects, sends the line "SEED COUNT" and reads one line, a checksum. bench/src/programs/answer.rs computes the same.
"""

import socket
import sys

import numpy

# One matrix of float64 has 8 MiB.
ROWS = 1024
# Elements of vectors stay below it. Every sum is then a whole number below 2^53, which float64 holds exactly.
PRIME = 1_000_003


def main():
    path, mib = sys.argv[1], int(sys.argv[2])
    matrices = [matrix(number) for number in range(mib // 8)]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            seed, count = map(int, stream.readline().split())
            stream.write(f"{answer(matrices, seed, count)}\n")


def matrix(number):
    """Elements are whole numbers from 0 to 255."""
    elements = ROWS * ROWS
    index = numpy.arange(number * elements, (number + 1) * elements, dtype=numpy.uint64)
    hashed = (index * numpy.uint64(0x9E3779B97F4A7C15)) >> numpy.uint64(56)
    return hashed.astype(numpy.float64).reshape(ROWS, ROWS)


def answer(matrices, seed, count):
    vector = numpy.fmod(seed + numpy.arange(ROWS, dtype=numpy.float64), PRIME)
    for step in range(count):
        vector = numpy.fmod(matrices[(seed + step) % len(matrices)] @ vector, PRIME)
    checksum = seed
    for element in vector:
        checksum = (checksum * 31 + int(element)) % 2**64
    return checksum


main()
