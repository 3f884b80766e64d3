// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a fetcher fetches: the peer, and the memory there that each page of the presence map is.
//!
//! The streamer writes it into a memory file. A fetcher that is started again gets the same one. All numbers
//! have the byte order of the machine:
//!
//! ```text
//! MAGIC [8], bytes of the presence map's files u64, peer: length u32, bytes, TLS: length u32, bytes
//! length of a header u32 (0: an image server)
//! page server: extents u64, each: first page of the map u64, address u64, pages u64, pid u32; then files
//! image server: image: length u32, bytes, id [32]; then files
//! files u64, each: first page of the map u64, length u64, number u32
//! ```

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Digest, PAGE};
use rewake_criu_tls::{TlsClient, TlsOptions};
use rewake_image_io::block_checksum;
use rewake_page_protocol::{HeaderLayout, file_task};

use crate::queue::BLOCK_PAGES;

const MAGIC: [u8; 8] = *b"rewakefr";
/// Bytes of the longest address of a peer.
const MAX_PEER: usize = 4096;
/// Bytes of the longest options of TLS: four paths and a name.
const MAX_TLS: usize = 5 * 4096;
/// Bytes of an extent.
const EXTENT: usize = 28;
/// Bytes of a file of an image.
const FILE: usize = 20;

/// The server that has the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PagePeer {
    /// A TCP port: the addresses of one host.
    Tcp(Vec<SocketAddr>),
    /// A unix socket.
    Unix(PathBuf),
    /// A connection that the caller has made (`--ps-socket`): there is no second one.
    Connected,
    /// The node agent with this control socket has the fetcher, which other streamers share.
    Agent(PathBuf),
}

/// How the connection is encrypted.
///
/// A fetcher reads the files before it is confined, and again after a restart. The plan has their paths, not
/// their contents: the restored processes hold the plan's descriptor, too.
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
    /// The first page of the presence map, and of the cache file.
    pub first: u64,
    /// The address at the dump.
    pub vaddr: u64,
    /// Number of pages.
    pub pages: u64,
    /// The task, by the pid in its images.
    pub pid: u32,
}

/// A file of an image whose missing bytes the peer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseFile {
    /// Its first page in the presence map: the first of a block.
    pub first: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its number at the peer: in the manifest, from 1; or among the files that a source of a migration has.
    pub number: u32,
}

/// What the peer is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchedMemory {
    /// Pages of tasks, of a page server. They are written into one cache file.
    Pages {
        /// The layout of its headers: that of the CRIU that made the image.
        layout: HeaderLayout,
        /// The pages, in the order of the cache file.
        extents: Vec<FetchExtent>,
        /// Files that it has too, and that are written into the same files of this host. They are after the
        /// cache file in the presence map. Only a source of a migration has some: each is requested as a
        /// [task](file_task).
        files: Vec<SparseFile>,
    },
    /// Blocks of files, of an image server. They are written into the same files of this host.
    Files {
        /// The name of the image there.
        image: PathBuf,
        /// Its id.
        id: Digest,
        /// The files, in the order of the presence map.
        files: Vec<SparseFile>,
    },
}

/// What a fetcher fetches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchPlan {
    /// The peer.
    pub peer: PagePeer,
    /// How the connection is encrypted; none: it is not.
    pub tls: Option<PeerTls>,
    /// Bytes that the presence map is for: of the cache file, or of all files, each up to the border of a
    /// block.
    pub len: u64,
    /// What is fetched.
    pub memory: FetchedMemory,
}

/// Where a page is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WritePlace {
    /// The index of the file.
    pub(crate) file: usize,
    /// The offset in the file.
    pub(crate) offset: u64,
    /// Bytes from there to the end of the file: a page server sends zeros after it.
    pub(crate) room: u64,
}

impl SparseFile {
    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE)
    }
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
            Self::Agent(path) => write!(f, "the node agent {}", path.display()),
        }
    }
}

impl PagePeer {
    fn to_bytes(&self) -> anyhow::Result<Vec<u8>> {
        let at = |kind: &[u8], path: &Path| [kind, path.as_os_str().as_bytes()].concat();
        let bytes = match self {
            Self::Tcp(addresses) => {
                let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                format!("tcp {}", addresses.join(" ")).into_bytes()
            }
            Self::Unix(path) => at(b"unix ", path),
            Self::Connected => b"connected ".to_vec(),
            Self::Agent(path) => at(b"agent ", path),
        };
        ensure!(bytes.len() <= MAX_PEER, "a peer's address of {} bytes, more than {MAX_PEER}", bytes.len());
        Ok(bytes)
    }

    fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let mut parts = bytes.splitn(2, |byte| *byte == b' ');
        let (kind, rest) = parts.next().zip(parts.next()).context("a peer's address")?;
        Ok(match kind {
            b"tcp" => Self::Tcp(str::from_utf8(rest)?.split(' ').map(str::parse).collect::<Result<_, _>>()?),
            b"unix" => Self::Unix(path(rest)),
            b"connected" => Self::Connected,
            b"agent" => Self::Agent(path(rest)),
            _ => bail!("a peer of the unknown kind {}", kind.escape_ascii()),
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
    fn to_bytes(&self) -> anyhow::Result<Vec<u8>> {
        let TlsOptions { ca, crl, certificate, key, any_name } = &self.options;
        let any_name = if *any_name { "any" } else { "" };
        let mut fields = vec![any_name.as_bytes(), self.host.as_deref().unwrap_or_default().as_bytes()];
        for path in [ca, crl, certificate, key] {
            fields.push(path.as_ref().map_or(&[][..], |path| path.as_os_str().as_bytes()));
        }
        let bytes = fields.join(&0_u8);
        ensure!(bytes.len() <= MAX_TLS, "options of TLS of {} bytes, more than {MAX_TLS}", bytes.len());
        Ok(bytes)
    }

    fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let fields: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
        let [any_name, host, ca, crl, certificate, key] = fields[..] else { bail!("the options of TLS") };
        let [ca, crl, certificate, key] =
            [ca, crl, certificate, key].map(|field| (!field.is_empty()).then(|| path(field)));
        let options = TlsOptions { ca, crl, certificate, key, any_name: !any_name.is_empty() };
        let host = str::from_utf8(host).context("the host of TLS")?;
        Ok(Self { options, host: (!host.is_empty()).then(|| host.to_owned()) })
    }
}

impl FetchPlan {
    /// Returns the peer's name for messages.
    #[must_use]
    pub fn peer_name(&self) -> String {
        match &self.memory {
            FetchedMemory::Files { id, .. } if matches!(self.peer, PagePeer::Agent(_)) => {
                format!("{}, image {id}", self.peer)
            }
            FetchedMemory::Pages { .. } => format!("page server {}", self.peer),
            FetchedMemory::Files { image, .. } => {
                format!("image server {}, image {}", self.peer, image.display())
            }
        }
    }

    /// Returns the number of files that are written.
    #[must_use]
    pub fn files(&self) -> usize {
        match &self.memory {
            FetchedMemory::Pages { files, .. } => 1 + files.len(),
            FetchedMemory::Files { files, .. } => files.len(),
        }
    }

    /// Returns what a page server is asked for: pages of tasks, and files in the place of tasks. None of an
    /// image server.
    pub(crate) fn page_extents(&self) -> Vec<FetchExtent> {
        let FetchedMemory::Pages { extents, files, .. } = &self.memory else { return Vec::new() };
        let of_file = |file: &SparseFile| {
            let pid = file_task(file.number)?;
            Some(FetchExtent { first: file.first, vaddr: 0, pages: file.pages(), pid })
        };
        extents.iter().copied().chain(files.iter().filter_map(of_file)).collect()
    }

    /// Returns a checksum of where each file is in the presence map: streamers that share a map must agree on
    /// it.
    #[must_use]
    pub fn layout(&self) -> u64 {
        let FetchedMemory::Files { files, .. } = &self.memory else { return 0 };
        let numbers = files.iter().flat_map(|file| [file.first, file.len, file.number.into()]);
        let bytes: Vec<u8> = [self.len].into_iter().chain(numbers).flat_map(u64::to_ne_bytes).collect();
        block_checksum(&bytes)
    }

    /// Returns the runs of pages of the presence map that can be requested.
    pub(crate) fn runs(&self) -> Vec<Range<u64>> {
        match &self.memory {
            FetchedMemory::Pages { .. } => {
                self.page_extents().iter().map(|extent| extent.first..extent.first + extent.pages).collect()
            }
            FetchedMemory::Files { files, .. } => {
                files.iter().map(|file| file.first..file.first + file.pages()).collect()
            }
        }
    }

    /// Returns where a page of the presence map is written.
    pub(crate) fn place(&self, page: u64) -> WritePlace {
        let (FetchedMemory::Pages { files, .. } | FetchedMemory::Files { files, .. }) = &self.memory;
        let (after, cache) = (files.partition_point(|file| file.first <= page), self.files() - files.len());
        match after.checked_sub(1).and_then(|at| Some((at, files.get(at)?))) {
            Some((at, file)) => {
                let offset = (page - file.first) * PAGE;
                WritePlace { file: cache + at, offset, room: file.len.saturating_sub(offset) }
            }
            None => WritePlace { file: 0, offset: page * PAGE, room: u64::MAX },
        }
    }

    /// Writes the plan into a memory file.
    ///
    /// # Errors
    /// ENOMEM; or a path or a name is too long.
    pub fn write(&self, memory: &File) -> anyhow::Result<()> {
        let mut out = BufWriter::new(memory);
        out.write_all(&MAGIC)?;
        out.write_all(&self.len.to_ne_bytes())?;
        let tls = self.tls.as_ref().map(PeerTls::to_bytes).transpose()?.unwrap_or_default();
        for of in [self.peer.to_bytes()?, tls] {
            write_bytes(&mut out, &of)?;
        }
        match &self.memory {
            FetchedMemory::Pages { layout, extents, files } => {
                out.write_all(&u32::try_from(layout.len())?.to_ne_bytes())?;
                out.write_all(&(extents.len() as u64).to_ne_bytes())?;
                for extent in extents {
                    for value in [extent.first, extent.vaddr, extent.pages] {
                        out.write_all(&value.to_ne_bytes())?;
                    }
                    out.write_all(&extent.pid.to_ne_bytes())?;
                }
                write_files(&mut out, files)?;
            }
            FetchedMemory::Files { image, id, files } => {
                out.write_all(&0u32.to_ne_bytes())?;
                let name = image.as_os_str().as_bytes();
                let length = name.len();
                ensure!(length <= MAX_PEER, "an image's name of {length} bytes, more than {MAX_PEER}");
                write_bytes(&mut out, name)?;
                out.write_all(&id.0)?;
                write_files(&mut out, files)?;
            }
        }
        Ok(out.flush()?)
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// It is no plan, or what it has is not in order inside the presence map.
    pub fn read(memory: &File) -> anyhow::Result<Self> {
        let len = usize::try_from(memory.metadata()?.len())?;
        let mut bytes = vec![0; len];
        memory.read_exact_at(&mut bytes, 0)?;
        let mut input = bytes.as_slice();
        ensure!(array::<8>(&mut input)? == MAGIC, "expected the magic number of a fetch plan");
        let len = u64::from_ne_bytes(array(&mut input)?);
        let peer = PagePeer::parse(read_bytes(&mut input).context("the peer's address")?)?;
        let tls = Some(read_bytes(&mut input).context("the options of TLS")?).filter(|tls| !tls.is_empty());
        let tls = tls.map(PeerTls::parse).transpose()?;
        let layouts = [HeaderLayout::Narrow, HeaderLayout::Wide];
        let header = u32::from_ne_bytes(array(&mut input)?) as usize;
        let memory = match layouts.into_iter().find(|layout| layout.len() == header) {
            Some(layout) => {
                FetchedMemory::Pages { layout, extents: extents(&mut input)?, files: files(&mut input)? }
            }
            None if header == 0 => {
                let image = path(read_bytes(&mut input).context("the image's name")?);
                FetchedMemory::Files { image, id: Digest(array(&mut input)?), files: files(&mut input)? }
            }
            None => bail!("headers of {header} bytes"),
        };
        ensure!(input.is_empty(), "{} bytes after a fetch plan", input.len());
        let plan = Self { peer, tls, len, memory };
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> anyhow::Result<()> {
        let (FetchedMemory::Pages { files, .. } | FetchedMemory::Files { files, .. }) = &self.memory;
        let pages = self.len / PAGE;
        for SparseFile { first, number, .. } in files {
            ensure!(
                first.is_multiple_of(BLOCK_PAGES) && file_task(*number).is_some(),
                "file {number} at page {first:#x} of a presence map: expected the border of a block"
            );
        }
        let mut end = 0;
        for run in self.runs() {
            let inside = !run.is_empty() && run.start >= end && run.end <= pages;
            ensure!(inside, "pages {run:x?} after page {end:#x} of a presence map of {pages} pages");
            end = run.end;
        }
        Ok(())
    }
}

fn extents(input: &mut &[u8]) -> anyhow::Result<Vec<FetchExtent>> {
    let count = count(input, EXTENT)?;
    let mut extents = Vec::with_capacity(count);
    for _ in 0..count {
        let [first, vaddr, pages] = [(); 3].map(|()| array(input).map(u64::from_ne_bytes));
        let (first, vaddr, pages) = (first?, vaddr?, pages?);
        first.checked_add(pages).context("an extent that ends nowhere")?;
        extents.push(FetchExtent { first, vaddr, pages, pid: u32::from_ne_bytes(array(input)?) });
    }
    Ok(extents)
}

fn files(input: &mut &[u8]) -> anyhow::Result<Vec<SparseFile>> {
    let count = count(input, FILE)?;
    let mut files = Vec::with_capacity(count);
    for _ in 0..count {
        let [first, len] = [(); 2].map(|()| array(input).map(u64::from_ne_bytes));
        let (first, len) = (first?, len?);
        first.checked_add(len).context("a file that ends nowhere")?;
        files.push(SparseFile { first, len, number: u32::from_ne_bytes(array(input)?) });
    }
    Ok(files)
}

/// Reads a number of records of this length, which must be in the plan.
fn count(input: &mut &[u8], record: usize) -> anyhow::Result<usize> {
    let count = usize::try_from(u64::from_ne_bytes(array(input)?))?;
    ensure!(count <= input.len() / record, "{count} records in {} bytes", input.len());
    Ok(count)
}

fn write_files(out: &mut impl Write, files: &[SparseFile]) -> io::Result<()> {
    out.write_all(&(files.len() as u64).to_ne_bytes())?;
    for file in files {
        for value in [file.first, file.len] {
            out.write_all(&value.to_ne_bytes())?;
        }
        out.write_all(&file.number.to_ne_bytes())?;
    }
    Ok(())
}

fn write_bytes(out: &mut impl Write, bytes: &[u8]) -> anyhow::Result<()> {
    out.write_all(&u32::try_from(bytes.len())?.to_ne_bytes())?;
    Ok(out.write_all(bytes)?)
}

fn array<const N: usize>(input: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_bytes<'a>(input: &mut &'a [u8]) -> anyhow::Result<&'a [u8]> {
    let len = u32::from_ne_bytes(array(input)?) as usize;
    let (bytes, rest) = input.split_at_checked(len).context("the length of a name")?;
    *input = rest;
    Ok(bytes)
}

fn path(bytes: &[u8]) -> PathBuf {
    OsStr::from_bytes(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(peer: PagePeer) -> FetchPlan {
        let extent = |first, vaddr, pages| FetchExtent { first, vaddr, pages, pid: 7 };
        let extents = vec![extent(0, 0x1000, 3), extent(16, 0x9000_0000, 1)];
        let memory = FetchedMemory::Pages { layout: HeaderLayout::Narrow, extents, files: Vec::new() };
        FetchPlan { peer, tls: None, len: 17 * PAGE, memory }
    }

    /// Pages of a task, and two files after the border of blocks.
    fn with_files(files: Vec<SparseFile>) -> FetchPlan {
        let extents = vec![FetchExtent { first: 0, vaddr: 0x1000, pages: 3, pid: 7 }];
        let memory = FetchedMemory::Pages { layout: HeaderLayout::Wide, extents, files };
        FetchPlan { peer: PagePeer::Unix("/a".into()), tls: None, len: 48 * PAGE, memory }
    }

    fn of_files(files: Vec<SparseFile>) -> FetchPlan {
        let memory = FetchedMemory::Files { image: path(b"web/\xe9"), id: Digest([7; 32]), files };
        FetchPlan { peer: PagePeer::Connected, tls: None, len: 32 * PAGE, memory }
    }

    fn two_files() -> Vec<SparseFile> {
        let file = |first, len, number| SparseFile { first, len, number };
        vec![file(0, 3 * PAGE, 4), file(16, 15 * PAGE + 1, 9)]
    }

    fn reread(plan: &FetchPlan) -> anyhow::Result<FetchPlan> {
        let file = tempfile::tempfile()?;
        plan.write(&file)?;
        FetchPlan::read(&file)
    }

    #[test]
    fn what_is_written_is_read() {
        let addresses = ["127.0.0.1:90", "[::1]:90"].map(|address| address.parse().unwrap());
        let peers =
            [PagePeer::Tcp(addresses.into()), PagePeer::Unix(path(b"/a b/caf\xe9")), PagePeer::Connected];
        for plan in peers.map(plan) {
            assert_eq!(reread(&plan).unwrap(), plan);
        }
    }

    #[test]
    fn options_of_tls_that_are_written_are_read() {
        let files = TlsOptions {
            ca: Some(path(b"/c a\xff")),
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
    fn files_that_are_written_are_read_and_found_by_pages() {
        let plan = of_files(two_files());
        assert_eq!(reread(&plan).unwrap(), plan);
        assert_eq!(plan.runs(), [0..3, 16..32]);
        let place = |file, offset, room| WritePlace { file, offset, room };
        let places = [plan.place(2), plan.place(16), plan.place(31)];
        let whole = 15 * PAGE + 1;
        assert_eq!(places, [place(0, 2 * PAGE, PAGE), place(1, 0, whole), place(1, 15 * PAGE, 1)]);
    }

    #[test]
    fn files_beside_the_cache_file_are_requested_as_tasks() {
        let file = |first, len, number| SparseFile { first, len, number };
        let plan = with_files(vec![file(16, 2 * PAGE + 8, 0), file(32, PAGE, 1)]);
        assert_eq!(reread(&plan).unwrap(), plan);
        assert_eq!((plan.files(), plan.runs()), (3, vec![0..3, 16..19, 32..33]));
        let of = plan.page_extents();
        let tasks = [1, 2].map(|at: usize| (of[at].pid, of[at].vaddr, of[at].pages));
        assert_eq!(tasks, [(file_task(0).unwrap(), 0, 3), (file_task(1).unwrap(), 0, 1)]);
        let place = |file, offset, room| WritePlace { file, offset, room };
        assert_eq!(plan.place(2), place(0, 2 * PAGE, u64::MAX));
        assert_eq!([plan.place(18), plan.place(32)], [place(1, 2 * PAGE, 8), place(2, 0, PAGE)]);
        for bad in [file(17, PAGE, 0), file(0, PAGE, 0), file(48, PAGE, 0), file(16, PAGE, u32::MAX)] {
            assert!(reread(&with_files(vec![bad])).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn extents_and_files_that_overlap_or_are_outside_are_refused() {
        let spoiled = |spoil: &dyn Fn(&mut Vec<FetchExtent>)| {
            let mut plan = plan(PagePeer::Connected);
            let FetchedMemory::Pages { extents, .. } = &mut plan.memory else { panic!("{plan:?}") };
            spoil(extents);
            plan
        };
        let file = |first, len| of_files(vec![SparseFile { first, len, number: 1 }]);
        let bad = [
            spoiled(&|extents| extents[1].first = 2),
            spoiled(&|extents| extents[1].pages = 2),
            spoiled(&|extents| extents[1].pages = u64::MAX),
            file(16, 17 * PAGE),
            file(3, PAGE),
            file(0, 0),
            file(16, u64::MAX - 16),
            of_files(two_files().into_iter().rev().collect()),
        ];
        for bad in bad {
            assert!(reread(&bad).is_err(), "{bad:?}");
        }
    }
}
