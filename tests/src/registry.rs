// SPDX-License-Identifier: MIT OR Apache-2.0
//! A registry of OCI images: Debian's `docker-registry`, on this host alone, with a password.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rewake_testkit::process::{PATIENCE, until};
use rewake_testkit::programs::rewake;
use tempfile::TempDir;

/// The user's password.
pub const PASSWORD: &str = "a-secret-that-is-never-shown";
/// Its hash, as a registry wants it: that of bcrypt.
const USERS: &str = "user:$2b$04$uV1jgXfoVO9N8FmElUkP8e0fVvZKKe3CqSNlKt/K1Yv67zUYvPTiK\n";
/// `user` and the password in base64, as `skopeo login` writes them.
const AUTH: &str = "dXNlcjphLXNlY3JldC10aGF0LWlzLW5ldmVyLXNob3du";

/// A running registry; ended when dropped.
#[derive(Debug)]
pub struct RegistryServer {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl RegistryServer {
    /// Finds the program: `REWAKE_DOCKER_REGISTRY`, which `cargo xtask test` sets, or that of the system.
    /// `skopeo` must be there, too.
    ///
    /// # Errors
    /// One of them was not installed.
    pub fn program() -> anyhow::Result<PathBuf> {
        let program = std::env::var_os("REWAKE_DOCKER_REGISTRY").unwrap_or_else(|| "docker-registry".into());
        for program in [Path::new(&program), Path::new("skopeo")] {
            let found = Command::new(program).arg("--version").output();
            let found = found.with_context(|| format!("{}: apt-get install it", program.display()))?;
            ensure!(found.status.success(), "{} --version: {}", program.display(), found.status);
        }
        Ok(program.into())
    }

    /// Starts an empty registry.
    ///
    /// # Errors
    /// It does not answer.
    pub fn start(program: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rewake-registry-").tempdir()?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let path = |name: &str| folder.path().join(name);
        let config = format!(
            "version: 0.1\nlog: {{level: warn, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"127.0.0.1:{port}\", secret: x}}\nauth: {{htpasswd: {{realm: test, path: \
             {}}}}}\n",
            path("data").display(),
            path("users").display()
        );
        fs::write(path("users"), USERS)?;
        fs::write(path("config"), config)?;
        fs::write(path("auth.json"), login(port))?;
        let log = File::create(path("log"))?;
        let mut command = Command::new(program);
        command.arg("serve").arg(path("config")).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("start docker-registry")?;
        let server = Self { child, port, folder };
        let answers = || std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
        until(PATIENCE, answers).with_context(|| server.log())?;
        Ok(server)
    }

    /// Returns the URL of a repository.
    #[must_use]
    pub fn url(&self, repository: &str) -> String {
        format!("oci://127.0.0.1:{}/{repository}", self.port)
    }

    /// Returns the port on which it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Writes a file with the password, for clients that reach it at another port.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn auth_file_at(&self, port: u16) -> anyhow::Result<PathBuf> {
        let path = self.folder.path().join(format!("auth-{port}.json"));
        fs::write(&path, login(port))?;
        Ok(path)
    }

    /// Returns the file with the password, for clients.
    #[must_use]
    pub fn auth_file(&self) -> PathBuf {
        self.folder.path().join("auth.json")
    }

    /// Returns `rewake` with these arguments and the password.
    ///
    /// # Errors
    /// No program to start.
    pub fn rewake(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(rewake()?);
        command.args(arguments).stdin(Stdio::null()).env("REGISTRY_AUTH_FILE", self.auth_file());
        Ok(command)
    }

    /// Runs `skopeo` with these arguments. Returns what it wrote.
    ///
    /// # Errors
    /// It failed.
    pub fn skopeo(&self, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut command = Command::new("skopeo");
        command.args(["--insecure-policy"]).args(arguments).stdin(Stdio::null());
        let output = command.env("REGISTRY_AUTH_FILE", self.auth_file()).output().context("start skopeo")?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(output.stdout)
    }

    /// Returns the address of an image for `skopeo`.
    #[must_use]
    pub fn address(&self, image: &str) -> String {
        format!("docker://127.0.0.1:{}/{image}", self.port)
    }

    /// Returns the file in which the registry has a blob.
    #[must_use]
    pub fn blob(&self, digest: &str) -> PathBuf {
        let digits = digest.trim_start_matches("sha256:");
        let blobs = self.folder.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(&digits[..2]).join(digits).join("data")
    }

    /// Changes the bytes of a blob. Its cache has been read by then, so the registry does not notice.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn replace(&self, digest: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let mut file = File::create(self.blob(digest))?;
        Ok(file.write_all(bytes)?)
    }

    /// Ends the registry.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

/// The text of a file with the password for a port.
fn login(port: u16) -> String {
    format!(r#"{{"auths":{{"127.0.0.1:{port}":{{"auth":"{AUTH}"}}}}}}"#)
}

impl Drop for RegistryServer {
    fn drop(&mut self) {
        self.kill();
    }
}
