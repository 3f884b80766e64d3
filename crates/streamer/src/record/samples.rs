// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps how much was resident when, in bounded memory.

use super::model::LoadedBytes;

/// The most samples: a screen shows no more beside each other.
const MOST: usize = 512;
/// The most numbers in all samples together: 512 KiB, for any number of processes.
const VALUES: usize = 1 << 16;
/// The fewest samples that show how memory grew.
const FEWEST: usize = 16;

/// The progress at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) at_us: u64,
    pub(super) faults: u64,
    pub(super) loaded: LoadedBytes,
    /// The resident bytes of each process on each GPU.
    pub(super) gpus: Vec<u64>,
    /// The resident bytes of each process's CPU memory.
    pub(super) cpus: Vec<u64>,
}

/// Samples at even distances. When they are full, every second one is dropped, and only every second new one
/// is kept from then on. The first and the newest are always kept.
#[derive(Debug, Default)]
pub(super) struct Samples {
    kept: Vec<Sample>,
    /// The newest sample, while it is not at the distance.
    newest: Option<Sample>,
    /// One of 2 to the power of this is kept.
    thinned: u32,
    came: usize,
}

impl Samples {
    /// Adds a sample.
    pub(super) fn push(&mut self, sample: Sample) {
        let number = self.came;
        self.came += 1;
        if !number.is_multiple_of(self.distance()) {
            self.newest = Some(sample);
            return;
        }
        if self.kept.len() >= room(sample.gpus.len() + sample.cpus.len()) {
            self.thin();
            if !number.is_multiple_of(self.distance()) {
                self.newest = Some(sample);
                return;
            }
        }
        self.newest = None;
        self.kept.push(sample);
    }

    fn distance(&self) -> usize {
        1 << self.thinned.min(usize::BITS - 1)
    }

    fn thin(&mut self) {
        self.thinned += 1;
        let mut number = 0;
        self.kept.retain(|_| {
            number += 1;
            number % 2 == 1
        });
    }

    /// Returns the samples that are kept.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sample> {
        self.kept.iter().chain(&self.newest)
    }
}

/// Returns how many samples of this many numbers fit.
fn room(numbers: usize) -> usize {
    (VALUES / numbers.max(1)).clamp(FEWEST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(count: u64, numbers: usize) -> Samples {
        let mut samples = Samples::default();
        for at_us in 0..count {
            let (gpus, cpus) = (vec![at_us; numbers / 2], vec![at_us; numbers.div_ceil(2)]);
            samples.push(Sample { at_us, faults: 0, loaded: LoadedBytes::default(), gpus, cpus });
        }
        samples
    }

    fn times(samples: &Samples) -> Vec<u64> {
        samples.iter().map(|sample| sample.at_us).collect()
    }

    #[test]
    fn no_sample_is_lost_while_space_is_left() {
        assert_eq!(times(&after(512, 1)), (0..512).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_list_drops_every_second_sample() {
        let every_second: Vec<u64> = (0..513).step_by(2).collect();
        assert_eq!(times(&after(513, 1)), every_second);
        let mut and_the_newest = every_second;
        and_the_newest.push(513);
        assert_eq!(times(&after(514, 1)), and_the_newest);
    }

    #[test]
    fn the_first_and_the_newest_sample_are_always_kept() {
        for count in [1, 2, 511, 1023, 1024, 1025, 100_000, 1_000_001] {
            let times = times(&after(count, 1));
            assert_eq!((times.first(), times.last()), (Some(&0), Some(&(count - 1))), "{count}");
            assert!(times.len() <= MOST + 1, "{} of {count}", times.len());
            let even = times.windows(2).map(|two| two[1] - two[0]).collect::<Vec<_>>();
            let (_, even) = even.split_last().unwrap_or((&0, &[]));
            assert!(even.windows(2).all(|two| two[0] == two[1]), "{count}: {even:?}");
        }
    }

    #[test]
    fn many_processes_have_fewer_samples() {
        let samples = after(3000, 1024);
        assert!(times(&samples).len() <= 65, "{}", times(&samples).len());
        assert_eq!(room(1 << 20), FEWEST);
    }
}
