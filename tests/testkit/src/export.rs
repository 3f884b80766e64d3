// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export` of a directory with images.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use anyhow::Context;

use crate::programs::rewake;

/// A running `rewake export`; ended when dropped.
#[derive(Debug)]
pub struct ImageExport {
    child: Child,
    port: u16,
    said: BufReader<ChildStderr>,
}

impl ImageExport {
    /// Serves the images below a directory, with these options.
    ///
    /// # Errors
    /// It does not listen.
    pub fn start(root: &Path, options: &[String]) -> anyhow::Result<Self> {
        let mut command = Command::new(rewake()?);
        command.arg("export").arg(root).args(["--port", "0"]).args(options).stderr(Stdio::piped());
        let mut child = command.spawn().context("start rewake export")?;
        let mut line = String::new();
        let mut said = BufReader::new(child.stderr.take().context("its messages")?);
        said.read_line(&mut line).context("its first line")?;
        let port =
            line.trim().strip_prefix("rewake: listening on 127.0.0.1:").and_then(|port| port.parse().ok());
        let port = port.with_context(|| line.clone())?;
        Ok(Self { child, port, said })
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The next line that it logs.
    ///
    /// # Errors
    /// It is no text.
    pub fn said(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line).context("a line of the log")?;
        Ok(line)
    }
}

impl Drop for ImageExport {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
