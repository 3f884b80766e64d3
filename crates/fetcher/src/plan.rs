// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a fetcher fetches: the peer, and the pages that the bytes of the cache file are.
//!
//! The streamer writes it into a memory file. A fetcher that is started again gets the same one. All numbers have the
//! byte order of the machine:
//!
//! ```text
//! MAGIC [8], header length u32, cache length u64, peer: length u32, text
//! extents u64, each: first page of the cache u64, address u64, pages u64, pid u32
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::PAGE;
use rewake_page_protocol::HeaderLayout;

const MAGIC: [u8; 8] = *b"rewakefp";
/// Bytes of the longest text of a peer.
const MAX_PEER: usize = 4096;
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

impl FetchPlan {
    /// Writes the plan into a memory file.
    ///
    /// # Errors
    /// ENOMEM; or the path of the peer is too long.
    pub fn write(&self, memory: &File) -> anyhow::Result<()> {
        let peer = self.peer.to_text()?;
        let mut out = BufWriter::new(memory);
        out.write_all(&MAGIC)?;
        out.write_all(&u32::try_from(self.layout.len())?.to_ne_bytes())?;
        out.write_all(&self.cache.to_ne_bytes())?;
        out.write_all(&u32::try_from(peer.len())?.to_ne_bytes())?;
        out.write_all(peer.as_bytes())?;
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
        let peer = u32::from_ne_bytes(array(&mut input)?) as usize;
        let (peer, rest) = input.split_at_checked(peer).context("the peer's address")?;
        input = rest;
        let peer = PagePeer::parse(str::from_utf8(peer)?)?;
        let count = usize::try_from(u64::from_ne_bytes(array(&mut input)?))?;
        ensure!(count.checked_mul(EXTENT) == Some(input.len()), "{count} extents in {} bytes", input.len());
        let mut extents = Vec::with_capacity(count);
        for _ in 0..count {
            let [first, vaddr, pages] = [(); 3].map(|()| array(&mut input).map(u64::from_ne_bytes));
            let (first, vaddr, pages) = (first?, vaddr?, pages?);
            extents.push(FetchExtent { first, vaddr, pages, pid: u32::from_ne_bytes(array(&mut input)?) });
        }
        check(&extents, cache)?;
        Ok(Self { peer, layout, cache, extents })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(peer: PagePeer) -> FetchPlan {
        let extent = |first, vaddr, pages| FetchExtent { first, vaddr, pages, pid: 7 };
        let extents = vec![extent(0, 0x1000, 3), extent(16, 0x9000_0000, 1)];
        FetchPlan { peer, layout: HeaderLayout::Narrow, cache: 17 * PAGE, extents }
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
