// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on all cores with its results in order, in bounded memory.

use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The most threads: each has a buffer of 4 MiB, and few disks are faster than eight cores hash.
const MAX_THREADS: usize = 8;
/// Jobs of a batch for each thread: a batch ends when its last job does.
const JOBS_PER_THREAD: usize = 8;

/// The buffers of threads that read and hash.
#[derive(Debug)]
pub(crate) struct Workers {
    buffers: Vec<Vec<u8>>,
}

impl Workers {
    pub(crate) fn new() -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
        Self { buffers: vec![Vec::new(); threads] }
    }

    /// Does `work` for each job, and gives jobs and results to `sink` in the order of the jobs. `work` gets a
    /// buffer that keeps its memory.
    pub(crate) fn run<J: Sync, R: Send + Sync, E>(
        &mut self,
        jobs: impl Iterator<Item = Result<J, E>>,
        work: impl Fn(&J, &mut Vec<u8>) -> R + Sync,
        mut sink: impl FnMut(J, R) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut jobs = jobs.fuse();
        let most = self.buffers.len() * JOBS_PER_THREAD;
        loop {
            let batch = jobs.by_ref().take(most).collect::<Result<Vec<J>, E>>()?;
            if batch.is_empty() {
                return Ok(());
            }
            for (job, result) in self.batch(batch, &work) {
                sink(job, result)?;
            }
        }
    }

    fn batch<J: Sync, R: Send + Sync>(
        &mut self,
        jobs: Vec<J>,
        work: &(impl Fn(&J, &mut Vec<u8>) -> R + Sync),
    ) -> impl Iterator<Item = (J, R)> {
        let results: Vec<OnceLock<R>> = jobs.iter().map(|_| OnceLock::new()).collect();
        let (jobs_left, places, next) = (&jobs, &results, &AtomicUsize::new(0));
        thread::scope(|scope| {
            for buffer in &mut self.buffers {
                scope.spawn(move || {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(job) = jobs_left.get(number) else { return };
                        places[number].get_or_init(|| work(job, buffer));
                    }
                });
            }
        });
        // The scope has waited for all threads, and a panic of one has ended it.
        jobs.into_iter().zip(results.into_iter().filter_map(OnceLock::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_jobs_and_a_job_runs_once() {
        let runs = AtomicUsize::new(0);
        let square = |number: &u64, _: &mut Vec<u8>| {
            runs.fetch_add(1, Ordering::Relaxed);
            number * number
        };
        let mut squares = Vec::new();
        let sink = |_, square| {
            squares.push(square);
            Ok::<_, ()>(())
        };
        Workers::new().run((0..1000).map(Ok), square, sink).unwrap();
        assert_eq!(squares, (0..1000).map(|number| number * number).collect::<Vec<u64>>());
        assert_eq!(runs.into_inner(), 1000);
    }

    #[test]
    fn an_error_of_a_job_or_of_the_sink_ends_the_run() {
        let jobs = || (0..100).map(|number| if number == 60 { Err("job") } else { Ok(number) });
        let work = |number: &u64, _: &mut Vec<u8>| *number;
        assert_eq!(Workers::new().run(jobs(), work, |_, _| Ok(())), Err("job"));
        assert_eq!(Workers::new().run(jobs(), work, |_, _| Err("sink")), Err("sink"));
    }
}
