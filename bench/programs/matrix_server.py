# SPDX-License-Identifier: MIT OR Apache-2.0
"""A numeric server: it multiplies a vector with dense matrices, one after another.

Usage: matrix_server.py SOCKET MIB ELEMENTS. It fills MIB MiB of matrices, then listens on the unix socket SOCKET. A
client connects, sends the line "SEED COUNT" and reads one line, a checksum. bench/src/programs/answer.rs computes the
same.
"""

import socket
import sys

import numpy

# One matrix of elements of 8 bytes has 8 MiB.
ROWS = 1024
# Elements of vectors stay below it. Every sum of small elements is then a whole number below 2^53, which float64 holds
# exactly.
PRIME = 1_000_003
SPREAD = numpy.uint64(0x9E3779B97F4A7C15)


def main():
    path, mib, matrix = sys.argv[1], int(sys.argv[2]), MATRICES[sys.argv[3]]
    indexes = numpy.arange(ROWS * ROWS, dtype=numpy.uint64).reshape(ROWS, ROWS)
    matrices = [matrix(indexes + numpy.uint64(number * ROWS * ROWS)) for number in range(mib // 8)]
    # The image has no memory beside the matrices.
    del indexes
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            seed, count = map(int, stream.readline().split())
            stream.write(f"{answer(matrices, seed, count)}\n")


def small(indexes):
    """Whole numbers from 0 to 255, as floats: they compress to a twentieth."""
    return (indexes * SPREAD >> numpy.uint64(56)).astype(numpy.float64)


def noise(indexes):
    """Words that do not compress. Sums of their products are those modulo 2^64."""
    hashed = indexes * SPREAD
    return (hashed ^ hashed >> numpy.uint64(32)) * SPREAD


MATRICES = {"small": small, "noise": noise}


def answer(matrices, seed, count):
    vector = numpy.fmod(seed + numpy.arange(ROWS, dtype=matrices[0].dtype), PRIME)
    for step in range(count):
        vector = numpy.fmod(matrices[(seed + step) % len(matrices)] @ vector, PRIME)
    checksum = seed
    for element in vector:
        checksum = (checksum * 31 + int(element)) % 2**64
    return checksum


main()
