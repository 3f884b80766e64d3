// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages`: the streamer with the options of `criu lazy-pages`, for one restore.

use std::net::ToSocketAddrs as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tracing::warn;

use super::criu_server::{Directories, complain, enter, pidfile};
use super::{connected, detach, ready};
use crate::cli::{LazyPagesArgs, PageServerAddress, Remote};
use rewake_criu_tls::TlsOptions;
use rewake_fetcher::plan::{PagePeer, PeerTls};
use rewake_process::ready::Ready;
use rewake_streamer::fetch_peer::FetchPeer;
use rewake_streamer::restore::{RestoreOptions, StreamedRestore};
use rewake_streamer::supervise::supervisor::{self, asked_to_stop_is_well};
use rewake_streamer::working_set::LoadingOptions;

/// Runs the command; gives the exit code.
///
/// # Errors
/// Options or directories are wrong, the image cannot be served, or another streamer serves there already.
pub fn run(options: &LazyPagesArgs) -> anyhow::Result<u8> {
    let server = &options.server;
    let Directories { images, work, log } = enter(server)?;
    let pidfile = pidfile(server)?;
    if options.remote.auto_dedup {
        warn!("--auto-dedup: the images stay as they are");
    }
    let page_server = page_server(options, &work)?;
    let mut ready = ready(server.status_fd).unwrap_or_else(|error| {
        // CRIU serves the restore without it, too.
        warn!("{error:#}");
        Ready::default()
    });
    if server.daemon
        && let Some(code) = detach::background(pidfile.as_ref(), log, &mut ready)?
    {
        return Ok(code);
    }
    let restore = StreamedRestore::new(RestoreOptions {
        images: Some(images),
        no_gpus: false,
        work,
        loading: LoadingOptions::default(),
        keeps_record: false,
        server: page_server,
        connect_timeout: options.connect_timeout.map(Duration::from_secs),
        or_eagerly: false,
        signers: Vec::new(),
    })?;
    let code = supervisor::supervise(ready, |start| {
        restore.serve(start).unwrap_or_else(|error| {
            complain(server, &error);
            1
        })
    })?;
    Ok(asked_to_stop_is_well(code))
}

/// Finds the page server that has the lazy pages; none: the image has them.
///
/// # Errors
/// It has no address, or a file of TLS is missing or damaged.
fn page_server(given: &LazyPagesArgs, work: &Path) -> anyhow::Result<Option<FetchPeer>> {
    let options = &given.remote;
    if !options.page_server {
        return Ok(None);
    }
    let tls = tls(options, work)?;
    let (peer, connected) = match (connected(options.ps_socket, given.server.status_fd)?, &options.address) {
        (Some(socket), _) => (PagePeer::Connected, Some(socket)),
        (None, Some(PageServerAddress::Socket(path))) => (PagePeer::Unix(path.clone()), None),
        (None, address) => {
            let address = address.as_ref().and_then(PageServerAddress::host).unwrap_or("127.0.0.1");
            let port = options.port.context("--page-server: its port is needed: --port PORT")?;
            let found = (address, port).to_socket_addrs().with_context(|| format!("--address {address}"))?;
            let found: Vec<_> = found.collect();
            ensure!(!found.is_empty(), "--address {address}: no address of that name");
            if tls.is_none() && found.iter().any(|found| !found.ip().is_loopback()) {
                warn!("memory travels unencrypted from {address}, and any host in between can change it");
            }
            (PagePeer::Tcp(found), None)
        }
    };
    Ok(Some(FetchPeer { peer, tls, connected, image: None }))
}

/// What the options of TLS say, with absolute paths: a fetcher runs in another directory.
///
/// # Errors
/// A file is missing or damaged.
fn tls(options: &Remote, work: &Path) -> anyhow::Result<Option<PeerTls>> {
    let host = options.address.as_ref().and_then(PageServerAddress::host).map(str::to_owned);
    let Some(given) = options.tls.options() else { return Ok(None) };
    let absolute = |path: Option<PathBuf>| path.map(|path| work.join(path));
    let options = TlsOptions {
        ca: absolute(given.ca),
        crl: absolute(given.crl),
        certificate: absolute(given.certificate),
        key: absolute(given.key),
        any_name: given.any_name,
    };
    let tls = PeerTls { options, host };
    // The fetcher reads the files when it starts. Mistakes are found before a restore begins.
    tls.client()?;
    Ok(Some(tls))
}
