// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake pull`: copies a sealed image from another host or from a store, or seals the image of an archive.

use std::io::{self};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_checkpoint_archive::{ExtractReport, extract};
use rewake_criu_tls::TlsClient;
use rewake_image_signature::Signers;
use rewake_image_store::{ImageStore, ImageUrl, StoreSource};
use rewake_image_transfer::pull::{ImageSource, PullReport, pull};
use rewake_manifest::seal;
use rewake_peer_stream::{self as peer_stream, PATIENT, PeerStream, watch_peer};
use rewake_streamer::units;

use super::{print, store_runtime};
use crate::cli::{PullArgs, PullSource, RemoteImage};
use crate::logging;

/// Time until the server accepts a connection, and in which it must send bytes of a read.
const SERVER_LIMIT: Duration = Duration::from_secs(60);

/// Runs the command; gives the exit code.
///
/// # Errors
/// See [`pull()`].
pub fn run(options: &PullArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let start = Instant::now();
    let report = match &options.image {
        PullSource::Server(image) => from_server(options, image)?,
        PullSource::Store(image) => from_store(options, image)?,
        PullSource::Archive(archive) => return from_archive(options, archive),
    };
    let PullReport { id, files, bytes, sent, kept, left: _ } = report;
    let (directory, time) = (options.directory.display(), units::seconds(start.elapsed()));
    if sent == 0 {
        print::done(format!("{directory}: it has image {id} already"));
        return Ok(0);
    }
    let [bytes, sent, kept] = [bytes, sent, kept].map(units::bytes);
    print::done(format!(
        "{directory}: {files} files, {bytes} in {time}: {sent} were sent, {kept} were here; image {id}"
    ));
    Ok(0)
}

fn from_server(options: &PullArgs, image: &RemoteImage) -> anyhow::Result<PullReport> {
    let RemoteImage { host, image } = image.clone();
    let port = options.port;
    let what = format!("{host}:{}", image.display());
    let tls = options.tls.client(&host)?;
    if tls.is_none() {
        let addresses: Vec<SocketAddr> =
            (host.as_str(), port).to_socket_addrs().with_context(|| what.clone())?.collect();
        warn_unencrypted(&host, &addresses);
    }
    let connect = move || Ok(Box::new(connect(&host, port, tls.as_ref())?) as _);
    let mut source = ImageSource::open(connect, &image).with_context(|| what.clone())?;
    pull(&mut source, &options.directory, options.id.as_deref(), &signers(options)?).context(what)
}

fn from_store(options: &PullArgs, image: &ImageUrl) -> anyhow::Result<PullReport> {
    ensure!(!options.tls.tls, "{image}: --tls is for HOST:IMAGE: a store has TLS by its address");
    let runtime = store_runtime()?;
    let store = ImageStore::open(&image.store)?;
    let mut source = runtime.block_on(StoreSource::open(&store, &image.name))?;
    pull(&mut source, &options.directory, options.id.as_deref(), &signers(options)?)
        .with_context(|| image.to_string())
}

/// The signers that were given, and the signers of this node.
fn signers(options: &PullArgs) -> anyhow::Result<Vec<Signers>> {
    Ok(Signers::all(options.signers.as_slice())?)
}

/// Extracts CRIU's files from an archive, and seals them.
fn from_archive(options: &PullArgs, archive: &Path) -> anyhow::Result<u8> {
    let (directory, shown) = (&options.directory, archive.display());
    ensure!(!options.tls.tls, "{shown}: --tls is for HOST:IMAGE");
    ensure!(
        options.id.is_none(),
        "{shown}: --id is for sealed images: that of an archive gets its id when it is extracted"
    );
    ensure!(
        signers(options)?.is_empty(),
        "{shown}: an archive has no signature, and one is required: extract it where none is, and then sign \
         it with `rewake seal --sign`"
    );
    let start = Instant::now();
    let ExtractReport { files, bytes } = extract(archive, directory)?;
    let sealed =
        seal(directory).with_context(|| format!("{shown}: its image was extracted, but not sealed"))?;
    let (bytes, time) = (units::bytes(bytes), units::seconds(start.elapsed()));
    print::done(format!(
        "{}: {files} files, {bytes} in {time}, of {shown}; sealed as image {}",
        directory.display(),
        sealed.id
    ));
    Ok(0)
}

/// Says that the connection is not encrypted, if it is one with another host.
pub(super) fn warn_unencrypted(host: &str, addresses: &[SocketAddr]) {
    if addresses.iter().any(|address| !address.ip().is_loopback()) {
        print::say(format!(
            "the image travels unencrypted from {host}, and any host in between can read and change it: use \
             --tls"
        ));
    }
}

pub(super) fn connect(host: &str, port: u16, tls: Option<&TlsClient>) -> io::Result<PeerStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host}: no address of that name"));
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, SERVER_LIMIT) {
            Ok(socket) => {
                watch_peer(&socket, PATIENT)?;
                socket.set_write_timeout(Some(SERVER_LIMIT))?;
                let stream = peer_stream::connect(socket, tls)?;
                stream.socket().set_read_timeout(Some(SERVER_LIMIT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
