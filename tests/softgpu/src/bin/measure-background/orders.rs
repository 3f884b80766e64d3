// SPDX-License-Identifier: MIT OR Apache-2.0
//! Effect of the order of the background load: when queues are resumed, and how long a program waits for some
//! buffers.

use std::thread;
use std::time::{Duration, Instant};

use softgpu_tests::accessor::Large;

use super::image::{Image, Loads};
use super::text::spread;

const MEMORY: Large = Large { count: 32, mib: 4, full: true };
/// The last buffers, the very last first.
const ACCESSED: [usize; 4] = [31, 30, 29, 28];
/// Time from the start of the process to its first access.
const LATER: Duration = Duration::from_millis(500);
const ROUNDS: usize = 5;

/// An order, and its measurements.
struct Order {
    name: &'static str,
    /// The recorded working set; None: the order without a record.
    record: Option<Vec<u8>>,
    gates: Vec<Duration>,
    accesses: Vec<Duration>,
}

impl Order {
    fn of(image: &Image, name: &'static str, accessed: &[usize]) -> anyhow::Result<Self> {
        let record = if accessed.is_empty() { None } else { Some(image.records(accessed)?) };
        Ok(Self { name, record, gates: Vec::new(), accesses: Vec::new() })
    }

    fn measure(&mut self, image: &Image) -> anyhow::Result<()> {
        image.has_record(self.record.as_deref())?;
        let mut running = image.restores(Loads::Gpus)?;
        self.gates.push(running.gate_opens()?);
        running.ends()?;
        let running = image.restores(Loads::Gpus)?;
        thread::sleep(LATER);
        let start = Instant::now();
        ACCESSED.iter().try_for_each(|buffer| running.accesses_end_of(*buffer))?;
        self.accesses.push(start.elapsed());
        running.ends()
    }
}

/// Prints the table.
pub(crate) fn table() -> anyhow::Result<()> {
    let image = Image::of(MEMORY, 0)?;
    let every: Vec<usize> = (0..MEMORY.count).rev().collect();
    let mut all = [
        Order::of(&image, "no record", &[])?,
        Order::of(&image, "the working set, recorded", &ACCESSED)?,
        Order::of(&image, "all, recorded, the last first", &every)?,
    ];
    for _ in 0..ROUNDS {
        all.iter_mut().try_for_each(|order| order.measure(&image))?;
    }
    println!(
        "\n| order of 32 x 4 MiB, not zero | queues resumed, ms after it runs | its last four are read \
         within, ms |"
    );
    println!("|---|---|---|");
    for Order { name, gates, accesses, .. } in &mut all {
        println!("| {name} | {} | {} |", spread(gates), spread(accesses));
    }
    Ok(())
}
