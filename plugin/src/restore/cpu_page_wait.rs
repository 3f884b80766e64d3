// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of CPUs that comes lazily (`criu restore --lazy-pages`) in tasks that use GPUs: what GPUs may reach is there before their
//! queues start.
//!
//! The driver looks for pages of a process without waiting for a userfaultfd (`mm/hmm.c: hmm_vma_fault` faults without
//! FAULT_FLAG_ALLOW_RETRY): a registered page that is missing at RESUME is none to the GPU, and one that a program registers
//! later is EFAULT to it. So all of it comes first; only what is registered by now where the page server holds calls that register
//! more (decision 11). A GPU that retries its faults (XNACK) reaches all memory of its process.

use std::fs::File;
use std::io::{self, BufReader, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_plugin::{Answer, Host};

use super::gpu_assignment::gpus;
use crate::device::Devices;

/// Pages that one call asks for: the kernel's bound (UIO_MAXIOV).
const AT_ONCE: usize = 1024;

#[derive(Debug, thiserror::Error)]
enum Missing {
    #[error("process {pid}: {of}: {source}")]
    Unknown {
        pid: i32,
        of: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(
        "process {pid}: its memory at {address:#x} does not come: {errno}; does the lazy pages server still run, and is \
         its log without errors?"
    )]
    Page { pid: i32, address: u64, errno: Errno },
}

/// What is to be there.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WaitScope {
    /// Whatever a program may register.
    All,
    /// Whatever GPUs may touch.
    Any,
    /// What GPUs may reach, sorted.
    Registered(Vec<Range<u64>>),
}

impl WaitScope {
    /// Of a task with this compute state, or none, where calls that register more are held.
    pub(super) fn of(image: Option<&KfdImage>) -> Answer<Self> {
        let Some(image) = image else { return Ok(Self::Registered(Vec::new())) };
        let (devices, bos) = (gpus(image).count(), image.buffers.len());
        let private = Private::read(&image.private, devices, bos, image.objects as usize)?;
        if private.xnack_mode != 0 {
            return Ok(Self::Any);
        }
        let buffers = image.buffers.iter().map(|buffer| (buffer.alloc_flags, buffer.size));
        Ok(Self::Registered(private.registered(buffers)))
    }

    /// What of these, sorted, is to be there.
    fn among(&self, missing: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let Self::Registered(registered) = self else { return missing };
        let mut found = Vec::new();
        for range in registered {
            let page =
                range.start / PAGE * PAGE..range.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
            let behind = missing.partition_point(|missing| missing.end <= page.start);
            let both = missing[behind..].iter().take_while(|missing| missing.start < page.end);
            found.extend(both.map(|missing| missing.start.max(page.start)..missing.end.min(page.end)));
        }
        found
    }
}

/// Waits until memory of a stopped task that uses a GPU is there, if a server brings it. `server`: its connection, where it is known.
pub(super) fn wait(
    host: &Host,
    devices: &Devices,
    server: Option<BorrowedFd<'_>>,
    pid: i32,
    first: impl FnOnce() -> Answer<WaitScope>,
) -> Answer {
    let unknown = |of| move |source| Missing::Unknown { pid, of, source };
    if devices.open_in(pid).map_err(unknown("its files"))?.is_empty() {
        return Ok(());
    }
    let first = first()?;
    if first == WaitScope::Any {
        host.info(format_args!("process {pid}: its GPUs reach all of its memory (XNACK)"));
    }
    let smaps = File::open(format!("/proc/{pid}/smaps")).map_err(unknown("its mappings"))?;
    let missing = missing(BufReader::new(smaps)).map_err(unknown("its mappings"))?;
    let ranges = first.among(missing);
    if ranges.is_empty() {
        return Ok(());
    }
    let pages: u64 = ranges.iter().map(|range| (range.end - range.start) / PAGE).sum();
    host.info(format_args!("process {pid}: waiting for {pages} pages of its memory that come lazily"));
    let reads = || ranges.into_iter().try_for_each(|range| read(pid, range));
    match server {
        Some(server) => kill_without(server, pid, reads),
        None => reads(),
    }
}

/// Kills the task when all processes of its server have ended before `reads` has: what it waits for would not come, as the task itself
/// keeps the userfaultfd open (decision 15).
fn kill_without(server: BorrowedFd<'_>, pid: i32, reads: impl FnOnce() -> Answer) -> Answer {
    let (done, doing) = io::pipe()?;
    let watch = || {
        let mut ends =
            [PollFd::new(server, PollFlags::empty()), PollFd::new(done.as_fd(), PollFlags::empty())];
        while poll(&mut ends, PollTimeout::NONE) == Err(Errno::EINTR) {}
        if ends[0].any() == Some(true) {
            // It may have ended, too.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    };
    // CRIU's signals are for its own thread.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    thread::scope(|scope| {
        let watching = thread::Builder::new().spawn_scoped(scope, watch);
        before.thread_set_mask()?;
        watching?;
        let read = reads();
        drop(doing);
        read
    })
}

/// The readable mappings in which a userfaultfd brings missing pages, by `/proc/PID/smaps` (`um` in `VmFlags`). The driver cannot reach
/// the others either.
fn missing(smaps: impl io::BufRead) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut last = None;
    for line in smaps.lines() {
        let line = line?;
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_whitespace().any(|flag| flag == "um") {
                found.extend(last.take());
            }
        } else if let Some((range, protection)) = mapping(&line) {
            last = protection.starts_with('r').then_some(range);
        }
    }
    Ok(found)
}

/// The first line of a mapping.
fn mapping(line: &str) -> Option<(Range<u64>, &str)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some((hex(start)?..hex(end)?, words.next()?))
}

/// Reads a byte of every page, which waits for it as its own thread would. A page that cannot be read at all (MADV_GUARD_INSTALL) is
/// none to the driver either.
fn read(pid: i32, range: Range<u64>) -> Answer {
    let mut bytes = [0; AT_ONCE];
    let mut at = range.start;
    while at < range.end {
        let pages: Vec<RemoteIoVec> = (at..range.end)
            .step_by(usize::try_from(PAGE)?)
            .take(AT_ONCE)
            .map(|page| Ok(RemoteIoVec { base: usize::try_from(page)?, len: 1 }))
            .collect::<Answer<_>>()?;
        let mut into = [IoSliceMut::new(&mut bytes[..pages.len()])];
        match process_vm_readv(Pid::from_raw(pid), &mut into, &pages) {
            Ok(0) | Err(Errno::EFAULT) => at += PAGE,
            Ok(read) => at += read as u64 * PAGE,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(Missing::Page { pid, address: at, errno }.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_server_brings_is_known_by_its_flags() {
        let smaps = "10000-12000 rw-p 00000000 00:00 0 \n\
            Size:                  8 kB\n\
            VmFlags: rd wr mr mw me ac um \n\
            20000-21000 rw-p 00000000 00:00 0    [heap]\n\
            VmFlags: rd wr mr mw me ac \n\
            30000-34000 ---p 00000000 00:00 0 \n\
            VmFlags: mr mw me um \n\
            40000-41000 r--p 00001000 08:01 77   /a um VmFlags: file\n\
            VmFlags: rd mr um\n";
        assert_eq!(missing(smaps.as_bytes()).unwrap(), [0x1_0000..0x1_2000, 0x4_0000..0x4_1000]);
    }

    #[test]
    fn of_what_is_missing_only_what_is_registered_comes_first() {
        let missing = vec![0x1000..0x5000, 0x8000..0x9000, 0xa000..0xf000];
        let first =
            |registered: &[Range<u64>]| WaitScope::Registered(registered.to_vec()).among(missing.clone());
        assert_eq!(WaitScope::All.among(missing.clone()), missing);
        assert_eq!(first(&[]), []);
        assert_eq!(
            first(&[0x2800..0x2801, 0x4000..0xb000]),
            [0x2000..0x3000, 0x4000..0x5000, 0x8000..0x9000, 0xa000..0xb000]
        );
        assert_eq!(first(&[0x5000..0x8000, 0xf000..0x1_0000]), []);
    }

    #[test]
    fn what_gpus_reach_is_known_by_the_image() {
        assert_eq!(WaitScope::of(None).unwrap(), WaitScope::Registered(Vec::new()));
        // The record of a process alone: its version, and whether its GPUs retry faults.
        let image = |retries: u32| {
            let private = [1, retries].into_iter().flat_map(u32::to_le_bytes).collect();
            KfdImage { private, ..KfdImage::default() }
        };
        assert_eq!(WaitScope::of(Some(&image(0))).unwrap(), WaitScope::Registered(Vec::new()));
        assert_eq!(WaitScope::of(Some(&image(1))).unwrap(), WaitScope::Any);
    }

    #[test]
    fn more_pages_than_one_call_takes_are_read() {
        let pages = 2 * AT_ONCE as u64 + 3;
        let memory = vec![1_u8; usize::try_from((pages + 1) * PAGE).unwrap()];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let own = i32::try_from(std::process::id()).unwrap();
        read(own, start..start + pages * PAGE).unwrap();
    }

    #[test]
    fn pages_that_nobody_can_read_are_passed_over() {
        let own = i32::try_from(std::process::id()).unwrap();
        read(own, PAGE..3 * PAGE).unwrap();
    }

    #[test]
    fn memory_of_a_process_that_has_ended_does_not_come() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let refusal = read(child.id().cast_signed(), PAGE..3 * PAGE).unwrap_err();
        assert!(format!("{refusal:?}").contains("ESRCH"), "{refusal:?}");
    }
}
