// SPDX-License-Identifier: MIT OR Apache-2.0
// A cache: it holds many values outside of V8's heap, and a request reads some of them.
//
// Usage: cache_server.js SOCKET MIB. It fills MIB MiB of values, then listens on the unix socket SOCKET. A client
// connects, sends the line "SEED COUNT" and reads one line, a checksum. bench/src/programs/answer.rs computes the same.
"use strict";

const net = require("net");

// One value has 64 KiB.
const WORDS = 16384;
// From one value of a request to the next one: no run of neighbours, and every value once when COUNT is their number.
const STRIDE = 7919;

const [path, mib] = process.argv.slice(2);
const values = Array.from({ length: Number(mib) * 16 }, (_, number) => value(number));

function value(number) {
  const words = new Uint32Array(WORDS);
  let state = Math.imul(number + 1, 0x9e3779b1);
  for (let at = 0; at < WORDS; at++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    words[at] = state;
  }
  return words;
}

function answer(seed, count) {
  let checksum = seed;
  for (let step = 0; step < count; step++) {
    const words = values[(seed + step * STRIDE) % values.length];
    for (let at = 0; at < WORDS; at++) {
      checksum = (Math.imul(checksum, 31) + words[at]) | 0;
    }
  }
  return checksum >>> 0;
}

const server = net.createServer((connection) => {
  connection.on("error", () => connection.destroy());
  // A request is short and arrives in one piece.
  connection.once("data", (request) => {
    const [seed, count] = request.toString().split(" ").map(Number);
    connection.end(`${answer(seed, count)}\n`);
  });
});
server.listen(path);
