// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a save or a load on a thread of its own.

use std::sync::Arc;
use std::time::Instant;

use nix::sys::signal::{SigSet, SigmaskHow};
use rewake_image_io::io_budget::IoBudget;
use rewake_image_io::{ImageFile, keep_in_page_cache};

use crate::copies::Sink;
use crate::error::Error;
use crate::pipeline::Pipeline;
use crate::process::ProcessBuffers;
use crate::report::{Moved, Report};

/// Runs a save or a load on its own thread.
pub(crate) fn run(
    done: &'static str,
    processes: &[ProcessBuffers<'_>],
    sink: Sink<'_>,
    budget: Option<Arc<IoBudget>>,
    work: impl FnOnce(&mut Pipeline<'_>) -> Result<Moved, Error> + Send,
) -> Result<Option<Report>, Error> {
    if processes.iter().flat_map(|process| process.files).all(|file| file.chunks() == 0) {
        return Ok(None);
    }
    let files = || processes.iter().flat_map(|process| process.files).map(|file| &*file.file);
    // Files are joined now and not when they are opened: plugin and streamer have them open at the same time.
    files().for_each(ImageFile::join);
    keep_in_page_cache(files());
    let start = Instant::now();
    let (paths, moved) = on_quiet_thread(|| {
        let mut pipeline = Pipeline::new(processes, sink, budget)?;
        let paths = pipeline.notes();
        Ok((paths, work(&mut pipeline)?))
    })?;
    Ok(Some(Report { done, paths, moved, time: start.elapsed() }))
}

/// Runs `work` on a thread that blocks all signals, and joins the thread.
///
/// The kernel tears an io_uring down after its close, and then interrupts the thread that had it
/// (`io_ring_exit_work`). A driver call that this thread makes meanwhile fails with EINTR. RESUME fails so
/// while it registers notifiers (`mm_take_all_locks`), and must not be repeated.
fn on_quiet_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("contents".to_owned());
        Ok(thread.spawn_scoped(scope, work)?.join())
    });
    before.thread_set_mask()?;
    match done {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(Error::Panicked),
        Err(error) => Err(error),
    }
}
