// SPDX-License-Identifier: MIT OR Apache-2.0
//! A caching proxy before a registry, as a site has one for all of its hosts: nginx, which keeps blobs in
//! slices.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use rewake_testkit::process::{PATIENCE, until};
use tempfile::TempDir;

/// The text for nginx that a site copies is the tested one.
const PAGE: &str = include_str!("../../docs/store.md");

/// A running proxy, one process; ended when dropped.
#[derive(Debug)]
pub struct CachingProxy {
    child: Child,
    port: u16,
    _folder: TempDir,
}

impl CachingProxy {
    /// Finds nginx: `REWAKE_NGINX`, which `cargo xtask test` sets, or that of the system.
    ///
    /// # Errors
    /// It was not installed.
    pub fn program() -> anyhow::Result<PathBuf> {
        let program = std::env::var_os("REWAKE_NGINX").unwrap_or_else(|| "nginx".into());
        let found = Command::new(&program).arg("-v").output().context("nginx: apt-get install it")?;
        ensure!(found.status.success(), "nginx -v: {}", found.status);
        Ok(program.into())
    }

    /// Starts one before a registry's port.
    ///
    /// # Errors
    /// It does not answer.
    pub fn start(program: &Path, registry: u16) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rewake-proxy-").tempdir()?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let config = config(folder.path(), port, registry).context("docs/store.md has no text for nginx")?;
        let path = folder.path().join("nginx.conf");
        fs::write(&path, config)?;
        let log = File::create(folder.path().join("log"))?;
        // A test that is killed leaves no proxy.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).args(["-e", "stderr", "-p"]).arg(folder.path());
        command.arg("-c").arg(&path);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("start nginx")?;
        let proxy = Self { child, port, _folder: folder };
        let answers = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
        let log = || fs::read_to_string(proxy._folder.path().join("log")).unwrap_or_default();
        until(PATIENCE, answers).with_context(log)?;
        Ok(proxy)
    }

    /// Returns its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for CachingProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the page has between the braces of `http`, before a registry of this host, whose ports have no TLS.
fn config(home: &Path, port: u16, registry: u16) -> Option<String> {
    let text = PAGE.split_once("```nginx\n")?.1.split_once("```")?.0;
    let text = text
        .replace("https://REGISTRY", &format!("http://127.0.0.1:{registry}"))
        .replace("LISTEN", &format!("127.0.0.1:{port}"))
        .replace("CACHE", &home.join("cache").display().to_string());
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|of| format!("{of}_temp_path {};\n", home.join(of).display()))
        .concat();
    Some(format!(
        "daemon off;\nmaster_process off;\npid {}/pid;\nerror_log stderr;\nuser root;\nevents {{}}\n\
         http {{\naccess_log off;\n{temporary}{text}}}\n",
        home.display()
    ))
}
