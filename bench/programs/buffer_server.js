// SPDX-License-Identifier: MIT OR Apache-2.0
// A script server: it holds Buffers outside of V8's heap and answers each request with a digest of all of them.
//
// Usage: buffer_server.js SOCKET MIB. It listens on the unix socket SOCKET once MIB MiB of Buffers are filled.
// A client connects, sends one line and reads one line.
"use strict";

const crypto = require("crypto");
const net = require("net");

const [path, mib] = process.argv.slice(2);
const buffers = Array.from({ length: Number(mib) }, () => crypto.randomBytes(1 << 20));

function digest() {
  const hash = crypto.createHash("sha256");
  for (const buffer of buffers) {
    hash.update(buffer);
  }
  return hash.digest("hex");
}

const server = net.createServer((connection) => {
  connection.on("error", () => connection.destroy());
  connection.once("data", () => connection.end(digest() + "\n"));
});
server.listen(path);
