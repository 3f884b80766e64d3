# SPDX-License-Identifier: MIT OR Apache-2.0
"""Asks a TLS server on a unix socket for what must differ between its clones.

Usage: tls_client.py SOCKET. It prints the random bytes of the ServerHello, and the session's name, in hexadecimal.
"""

import socket
import ssl
import sys


def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(sys.argv[1])
    return connection


context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE

received, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
tls = context.wrap_bio(received, hello)
try:
    tls.do_handshake()
except ssl.SSLWantReadError:
    pass
with connect() as connection:
    connection.sendall(hello.read())
    answer = b""
    while len(answer) < 43:
        answer += connection.recv(43 - len(answer)) or sys.exit("the server ends the connection")
# A record of 5 bytes, then message type 2, a length of 3 bytes, and a version of 2.
assert answer[0] == 22 and answer[5] == 2, answer
with context.wrap_socket(connect()) as tls:
    name = tls.recv(64)
print(answer[11:43].hex(), name.decode("ascii").strip())
