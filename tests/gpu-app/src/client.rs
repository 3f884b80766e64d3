// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client of the server's socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, bail};

use crate::serve::tokens;

/// Sends one line and returns the answer; closes the connection.
///
/// # Errors
/// No server answers, or the answer is `failed`.
pub fn ask(socket: &Path, request: &str) -> anyhow::Result<String> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
    writeln!(stream, "{request}").context("send a request")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("receive an answer")?;
    match answer.trim().strip_prefix("failed ") {
        Some(reason) => bail!("`{request}` failed: {reason}"),
        None => Ok(answer.trim().to_owned()),
    }
}

/// Asks the server to begin an answer.
///
/// # Errors
/// As [`ask`].
pub fn start(socket: &Path, prompt: &[u32], count: usize) -> anyhow::Result<()> {
    let request = prompt.iter().fold(format!("start {count}"), |line, token| format!("{line} {token}"));
    ask(socket, &request).map(drop)
}

/// Waits for an answer that was begun.
///
/// # Errors
/// As [`ask`].
pub fn result(socket: &Path) -> anyhow::Result<Vec<u32>> {
    let answer = ask(socket, "result")?;
    let mut words = answer.split_whitespace();
    if words.next() != Some("tokens") {
        bail!("`result` was answered by {answer:?}");
    }
    tokens(&words.collect::<Vec<_>>())
}

/// The answer to a prompt.
///
/// # Errors
/// As [`ask`].
pub fn generate(socket: &Path, prompt: &[u32], count: usize) -> anyhow::Result<Vec<u32>> {
    start(socket, prompt, count)?;
    result(socket)
}
