// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore --from`: copies what CRIU itself reads of another host's image, and leaves the rest to the
//! streamer.

use std::cell::Cell;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf, absolute};
use std::rc::Rc;

use anyhow::{Context as _, ensure};
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_criu_tls::TlsOptions;
use rewake_fetcher::plan::PeerTls;
use rewake_image_signature::Signers;
use rewake_image_transfer::pull::{ImageSource, pull, pull_eager};
use rewake_streamer::fetch_peer::FetchedImage;
use rewake_streamer::supervise::launch::{ImageServerAddress, LaunchPlan, MemoryServer};
use rewake_streamer::units;

use super::view::View;
use super::{PLUGIN_REMEDY, signers};
use crate::cli::{RemoteImage, RestoreArgs, TlsArgs};
use crate::commands::pull::{connect, warn_unencrypted};

/// Copies the part of the image that is needed first. Returns how the image is served, or `None` if no host
/// is needed: it was not asked for, or the directory has the whole image. `plugins` returns the folder of
/// CRIU's plugins for an image with GPU state.
///
/// # Errors
/// As for [`pull_eager`].
pub(super) fn prepare(
    options: &RestoreArgs,
    images: Option<&Path>,
    plugins: impl FnOnce(bool) -> anyhow::Result<Option<PathBuf>>,
) -> anyhow::Result<Option<LaunchPlan>> {
    let (Some(RemoteImage { host, image }), Some(directory)) = (options.source.from.clone(), images) else {
        ensure!(!options.source.tls.tls, "--tls: it encrypts the connection of --from, which is not given");
        return Ok(None);
    };
    let (id, port) = (options.source.id.as_deref(), options.source.port);
    let files = signers(options)?;
    let signers = Signers::all(&files)?;
    let view = View::new(options.quiet);
    let what = format!("--from {host}:{}", image.display());
    if let Some(id) = rewake_image_transfer::pull::complete_image(directory, id)? {
        let directory = directory.display();
        view.say(&format!("{directory}: it has image {id} already: {host} was not asked\n"));
        return Ok(None);
    }
    let addresses = (host.as_str(), port).to_socket_addrs().with_context(|| what.clone())?;
    let mut addresses: Vec<SocketAddr> = addresses.collect();
    let tls = peer_tls(&options.source.tls, &host)?;
    let client = tls.as_ref().map(PeerTls::client).transpose()?;
    if tls.is_none() {
        warn_unencrypted(&host, &addresses);
    }
    let reached = Rc::new(Cell::new(None));
    let last = Rc::clone(&reached);
    let connect = move || {
        let stream = connect(&host, port, client.as_ref())?;
        last.set(stream.socket().peer_addr().ok());
        Ok(Box::new(stream) as _)
    };
    let mut source = ImageSource::open(connect, &image).with_context(|| what.clone())?;
    let report = pull_eager(&mut source, directory, id, &signers).with_context(|| what.clone())?;
    if report.left == 0 {
        return Ok(None);
    }
    let [sent, left] = [report.sent, report.left].map(units::bytes);
    view.say(&format!("{sent} were sent; the program runs while {left} arrive\n"));
    let gpus = image_has_gpu(directory).with_context(|| format!("reading {}", directory.display()))?;
    if gpus && let Some(reason) = LaunchPlan::eager_reason(plugins(true)?.as_deref(), PLUGIN_REMEDY)? {
        view.say(&format!("all of the image is copied before the processes run: {reason}\n"));
        pull(&mut source, directory, id, &signers).with_context(|| what.clone())?;
        return Ok(None);
    }
    // The fetcher tries them in turn, and page faults wait.
    addresses.sort_by_key(|address| Some(*address) != reached.get());
    let image = FetchedImage { name: image, id: report.id.to_string() };
    let server = MemoryServer::Host(ImageServerAddress { addresses, image, tls });
    Ok(Some(LaunchPlan::from_server(gpus, server, files)))
}

/// What the options of TLS say, with absolute paths: the streamer and its fetcher run in another directory.
fn peer_tls(options: &TlsArgs, host: &str) -> anyhow::Result<Option<PeerTls>> {
    let Some(given) = options.options() else { return Ok(None) };
    let absolute = |path: Option<PathBuf>| path.map(absolute).transpose();
    let options = TlsOptions {
        ca: absolute(given.ca)?,
        crl: absolute(given.crl)?,
        certificate: absolute(given.certificate)?,
        key: absolute(given.key)?,
        any_name: given.any_name,
    };
    Ok(Some(PeerTls { options, host: Some(host.to_owned()) }))
}
