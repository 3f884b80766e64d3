// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program with one thread, buffers that its CPU can access, in VRAM where possible, and memory of its own.
//! By order it accesses the buffers, in user code or through the kernel, and registers its memory with the
//! driver. Orders are in the file `order` of its folder, answers in `answer`: `ok`, or what was wrong.
//!
//! `accessor FOLDER` makes the buffers. `accessor FOLDER COUNT MIB FULL` makes COUNT large ones instead,
//! which are zeros except for their last page unless FULL is `true`. `accessor FOLDER again` is what it
//! executes by order.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use gpu_app::kfd::{Buffer, Device, Spec, Userptr};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::topology::Topology;
use softgpu_tests::accessor::{BUFFERS, BYTES, LOOK, Large, READ, TAIL, pattern, pattern_of};

/// The number of the pattern in the first part of its own memory.
const OWN: usize = 7;
/// The signal for a child that accesses memory that it does not inherit.
const SIGSEGV: i32 = 11;
const EAGAIN: i32 = 11;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().context("usage: accessor FOLDER")?);
    let large = match arguments.next() {
        Some(again) if again == "again" => {
            answer(&folder, "ok")?;
            loop {
                thread::sleep(Duration::from_secs(1));
            }
        }
        Some(count) => {
            let mib = arguments.next().context("MIB")?.parse().context("MIB")?;
            let full = arguments.next().context("FULL")?.parse().context("FULL")?;
            Some(Large { count: count.parse().context("COUNT")?, mib, full })
        }
        None => None,
    };
    let topology = Topology::read()?;
    let node = topology.gpus().next().context("no GPU")?;
    let device = Device::open(&Arc::new(Kfd::open()?), node)?;
    let mut memories = Vec::new();
    for number in 0..large.map_or(BUFFERS, |large| large.count) {
        let spec = if node.has_large_bar() { Spec::vram } else { Spec::gtt };
        let bytes = large.map_or(BYTES, |large| large.mib << 20);
        let buffer = Buffer::mapped(&device, spec(bytes as u64))?;
        match large {
            Some(large) => {
                let at = large.pattern_at();
                buffer.cpu().write(at as u64, &pattern_of(number, bytes - at));
            }
            None => buffer.cpu().write(0, &pattern(number)),
        }
        memories.push(Memory {
            number,
            address: buffer.address(),
            bytes,
            large,
            given: Vec::new(),
            buffer: Some(buffer),
        });
    }
    let mut own = Own { device, memory: None, cleared: false };
    answer(&folder, "ok")?;
    loop {
        let path = folder.join("order");
        let Ok(order) = fs::read_to_string(&path) else {
            thread::sleep(LOOK);
            continue;
        };
        fs::remove_file(&path)?;
        let done = obey(&order, &mut memories, &mut own, &folder);
        answer(&folder, &done.map_or_else(|error| format!("{error:#}"), |()| "ok".to_owned()))?;
    }
}

/// Writes the file as a whole, or not at all.
fn answer(folder: &Path, text: &str) -> anyhow::Result<()> {
    let part = folder.join("answer.part");
    fs::write(&part, text)?;
    Ok(fs::rename(part, folder.join("answer"))?)
}

fn obey(order: &str, memories: &mut [Memory], own: &mut Own, folder: &Path) -> anyhow::Result<()> {
    let (what, number) = order.split_once(' ').context("WHAT NUMBER")?;
    let number = number.parse()?;
    if what == "allocate" {
        return own.allocate(number);
    }
    let memory = memories.get_mut(number).context("no such buffer")?;
    match what {
        "check" => memory.check(),
        "register" => own.register(),
        "own" => own.check(),
        "clear" => own.clear(),
        "export" => memory.export(),
        "tail" => memory.tail(),
        "write" => memory.write(&folder.join("out")),
        "read" => memory.read(&folder.join("in")),
        "move" => memory.moved(),
        "halve" => memory.halve(),
        "protect" => memory.protect(),
        "hide" => memory.hide(),
        "free" => memory.free(),
        "unmap" => memory.unmap(),
        "halve-write" => memory.halved().and_then(|()| memory.write(&folder.join("out"))),
        "fork" => memory.fork(),
        "bequeath" => memory.bequeath(&folder.join("child")),
        "execute" => Err(Command::new(std::env::current_exe()?).arg(folder).arg("again").exec().into()),
        "end" => std::process::exit(0),
        _ => bail!("{what}?"),
    }
}

/// Memory of the program itself, and the GPU that it is registered with.
struct Own {
    device: Arc<Device>,
    memory: Option<Mapping>,
    cleared: bool,
}

impl Own {
    /// Allocates `parts` parts, each as long as a buffer.
    fn allocate(&mut self, parts: usize) -> anyhow::Result<()> {
        let memory = Mapping::anonymous((parts * BYTES) as u64)?;
        (0..parts).for_each(|part| memory.write((part * BYTES) as u64, &pattern(OWN + part)));
        self.memory = Some(memory);
        Ok(())
    }

    /// Its first part becomes zeros, written as such.
    fn clear(&mut self) -> anyhow::Result<()> {
        self.memory.as_ref().context("no own memory")?.write(0, &vec![0; BYTES]);
        self.cleared = true;
        Ok(())
    }

    /// None of it has been read since it was written.
    fn register(&mut self) -> anyhow::Result<()> {
        let memory = self.memory.take().context("no own memory")?;
        let userptr = Userptr::register(&self.device, memory)?;
        self.is_as_written(userptr.cpu())
    }

    /// By user code, from its end: the background load begins at its start.
    fn check(&self) -> anyhow::Result<()> {
        self.is_as_written(self.memory.as_ref().context("no own memory")?)
    }

    fn is_as_written(&self, memory: &Mapping) -> anyhow::Result<()> {
        let mut found = vec![0; BYTES];
        for part in (0..usize::try_from(memory.len())? / BYTES).rev() {
            memory.read((part * BYTES) as u64, &mut found);
            let expected = if self.cleared && part == 0 { vec![0; BYTES] } else { pattern(OWN + part) };
            ensure!(found == expected, "its own memory has other bytes");
        }
        Ok(())
    }
}

/// A buffer, and where it is mapped.
struct Memory {
    number: usize,
    address: u64,
    bytes: usize,
    large: Option<Large>,
    /// Where bytes of a read go.
    given: Vec<u8>,
    /// None once it has been freed.
    buffer: Option<Buffer>,
}

impl Memory {
    fn bytes(&self) -> &[u8] {
        let start = std::ptr::with_exposed_provenance(usize::try_from(self.address).unwrap_or(0));
        // SAFETY: mapped by this program, which has one thread, and nothing writes to it during the borrow.
        unsafe { std::slice::from_raw_parts(start, self.bytes) }
    }

    /// Exports it as for another process; tries again as ROCm's library does.
    fn export(&self) -> anyhow::Result<()> {
        let buffer = self.buffer.as_ref().context("it has been freed")?;
        let mut said = false;
        loop {
            match buffer.export() {
                Err(error) if error.errno() == Some(EAGAIN) => {
                    if !said {
                        eprintln!("EAGAIN");
                    }
                    said = true;
                    thread::yield_now();
                }
                done => return Ok(done.map(drop)?),
            }
        }
    }

    fn expected(&self) -> Vec<u8> {
        let mut expected = pattern(self.number);
        expected[READ..READ + self.given.len()].copy_from_slice(&self.given);
        expected.truncate(self.bytes);
        expected
    }

    /// Checks it by user code.
    fn check(&self) -> anyhow::Result<()> {
        let expected = self.expected();
        let wrong = self.bytes().iter().zip(&expected).position(|(found, right)| found != right);
        if let Some(at) = wrong {
            bail!(
                "{:#x} at byte {at} of buffer {}, expected {:#x}",
                self.bytes()[at],
                self.number,
                expected[at]
            );
        }
        Ok(())
    }

    /// Checks the last page by user code.
    fn tail(&self) -> anyhow::Result<()> {
        let patterned = self.bytes - self.large.map_or(0, Large::pattern_at);
        let expected = pattern_of(self.number, patterned).split_off(patterned - TAIL);
        let found = &self.bytes()[self.bytes - TAIL..];
        ensure!(found == expected, "the last page of buffer {} has other bytes", self.number);
        Ok(())
    }

    /// The kernel reads it.
    fn write(&self, path: &Path) -> anyhow::Result<()> {
        File::create(path)?.write_all(self.bytes())?;
        ensure!(fs::read(path)? == self.expected(), "the kernel has read other bytes");
        Ok(())
    }

    /// The kernel writes to it.
    fn read(&mut self, path: &Path) -> anyhow::Result<()> {
        self.given = fs::read(path)?;
        let start = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(self.address)? + READ);
        // SAFETY: as in `bytes`; nothing else accesses it meanwhile.
        let into = unsafe { std::slice::from_raw_parts_mut(start, self.given.len()) };
        Ok(File::open(path)?.read_exact(into)?)
    }

    fn moved(&mut self) -> anyhow::Result<()> {
        self.elsewhere()?;
        self.check()
    }

    /// The driver frees it, and it stays mapped.
    fn free(&mut self) -> anyhow::Result<()> {
        self.elsewhere()?;
        self.check()?;
        self.buffer = None;
        Ok(())
    }

    fn elsewhere(&mut self) -> anyhow::Result<()> {
        let old = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address)?);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, at any address.
        let wanted = unsafe { libc::mmap(std::ptr::null_mut(), self.bytes, libc::PROT_NONE, kind, -1, 0) };
        ensure!(wanted != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: onto that mapping, and nothing refers to the old place.
        let new = unsafe { libc::mremap(old, self.bytes, self.bytes, flags, wanted) };
        ensure!(new == wanted, "mremap: {}", std::io::Error::last_os_error());
        self.address = new.expose_provenance() as u64;
        Ok(())
    }

    fn unmap(&mut self) -> anyhow::Result<()> {
        self.cut_at(0)
    }

    fn halve(&mut self) -> anyhow::Result<()> {
        self.halved()?;
        self.check()
    }

    fn halved(&mut self) -> anyhow::Result<()> {
        self.cut_at(self.bytes / 2)
    }

    /// Keeps the first `bytes` bytes mapped.
    fn cut_at(&mut self, bytes: usize) -> anyhow::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address)? + bytes);
        // SAFETY: nothing refers to it.
        let done = unsafe { libc::munmap(start, self.bytes - bytes) };
        ensure!(done == 0, "munmap: {}", std::io::Error::last_os_error());
        self.bytes = bytes;
        Ok(())
    }

    fn protect(&self) -> anyhow::Result<()> {
        self.protected(libc::PROT_READ)?;
        self.check()
    }

    /// Removes all access by the CPU.
    fn hide(&self) -> anyhow::Result<()> {
        self.protected(libc::PROT_NONE)
    }

    fn protected(&self, access: i32) -> anyhow::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address)?);
        // SAFETY: nothing writes to it any more.
        let done = unsafe { libc::mprotect(start, self.bytes, access) };
        ensure!(done == 0, "mprotect: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// A child that inherits device memory, and reports what it reads.
    fn bequeath(&self, path: &Path) -> anyhow::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address)?);
        // SAFETY: no byte changes.
        let done = unsafe { libc::madvise(start, self.bytes, libc::MADV_DOFORK) };
        ensure!(done == 0, "madvise: {}", std::io::Error::last_os_error());
        // SAFETY: one thread.
        if unsafe { libc::fork() } == 0 {
            let seen = self.check().map_or_else(|error| format!("{error:#}"), |()| "ok".to_owned());
            fs::write(path, seen)?;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        self.check()
    }

    /// A child has no device memory, and its parent keeps it.
    fn fork(&self) -> anyhow::Result<()> {
        // SAFETY: one thread; the child only reads memory.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let ends = i32::from(self.bytes()[0]);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(ends) };
        }
        let mut status = 0;
        // SAFETY: one live integer.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == SIGSEGV,
            "a child has device memory: {status:#x}"
        );
        self.check()
    }
}
