// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a fetcher fetches: the peer, and the pages that the bytes of the cache file are.
//!
//! The streamer writes it into a memory file. A fetcher that is started again gets the same one. All numbers have the
//! byte order of the machine:
//!
//! ```text
//! MAGIC [8], header length u32, cache length u64, peer: length u32, text, TLS: length u32, text
//! extents u64, each: first page of the cache u64, address u64, pages u64, pid u32
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::PAGE;
use rewake_criu_tls::{TlsClient, TlsOptions};
use rewake_page_protocol::HeaderLayout;

const MAGIC: [u8; 8] = *b"rewakefq";
/// Bytes of the longest text of a peer.
const MAX_PEER: usize = 4096;
/// Bytes of the longest text of the options of TLS: four paths and a name.
const MAX_TLS: usize = 5 * 4096;
/// Bytes of an extent.
const EXTENT: usize = 28;

/// The page server that has the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PagePeer {
    /// A TCP port: the addresses of one host.
    Tcp(Vec<SocketAddr>),
    /// A unix socket.
    Unix(PathBuf),
    /// A connection that the caller has made (`--ps-socket`): there is no second one.
    Connected,
}

/// How the connection is encrypted.
///
/// A fetcher reads the files before it is confined, and again after a restart. The plan has their paths, not their
/// contents: the restored processes hold the plan's descriptor, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTls {
    /// The files, with absolute paths, and the rules.
    pub options: TlsOptions,
    /// The host that the peer's certificate must be for: what the user gave as its address.
    pub host: Option<String>,
}

/// Pages that are contiguous in the cache file and in a task's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchExtent {
    /// The first page of the cache file.
    pub first: u64,
    /// The address at the dump.
    pub vaddr: u64,
    /// Number of pages.
    pub pages: u64,
    /// The task, by the pid in its images.
    pub pid: u32,
}

/// What a fetcher fetches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchPlan {
    /// The peer.
    pub peer: PagePeer,
    /// How the connection is encrypted; none: it is not.
    pub tls: Option<PeerTls>,
    /// The layout of its headers: that of the CRIU that made the image.
    pub layout: HeaderLayout,
    /// Bytes of the cache file.
    pub cache: u64,
    /// The pages, in the order of the cache file.
    pub extents: Vec<FetchExtent>,
}

impl std::fmt::Display for PagePeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(addresses) => match addresses.first() {
                Some(address) => write!(f, "{address}"),
                None => write!(f, "no address"),
            },
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Connected => write!(f, "--ps-socket"),
        }
    }
}

impl PagePeer {
    fn to_text(&self) -> anyhow::Result<String> {
        let text = match self {
            Self::Tcp(addresses) => {
                let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                format!("tcp {}", addresses.join(" "))
            }
            Self::Unix(path) => format!("unix {}", path.to_str().context("a path that is no text")?),
            Self::Connected => "connected ".to_owned(),
        };
        ensure!(text.len() <= MAX_PEER, "a peer's address of {} bytes, more than {MAX_PEER}", text.len());
        Ok(text)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let (kind, rest) = text.split_once(' ').context("a peer's address")?;
        Ok(match kind {
            "tcp" => Self::Tcp(rest.split(' ').map(str::parse).collect::<Result<_, _>>()?),
            "unix" => Self::Unix(rest.into()),
            "connected" => Self::Connected,
            _ => bail!("a peer of the unknown kind {kind}"),
        })
    }
}

impl PeerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// A file is missing or damaged, or the host is no name.
    pub fn client(&self) -> anyhow::Result<TlsClient> {
        TlsClient::new(&self.options, self.host.as_deref())
    }

    /// Joins all fields by zero bytes, which no path has. An empty field: none.
    fn to_text(&self) -> anyhow::Result<String> {
        let TlsOptions { ca, crl, certificate, key, any_name } = &self.options;
        let mut fields = vec![if *any_name { "any" } else { "" }, self.host.as_deref().unwrap_or_default()];
        for path in [ca, crl, certificate, key] {
            let path = path.as_deref().unwrap_or_else(|| Path::new(""));
            fields.push(
                path.to_str()
                    .with_context(|| format!("--tls: a path that is no text: {}", path.display()))?,
            );
        }
        let text = fields.join("\0");
        ensure!(text.len() <= MAX_TLS, "options of TLS of {} bytes, more than {MAX_TLS}", text.len());
        Ok(text)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let fields: Vec<&str> = text.split('\0').collect();
        let [any_name, host, ca, crl, certificate, key] = fields[..] else { bail!("the options of TLS") };
        let given = |field: &str| (!field.is_empty()).then(|| field.to_owned());
        let [ca, crl, certificate, key] =
            [ca, crl, certificate, key].map(|path| given(path).map(PathBuf::from));
        let options = TlsOptions { ca, crl, certificate, key, any_name: !any_name.is_empty() };
        Ok(Self { options, host: given(host) })
    }
}

impl FetchPlan {
    /// Writes the plan into a memory file.
    ///
    /// # Errors
    /// ENOMEM; or a path is too long.
    pub fn write(&self, memory: &File) -> anyhow::Result<()> {
        let peer = self.peer.to_text()?;
        let mut out = BufWriter::new(memory);
        out.write_all(&MAGIC)?;
        out.write_all(&u32::try_from(self.layout.len())?.to_ne_bytes())?;
        out.write_all(&self.cache.to_ne_bytes())?;
        let tls = self.tls.as_ref().map(PeerTls::to_text).transpose()?.unwrap_or_default();
        for text in [peer, tls] {
            out.write_all(&u32::try_from(text.len())?.to_ne_bytes())?;
            out.write_all(text.as_bytes())?;
        }
        out.write_all(&(self.extents.len() as u64).to_ne_bytes())?;
        for extent in &self.extents {
            for value in [extent.first, extent.vaddr, extent.pages] {
                out.write_all(&value.to_ne_bytes())?;
            }
            out.write_all(&extent.pid.to_ne_bytes())?;
        }
        Ok(out.flush()?)
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// It is no plan, or its extents are not in order inside the cache file.
    pub fn read(memory: &File) -> anyhow::Result<Self> {
        let len = usize::try_from(memory.metadata()?.len())?;
        let mut bytes = vec![0; len];
        memory.read_exact_at(&mut bytes, 0)?;
        let mut input = bytes.as_slice();
        ensure!(array::<8>(&mut input)? == MAGIC, "expected the magic number of a fetch plan");
        let layout = match u32::from_ne_bytes(array(&mut input)?) as usize {
            len if len == HeaderLayout::Narrow.len() => HeaderLayout::Narrow,
            len if len == HeaderLayout::Wide.len() => HeaderLayout::Wide,
            len => bail!("headers of {len} bytes"),
        };
        let cache = u64::from_ne_bytes(array(&mut input)?);
        let peer = PagePeer::parse(text(&mut input).context("the peer's address")?)?;
        let tls = Some(text(&mut input).context("the options of TLS")?).filter(|text| !text.is_empty());
        let tls = tls.map(PeerTls::parse).transpose()?;
        let count = usize::try_from(u64::from_ne_bytes(array(&mut input)?))?;
        ensure!(count.checked_mul(EXTENT) == Some(input.len()), "{count} extents in {} bytes", input.len());
        let mut extents = Vec::with_capacity(count);
        for _ in 0..count {
            let [first, vaddr, pages] = [(); 3].map(|()| array(&mut input).map(u64::from_ne_bytes));
            let (first, vaddr, pages) = (first?, vaddr?, pages?);
            extents.push(FetchExtent { first, vaddr, pages, pid: u32::from_ne_bytes(array(&mut input)?) });
        }
        check(&extents, cache)?;
        Ok(Self { peer, tls, layout, cache, extents })
    }
}

fn check(extents: &[FetchExtent], cache: u64) -> anyhow::Result<()> {
    let mut end = 0;
    for extent in extents {
        let stop = extent.first.checked_add(extent.pages).context("an extent that ends nowhere")?;
        let inside = extent.pages > 0 && extent.first >= end && stop <= cache / PAGE;
        ensure!(inside, "{extent:x?} after page {end:#x} of a cache file of {cache} bytes");
        end = stop;
    }
    Ok(())
}

fn array<const N: usize>(input: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn text<'a>(input: &mut &'a [u8]) -> anyhow::Result<&'a str> {
    let len = u32::from_ne_bytes(array(input)?) as usize;
    let (text, rest) = input.split_at_checked(len).context("a text's length")?;
    *input = rest;
    Ok(str::from_utf8(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(peer: PagePeer) -> FetchPlan {
        let extent = |first, vaddr, pages| FetchExtent { first, vaddr, pages, pid: 7 };
        let extents = vec![extent(0, 0x1000, 3), extent(16, 0x9000_0000, 1)];
        FetchPlan { peer, tls: None, layout: HeaderLayout::Narrow, cache: 17 * PAGE, extents }
    }

    fn reread(plan: &FetchPlan) -> anyhow::Result<FetchPlan> {
        let file = tempfile::tempfile()?;
        plan.write(&file)?;
        FetchPlan::read(&file)
    }

    #[test]
    fn what_is_written_is_read() {
        let addresses = ["127.0.0.1:90", "[::1]:90"].map(|address| address.parse().unwrap());
        let peers = [PagePeer::Tcp(addresses.into()), PagePeer::Unix("/a b/c".into()), PagePeer::Connected];
        for plan in peers.map(plan) {
            assert_eq!(reread(&plan).unwrap(), plan);
        }
    }

    #[test]
    fn options_of_tls_that_are_written_are_read() {
        let files = TlsOptions {
            ca: Some("/c a".into()),
            crl: None,
            certificate: Some("/x\n".into()),
            key: Some("/k".into()),
            any_name: false,
        };
        let any = TlsOptions { any_name: true, crl: Some("/r".into()), ..TlsOptions::default() };
        for (options, host) in [(files, Some("host-a".to_owned())), (any, None)] {
            let mut plan = plan(PagePeer::Connected);
            plan.tls = Some(PeerTls { options, host });
            assert_eq!(reread(&plan).unwrap(), plan);
        }
    }

    #[test]
    fn extents_that_overlap_or_are_outside_are_refused() {
        let mut overlapping = plan(PagePeer::Connected);
        overlapping.extents[1].first = 2;
        let mut outside = plan(PagePeer::Connected);
        outside.extents[1].pages = 2;
        for bad in [overlapping, outside] {
            assert!(reread(&bad).is_err(), "{bad:?}");
        }
    }
}
