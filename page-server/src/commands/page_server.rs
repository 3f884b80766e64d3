// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake page-server`: the server with the options of `criu page-server`, in both of its roles.

use crate::page_server::clients::{self, PageService, Role};
use crate::page_server::endpoint::{Endpoint, Entrance};
use crate::page_server::receive::{ReceiveOptions, Receiver};
use crate::page_server::serve::ServedImage;
use rewake_criu_tls::TlsServer;
use tracing::{info, warn};

use super::criu_server::{Directories, complain, enter, pidfile};
use super::{connected, detach, print, ready};
use crate::cli::{PageServerAddress, PageServerArgs};

/// Runs the command; gives the exit code.
///
/// # Errors
/// Options or directories are wrong, the image cannot be served, or the socket cannot be bound.
pub fn run(options: &PageServerArgs) -> anyhow::Result<u8> {
    let server = &options.server;
    let Directories { images, log, .. } = enter(server)?;
    let pidfile = pidfile(server)?;
    let tls = options
        .tls
        .options()
        .map(|tls| TlsServer::new(&tls, options.address.as_ref().and_then(PageServerAddress::host)))
        .transpose()?;
    let mut ready = ready(server.status_fd)?;
    // A unix socket in the images directory is bound before the directory is locked, which both need.
    let entrance = endpoint(options)?.open()?;
    let role = if options.lazy_pages {
        let image = ServedImage::open(&images)?;
        info!("{}: {} lazy pages", images.display(), image.lazy_pages());
        Role::Serve(Box::new(image))
    } else {
        Role::Receive(Receiver::new(
            &images,
            ReceiveOptions {
                previous: options.prev_images_dir.clone(),
                auto_dedup: options.auto_dedup,
                own_folders: options.keep_listening,
            },
        )?)
    };
    if options.port.is_none() && matches!(entrance, Entrance::Tcp(_)) {
        // The kernel chose it, and the client needs it, whatever the log level.
        print::say(format!("listening on {entrance}"));
    }
    if server.daemon
        && let Some(code) = detach::background(pidfile.as_ref(), log, &mut ready)?
    {
        return Ok(code);
    }
    let report = || {
        if let Err(error) = ready.report_once() {
            warn!(%error, "reporting that clients can connect");
        }
    };
    match clients::run(PageService { role, tls, keep_listening: options.keep_listening }, entrance, report) {
        Ok(()) => Ok(0),
        Err(error) => {
            complain(server, &error);
            Ok(1)
        }
    }
}

fn endpoint(options: &PageServerArgs) -> anyhow::Result<Endpoint> {
    if let Some(socket) = connected(options.ps_socket, options.server.status_fd)? {
        return Ok(Endpoint::Connected(socket));
    }
    Ok(match &options.address {
        Some(PageServerAddress::Socket(path)) => Endpoint::Unix(path.clone()),
        address => Endpoint::Tcp {
            address: address.as_ref().and_then(PageServerAddress::host).map(str::to_owned),
            port: options.port,
            for_other_hosts: options.insecure || options.tls.tls,
        },
    })
}
