// SPDX-License-Identifier: MIT OR Apache-2.0
//! SeaweedFS: a store that answers as S3 does, on this host alone.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use tempfile::TempDir;

use crate::process::{PATIENCE, until};
use crate::programs::rewake;

/// The key that the server knows.
pub const KEY: [&str; 2] = ["a-key-id", "a-secret-that-is-never-shown"];

/// The options with a port of their own.
const PORTS: [&str; 8] = [
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
];

/// Which of them the filer has.
const FILER: usize = 6;

/// A running server; ended when dropped.
#[derive(Debug)]
pub struct SeaweedServer {
    child: Child,
    port: u16,
    filer: u16,
    folder: TempDir,
}

impl SeaweedServer {
    /// Finds the program: `REWAKE_WEED`, which `cargo xtask test` sets.
    ///
    /// # Errors
    /// It was not fetched.
    pub fn program() -> anyhow::Result<PathBuf> {
        let path = std::env::var_os("REWAKE_WEED").map(PathBuf::from).filter(|path| path.is_file());
        path.context("no SeaweedFS: REWAKE_WEED does not name its program `weed`")
    }

    /// Starts a server with an empty bucket `bucket`.
    ///
    /// # Errors
    /// It does not answer.
    pub fn start(program: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rewake-seaweedfs-").tempdir()?;
        let [id, secret] = KEY;
        let identity = format!(
            r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{id}","secretKey":"{secret}"}}],"actions":["Admin"]}}]}}"#
        );
        let (config, log) = (folder.path().join("s3.json"), File::create(folder.path().join("log"))?);
        fs::write(&config, identity)?;
        let ports = free_ports()?;
        let mut command = Command::new(program);
        command.arg("server").arg(format!("-dir={}", folder.path().display()));
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3"]);
        command.args([
            "-master.volumeSizeLimitMB=64",
            "-volume.max=20",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]);
        command.arg(format!("-s3.config={}", config.display()));
        command.args(PORTS.iter().zip(ports).map(|(option, port)| format!("-{option}={port}")));
        command.env("HOME", folder.path()).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("start SeaweedFS")?;
        let server = Self { child, port: ports[0], filer: ports[FILER], folder };
        let is_ready = || {
            server.upload("", &[]).ok()?;
            let output = server.rewake(&["ls", "s3://bucket"]).ok()?.output().ok()?;
            String::from_utf8_lossy(&output.stderr).contains("no store of images").then_some(())
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port));
        let answers = || TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok();
        until(PATIENCE, answers).and_then(|_| until(PATIENCE, is_ready)).with_context(|| server.log())?;
        Ok(server)
    }

    /// Returns `rewake` with these arguments and the server's key.
    ///
    /// # Errors
    /// No program to start.
    pub fn rewake(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(rewake()?);
        command.args(arguments).stdin(Stdio::null()).envs(Self::environment(self.port));
        Ok(command)
    }

    /// Returns the port that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the variables for a client of this port.
    #[must_use]
    pub fn environment(port: u16) -> [(String, String); 3] {
        let endpoint = format!("http://127.0.0.1:{port}");
        [("AWS_ACCESS_KEY_ID", KEY[0]), ("AWS_SECRET_ACCESS_KEY", KEY[1]), ("AWS_ENDPOINT_URL", &*endpoint)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    }

    /// Writes an object of the bucket as a plain file, without S3; an empty name makes the bucket. Returns
    /// the status.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn upload(&self, name: &str, bytes: &[u8]) -> anyhow::Result<u16> {
        let mut filer = TcpStream::connect((Ipv4Addr::LOCALHOST, self.filer))?;
        filer.set_read_timeout(Some(PATIENCE))?;
        let length = bytes.len();
        // A POST makes a folder.
        let method = if name.is_empty() { "POST" } else { "PUT" };
        let head = format!("Host: filer\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        write!(filer, "{method} /buckets/bucket/{name} HTTP/1.1\r\n{head}")?;
        filer.write_all(bytes)?;
        let mut answer = String::new();
        filer.read_to_string(&mut answer)?;
        answer.split(' ').nth(1).context("no status")?.parse().context("a status")
    }

    /// Ends the server.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns what it logged.
    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for SeaweedServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ports that were free a moment ago.
fn free_ports() -> anyhow::Result<[u16; PORTS.len()]> {
    let listeners: Vec<TcpListener> =
        PORTS.iter().map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let ports: Vec<u16> =
        listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<std::io::Result<_>>()?;
    ports.try_into().ok().context("a port for each option")
}
