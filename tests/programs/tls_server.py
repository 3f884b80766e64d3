# SPDX-License-Identifier: MIT OR Apache-2.0
"""A TLS server on a unix socket. SIGUSR1 has it seed its random states again. The id only names
the generation.

Usage: tls_server.py FOLDER CERTIFICATE KEY. It answers each client with a session's name, and ends at the first
client that finds a file named `stop` in the folder.
"""

import os
import random
import signal
import socket
import ssl
import sys

folder, certificate, key = sys.argv[1:]


def renew(*_):
    ssl.RAND_add(os.urandom(32), 32)
    random.seed(os.urandom(32))


signal.signal(signal.SIGUSR1, renew)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
# The random states exist before the dump.
ssl.RAND_bytes(16)
random.seed(7)
server = socket.socket(socket.AF_UNIX)
server.bind(f"{folder}/socket")
server.listen()
open(f"{folder}/ready", "w", encoding="ascii").close()
while not os.path.exists(f"{folder}/stop"):
    connection, _ = server.accept()
    try:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.sendall(b"%032x\n" % random.getrandbits(128))
    except OSError:
        # A client that has seen the server's first message ends the connection.
        connection.close()
