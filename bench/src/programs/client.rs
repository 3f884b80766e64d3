// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client of a program: it connects again and again until one answer has come.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::processes::check_interrupted;

/// Between two connections: short beside the figures, long beside what an attempt costs.
const PAUSE: Duration = Duration::from_millis(1);
/// How long an interruption, a stop or the deadline may go unnoticed.
const SLICE: Duration = Duration::from_millis(200);

/// Whom to ask, and how long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client<'a> {
    /// Of the program.
    pub(super) socket: &'a Path,
    pub(super) deadline: Instant,
    /// Set when no answer will come any more.
    pub(super) stop: &'a AtomicBool,
}

impl Client<'_> {
    /// The first whole answer, and when it had come.
    ///
    /// # Errors
    /// None came before the deadline, or the client was stopped or interrupted.
    pub(super) fn first_answer(&self) -> anyhow::Result<(String, Instant)> {
        loop {
            if let Some(answer) = self.ask()? {
                return Ok((answer, Instant::now()));
            }
            self.may_wait()?;
            std::thread::sleep(PAUSE);
        }
    }

    /// One connection; none if it was refused or has ended before a whole line had come.
    fn ask(&self) -> anyhow::Result<Option<String>> {
        let Ok(mut stream) = UnixStream::connect(self.socket) else { return Ok(None) };
        stream.set_read_timeout(Some(SLICE))?;
        if stream.write_all(b"answer\n").is_err() {
            return Ok(None);
        }
        let (mut answer, mut buffer) = (Vec::new(), [0; 256]);
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => answer.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.may_wait()?,
                Err(_) => break,
            }
            if answer.ends_with(b"\n") {
                return Ok(Some(String::from_utf8_lossy(&answer).trim().to_owned()));
            }
        }
        Ok(None)
    }

    fn may_wait(&self) -> anyhow::Result<()> {
        check_interrupted()?;
        if self.stop.load(Ordering::Relaxed) {
            bail!("asking {} was stopped", self.socket.display());
        }
        if Instant::now() >= self.deadline {
            bail!("{}: no answer has come before the time limit", self.socket.display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_broken_connection_is_no_answer_and_the_next_one_is_asked() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            // Half a line, then the end; a whole line in two parts.
            for parts in [&[&b"4"[..]][..], &[b"4", b"2\n"]] {
                let (mut connection, _) = listener.accept().unwrap();
                let mut request = [0; 7];
                connection.read_exact(&mut request).unwrap();
                for part in parts {
                    connection.write_all(part).unwrap();
                }
            }
        });
        let stop = AtomicBool::new(false);
        let client =
            Client { socket: &socket, deadline: Instant::now() + Duration::from_secs(20), stop: &stop };
        assert_eq!(client.first_answer().unwrap().0, "42");
        server.join().unwrap();
    }

    #[test]
    fn asking_ends_at_the_deadline_and_when_it_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let stop = AtomicBool::new(false);
        let refused =
            Client { socket: &socket, deadline: Instant::now() + Duration::from_millis(20), stop: &stop };
        let error = refused.first_answer().unwrap_err().to_string();
        assert!(error.contains("no answer has come before the time limit"), "{error}");
        // It listens, and never answers.
        let _listener = UnixListener::bind(&socket).unwrap();
        stop.store(true, Ordering::Relaxed);
        let silent = Client { deadline: Instant::now() + Duration::from_secs(20), ..refused };
        let error = silent.first_answer().unwrap_err().to_string();
        assert!(error.contains("was stopped"), "{error}");
    }
}
