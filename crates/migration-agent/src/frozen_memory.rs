// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of frozen tasks.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, ensure};
use rewake_page_protocol::PageRun;
use rewake_process::proc;

use crate::frame::Frame;

const PAGE: usize = 4096;
/// Pages of one answer at most: what CRIU requests at most.
const MAX_PAGES: u64 = 1024;

/// Open files of the memory of each task, by the number that the image gives it.
#[derive(Debug)]
pub(crate) struct FrozenMemory {
    tasks: BTreeMap<u32, File>,
}

impl FrozenMemory {
    /// Opens the memory of these processes.
    pub(crate) fn open(processes: &[i32]) -> anyhow::Result<Self> {
        let mut tasks = BTreeMap::new();
        for pid in processes {
            let path = format!("/proc/{pid}/mem");
            // An image has the number of the innermost pid namespace.
            let number = proc::status(*pid).and_then(|status| status.own_number);
            let number = number.with_context(|| format!("process {pid} has ended while it was frozen"))?;
            let file = File::open(&path).with_context(|| format!("opening {path}"))?;
            tasks.insert(number.cast_unsigned(), file);
        }
        Ok(Self { tasks })
    }

    /// Reads the first pages of a request. The tasks must be frozen.
    pub(crate) fn answer(&self, pid: u32, run: PageRun) -> Frame {
        match self.read(pid, run) {
            Ok(bytes) => Frame::Pages { pid, vaddr: run.vaddr(), bytes },
            Err(error) => Frame::PagesLost(format!("{error:#}")),
        }
    }

    fn read(&self, pid: u32, run: PageRun) -> anyhow::Result<Vec<u8>> {
        let file = self.tasks.get(&pid).with_context(|| format!("the frozen tree has no task {pid}"))?;
        let pages = usize::try_from(run.pages().min(MAX_PAGES))?;
        let mut bytes = vec![0; pages * PAGE];
        let place = || format!("reading {pages} pages at {:#x} of task {pid}", run.vaddr());
        let mut done = 0;
        while done < bytes.len() {
            // A hole after the first pages ends the answer: the destination requests the rest, and is refused.
            match file.read_at(&mut bytes[done..], run.vaddr() + done as u64) {
                Ok(some @ 1..) => done += some,
                Ok(0) | Err(_) if done >= PAGE => break,
                Ok(_) => ensure!(done >= PAGE, "{}: no bytes", place()),
                Err(error) => return Err(error).with_context(place),
            }
        }
        bytes.truncate(done / PAGE * PAGE);
        Ok(bytes)
    }
}
