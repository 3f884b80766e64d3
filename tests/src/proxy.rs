// SPDX-License-Identifier: MIT OR Apache-2.0
//! A caching proxy before a registry, as a site has one for all of its hosts: nginx, which keeps blobs in slices.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use rewake_testkit::process::{MINUTE, until};
use tempfile::TempDir;

/// A running proxy; ended when dropped.
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
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|of| format!("{of}_temp_path {};\n", folder.path().join(of).display()))
            .concat();
        // The part of docs/oci.md, with the port of the registry.
        let config = format!(
            "daemon off;\npid {home}/pid;\nerror_log stderr;\nworker_processes 1;\nuser root;\nevents {{}}\n\
             http {{\naccess_log off;\n{temporary}\
             proxy_cache_path {home}/cache keys_zone=blobs:1m;\n\
             server {{\n  listen 127.0.0.1:{port};\n  client_max_body_size 0;\n  proxy_set_header Host $http_host;\n\
             location / {{ proxy_pass http://127.0.0.1:{registry}; }}\n\
             location ~ ^/v2/.*/blobs/sha256: {{\n\
             slice 1m;\n  proxy_set_header Range $slice_range;\n  proxy_set_header Host $http_host;\n\
             proxy_cache blobs;\n  proxy_cache_key $uri$slice_range;\n  proxy_cache_valid 200 206 30d;\n\
             proxy_cache_lock on;\n  proxy_pass http://127.0.0.1:{registry};\n}}\n}}\n}}\n",
            home = folder.path().display(),
        );
        let path = folder.path().join("nginx.conf");
        fs::write(&path, config)?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = Command::new(program);
        command.arg("-p").arg(folder.path()).arg("-c").arg(&path).arg("-e").arg("stderr");
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("start nginx")?;
        let proxy = Self { child, port, _folder: folder };
        let answers = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
        let log = || fs::read_to_string(proxy._folder.path().join("log")).unwrap_or_default();
        until(MINUTE, answers).with_context(log)?;
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
