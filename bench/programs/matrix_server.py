# SPDX-License-Identifier: MIT OR Apache-2.0
"""A numeric server: it holds dense matrices and answers each request with a digest of their product with a vector.

Usage: matrix_server.py SOCKET MIB. It listens on the unix socket SOCKET once MIB MiB of matrices are filled.
A client connects, sends one line and reads one line.
"""

import hashlib
import socket
import sys

import numpy

# One matrix of float64 has 8 MiB.
ROWS = 1024


def main():
    path, mib = sys.argv[1], int(sys.argv[2])
    random = numpy.random.default_rng(mib)
    matrices = [random.random((ROWS, ROWS)) for _ in range(max(1, mib // 8))]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            stream.readline()
            stream.write(product(matrices) + "\n")


def product(matrices):
    """Each matrix times the scaled vector before it: every element of every matrix counts."""
    vector = numpy.ones(ROWS)
    for matrix in matrices:
        vector = matrix @ vector
        vector /= vector.max()
    return hashlib.sha256(vector.tobytes()).hexdigest()


main()
