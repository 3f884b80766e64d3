// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client of a program: it connects again and again until the program answers.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;

use super::program::Question;
use crate::processes::check_interrupted;

/// Time between two attempts: the figures are hundreds of times longer, and a refused attempt takes
/// microseconds.
const PAUSE: Duration = Duration::from_millis(1);
/// The longest time after which an interruption, a stop or the deadline is noticed.
const SLICE: Duration = Duration::from_millis(200);

/// Where a program listens, and when its client gives up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client<'a> {
    /// The socket of the program.
    pub(crate) socket: &'a Path,
    pub(crate) deadline: Instant,
    /// Set when the program has failed and will not answer.
    pub(crate) stop: &'a AtomicBool,
}

impl Client<'_> {
    /// The line that answers the question, and when it arrived.
    ///
    /// # Errors
    /// No answer arrived before the deadline, or the client was stopped or interrupted.
    pub(crate) fn answer(&self, question: Question) -> anyhow::Result<(String, Instant)> {
        loop {
            if let Some(answer) = self.ask_once(question)? {
                return Ok((answer, Instant::now()));
            }
            self.pause()?;
        }
    }

    /// Asks on one connection. Returns `None` if it ends before a whole line.
    fn ask_once(&self, question: Question) -> anyhow::Result<Option<String>> {
        let mut stream = self.connect()?;
        // In one piece: the programs read a request with one call.
        if stream.write_all(format!("{question}\n").as_bytes()).is_err() {
            return Ok(None);
        }
        let (mut answer, mut buffer) = (Vec::new(), [0; 256]);
        while let Some(count) = self.read(&mut stream, &mut buffer)? {
            answer.extend_from_slice(&buffer[..count]);
            if answer.ends_with(b"\n") {
                return Ok(Some(String::from_utf8_lossy(&answer).trim().to_owned()));
            }
        }
        Ok(None)
    }

    /// A connection, as soon as one is not refused.
    pub(crate) fn connect(&self) -> anyhow::Result<UnixStream> {
        loop {
            if let Ok(stream) = UnixStream::connect(self.socket) {
                stream.set_read_timeout(Some(SLICE))?;
                return Ok(stream);
            }
            self.pause()?;
        }
    }

    /// The number of bytes that arrived, at least one; none when the connection has ended or broken.
    pub(crate) fn read(&self, stream: &mut UnixStream, buffer: &mut [u8]) -> anyhow::Result<Option<usize>> {
        loop {
            match stream.read(buffer) {
                Ok(0) => return Ok(None),
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.check_patience()?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// Waits before the next attempt.
    pub(crate) fn pause(&self) -> anyhow::Result<()> {
        self.check_patience()?;
        std::thread::sleep(PAUSE);
        Ok(())
    }

    fn check_patience(&self) -> anyhow::Result<()> {
        check_interrupted()?;
        if self.stop.load(Ordering::Relaxed) {
            bail!("the client of {} was stopped", self.socket.display());
        }
        if Instant::now() >= self.deadline {
            bail!("no answer on {} before the time limit", self.socket.display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const QUESTION: Question = Question { seed: 7, count: 3 };

    #[test]
    fn a_connection_that_breaks_is_no_answer_and_the_client_asks_again() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            // Half a line, then the end; a whole line in two parts.
            for parts in [&[&b"4"[..]][..], &[b"4", b"2\n"]] {
                let (mut connection, _) = listener.accept().unwrap();
                let mut request = [0; 4];
                connection.read_exact(&mut request).unwrap();
                assert_eq!(&request, b"7 3\n");
                for part in parts {
                    connection.write_all(part).unwrap();
                }
            }
        });
        let stop = AtomicBool::new(false);
        let client =
            Client { socket: &socket, deadline: Instant::now() + Duration::from_secs(20), stop: &stop };
        assert_eq!(client.answer(QUESTION).unwrap().0, "42");
        server.join().unwrap();
    }

    #[test]
    fn a_client_ends_at_the_deadline_and_when_it_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let stop = AtomicBool::new(false);
        let refused =
            Client { socket: &socket, deadline: Instant::now() + Duration::from_millis(20), stop: &stop };
        let error = refused.answer(QUESTION).unwrap_err().to_string();
        assert!(error.contains("before the time limit"), "{error}");
        // It listens, and never answers.
        let _listener = UnixListener::bind(&socket).unwrap();
        stop.store(true, Ordering::Relaxed);
        let silent = Client { deadline: Instant::now() + Duration::from_secs(20), ..refused };
        let error = silent.answer(QUESTION).unwrap_err().to_string();
        assert!(error.contains("was stopped"), "{error}");
    }
}
