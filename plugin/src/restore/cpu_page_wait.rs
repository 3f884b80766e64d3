// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for lazy CPU memory (`criu restore --lazy-pages`) of tasks that use GPUs: pages that GPUs can access
//! must be resident before their queues start.
//!
//! The driver looks up pages of a process without waiting for a userfaultfd (`mm/hmm.c: hmm_vma_fault` faults
//! without FAULT_FLAG_ALLOW_RETRY). A registered page that is missing at RESUME is no page to the GPU. A
//! program that registers a missing page later gets EFAULT.
//!
//! So all lazy memory is loaded first. Where the streamer holds calls that register memory, only the memory
//! that is registered already is loaded first (decision 11). A GPU that retries its faults (XNACK) can access
//! all memory of its process.

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
use rewake_process::maps::Mapping;

use super::gpu_assignment::gpus;
use crate::device::Devices;

/// Most pages that one call reads: the kernel's bound (UIO_MAXIOV).
const MAX_PAGES: usize = 1024;

#[derive(Debug, thiserror::Error)]
enum PageWaitError {
    #[error("process {pid}: read {what}: {source}")]
    Unreadable {
        pid: i32,
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(
        "process {pid}: its missing memory at {address:#x} cannot be loaded: {errno}; does the lazy pages \
         server run, and is its log without errors?"
    )]
    Page { pid: i32, address: u64, errno: Errno },
}

/// Which lazy memory must be resident before queues start.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WaitScope {
    /// All of it: the program may register any.
    All,
    /// All of it: the GPUs retry page faults (XNACK) and can access any.
    AllXnack,
    /// The ranges that are registered with a GPU, sorted.
    Registered(Vec<Range<u64>>),
}

impl WaitScope {
    /// Returns the scope for a task with this compute state, or without one, where the streamer holds calls
    /// that register memory.
    pub(super) fn of(image: Option<&KfdImage>) -> Answer<Self> {
        let Some(image) = image else { return Ok(Self::Registered(Vec::new())) };
        let (devices, bos) = (gpus(image).count(), image.buffers.len());
        let private = Private::read(&image.private, devices, bos, image.objects as usize)?;
        if private.xnack_mode != 0 {
            return Ok(Self::AllXnack);
        }
        let buffers = image.buffers.iter().map(|buffer| (buffer.alloc_flags, buffer.size));
        Ok(Self::Registered(private.registered(buffers)))
    }

    /// Returns the part of these sorted ranges that must be resident.
    fn select(&self, missing: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let Self::Registered(registered) = self else { return missing };
        let mut found = Vec::new();
        for range in registered {
            let page =
                range.start / PAGE * PAGE..range.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
            let first = missing.partition_point(|missing| missing.end <= page.start);
            let overlapping = missing[first..].iter().take_while(|missing| missing.start < page.end);
            found.extend(overlapping.map(|missing| missing.start.max(page.start)..missing.end.min(page.end)));
        }
        found
    }
}

/// Waits until a stopped task that uses a GPU has the memory of `scope`. `streamer`: the streamer's
/// connection, where it is known.
pub(super) fn wait(
    host: &Host,
    devices: &Devices,
    streamer: Option<BorrowedFd<'_>>,
    pid: i32,
    scope: impl FnOnce() -> Answer<WaitScope>,
) -> Answer {
    let unreadable = |what| move |source| PageWaitError::Unreadable { pid, what, source };
    if devices.open_in(pid).map_err(unreadable("its files"))?.is_empty() {
        return Ok(());
    }
    let scope = scope()?;
    if scope == WaitScope::AllXnack {
        host.info(format_args!("process {pid}: its GPUs can access all of its memory (XNACK)"));
    }
    let smaps = File::open(format!("/proc/{pid}/smaps")).map_err(unreadable("its mappings"))?;
    let missing = lazy_ranges(BufReader::new(smaps)).map_err(unreadable("its mappings"))?;
    let ranges = scope.select(missing);
    if ranges.is_empty() {
        return Ok(());
    }
    let pages: u64 = ranges.iter().map(|range| (range.end - range.start) / PAGE).sum();
    host.info(format_args!("process {pid}: waiting for {pages} missing pages of its memory"));
    let reads = || ranges.into_iter().try_for_each(|range| read_pages(pid, range));
    match streamer {
        Some(streamer) => kill_if_streamer_ends(streamer, pid, reads),
        None => reads(),
    }
}

/// Runs `reads`, and kills the task if all processes of its streamer end before that: its page faults would
/// never end, as the task itself keeps the userfaultfd open (decision 15).
fn kill_if_streamer_ends(streamer: BorrowedFd<'_>, pid: i32, reads: impl FnOnce() -> Answer) -> Answer {
    let (done, doing) = io::pipe()?;
    let watch = || {
        let mut ends =
            [PollFd::new(streamer, PollFlags::empty()), PollFd::new(done.as_fd(), PollFlags::empty())];
        while poll(&mut ends, PollTimeout::NONE) == Err(Errno::EINTR) {}
        if ends[0].any() == Some(true) {
            // ESRCH is possible: it may have ended, too.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    };
    // CRIU's own thread must receive its signals.
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

/// Returns the readable mappings with a userfaultfd for missing pages, from `/proc/PID/smaps` (`um` in
/// `VmFlags`). The driver cannot access unreadable ones either.
fn lazy_ranges(smaps: impl io::BufRead) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut last = None;
    for line in smaps.split(b'\n') {
        let line = line?;
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            if flags.split(|byte| *byte == b' ').any(|flag| flag == b"um") {
                found.extend(last.take());
            }
        } else if let Some(mapping) = Mapping::parse(&line) {
            last = mapping.is_readable().then_some(mapping.start..mapping.end);
        }
    }
    Ok(found)
}

/// Reads a byte of every page. A missing page is a page fault that this waits for. A page that cannot be read
/// at all (MADV_GUARD_INSTALL) is passed over: the driver cannot access it either.
fn read_pages(pid: i32, range: Range<u64>) -> Answer {
    let mut bytes = [0; MAX_PAGES];
    let mut at = range.start;
    while at < range.end {
        let pages: Vec<RemoteIoVec> = (at..range.end)
            .step_by(usize::try_from(PAGE)?)
            .take(MAX_PAGES)
            .map(|page| Ok(RemoteIoVec { base: usize::try_from(page)?, len: 1 }))
            .collect::<Answer<_>>()?;
        let mut into = [IoSliceMut::new(&mut bytes[..pages.len()])];
        match process_vm_readv(Pid::from_raw(pid), &mut into, &pages) {
            Ok(0) | Err(Errno::EFAULT) => at += PAGE,
            Ok(read) => at += read as u64 * PAGE,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(PageWaitError::Page { pid, address: at, errno }.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_task_is_killed_when_its_streamer_ends_during_the_wait() {
        let mut task = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(task.id()).unwrap();
        let (streamer, far) = UnixStream::pair().unwrap();
        let mut ended = false;
        let read = || {
            drop(far);
            let limit = Instant::now() + Duration::from_secs(60);
            while !ended && Instant::now() < limit {
                ended = task.try_wait().unwrap().is_some();
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        let read = kill_if_streamer_ends(streamer.as_fd(), pid, read);
        let _ = task.kill();
        task.wait().unwrap();
        assert!(read.is_ok() && ended);
    }

    #[test]
    fn lazy_memory_is_found_by_its_flags() {
        let smaps = b"10000-12000 rw-p 00000000 00:00 0 \n\
            Size:                  8 kB\n\
            VmFlags: rd wr mr mw me ac um \n\
            20000-21000 rw-p 00000000 00:00 0    [heap]\n\
            VmFlags: rd wr mr mw me ac \n\
            30000-34000 ---p 00000000 00:00 0 \n\
            VmFlags: mr mw me um \n\
            40000-41000 r--p 00001000 08:01 77   /a um \xff VmFlags: file\n\
            VmFlags: rd mr um\n";
        assert_eq!(lazy_ranges(&smaps[..]).unwrap(), [0x1_0000..0x1_2000, 0x4_0000..0x4_1000]);
    }

    #[test]
    fn of_missing_memory_only_registered_ranges_are_waited_for() {
        let missing = vec![0x1000..0x5000, 0x8000..0x9000, 0xa000..0xf000];
        let first =
            |registered: &[Range<u64>]| WaitScope::Registered(registered.to_vec()).select(missing.clone());
        assert_eq!(WaitScope::All.select(missing.clone()), missing);
        assert_eq!(first(&[]), []);
        assert_eq!(
            first(&[0x2800..0x2801, 0x4000..0xb000]),
            [0x2000..0x3000, 0x4000..0x5000, 0x8000..0x9000, 0xa000..0xb000]
        );
        assert_eq!(first(&[0x5000..0x8000, 0xf000..0x1_0000]), []);
    }

    #[test]
    fn the_scope_follows_from_the_image() {
        assert_eq!(WaitScope::of(None).unwrap(), WaitScope::Registered(Vec::new()));
        // The record of a process alone: its version, and whether its GPUs retry faults.
        let image = |retries: u32| {
            let private = [1, retries].into_iter().flat_map(u32::to_le_bytes).collect();
            KfdImage { private, ..KfdImage::default() }
        };
        assert_eq!(WaitScope::of(Some(&image(0))).unwrap(), WaitScope::Registered(Vec::new()));
        assert_eq!(WaitScope::of(Some(&image(1))).unwrap(), WaitScope::AllXnack);
    }

    #[test]
    fn more_pages_than_one_call_takes_are_read() {
        let pages = 2 * MAX_PAGES as u64 + 3;
        let memory = vec![1_u8; usize::try_from((pages + 1) * PAGE).unwrap()];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let own = i32::try_from(std::process::id()).unwrap();
        read_pages(own, start..start + pages * PAGE).unwrap();
    }

    #[test]
    fn unreadable_pages_are_passed_over() {
        let own = i32::try_from(std::process::id()).unwrap();
        read_pages(own, PAGE..3 * PAGE).unwrap();
    }

    #[test]
    fn reading_memory_of_an_ended_process_fails() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let refusal = read_pages(child.id().cast_signed(), PAGE..3 * PAGE).unwrap_err();
        assert!(format!("{refusal:?}").contains("ESRCH"), "{refusal:?}");
    }
}
