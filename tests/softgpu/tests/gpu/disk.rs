// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's scratch disk has the rate of `cargo xtask vm --disk MIB@MBPS`, for every program that
//! measures it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Instant;

use rewake_skip::skip;
use softgpu_tests::isolated;

const PLACE: &str = "/mnt/disk/measured";
/// Bytes of one request, and the alignment that the disk wants.
const PART: usize = 1 << 20;
const ALIGNMENT: usize = 4096;
/// Duration of a measurement: after a rest the disk gives a tenth of a second's bytes at once.
const SECONDS: usize = 3;
/// Attempts where it seems too slow: this machine may have had other work.
const TRIES: usize = 10;

/// Millions of bytes a second.
fn rate(parts: usize, mut act: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..parts).for_each(|_| act());
    f64::from(u32::try_from(parts * PART).unwrap()) / start.elapsed().as_secs_f64() / 1e6
}

#[test]
fn the_scratch_disk_has_its_rate() {
    isolated(0, |_| {
        let Ok(rate_wanted) = std::env::var("DISK_MBPS") else {
            assert!(std::env::var_os("SOFTGPU_REQUIRED").is_none(), "no scratch disk in this machine");
            skip!("`cargo xtask vm --disk 256@50` gives the machine a scratch disk");
        };
        let wanted: u32 = rate_wanted.parse().expect("a disk with a rate");
        let parts = usize::try_from(wanted).unwrap() * SECONDS * 1_000_000 / PART;
        let mut room = vec![7; PART + ALIGNMENT];
        let at = room.as_ptr().align_offset(ALIGNMENT);
        let part = &mut room[at..at + PART];
        let mut options = OpenOptions::new();
        // Bypasses the page cache.
        options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
        let mut file: File = options.open(PLACE).expect("a file on the scratch disk");
        let (mut written, mut read) = (0.0_f64, 0.0_f64);
        for _ in 0..TRIES {
            file.seek(SeekFrom::Start(0)).unwrap();
            let writing = rate(parts, || file.write_all(part).unwrap());
            file.seek(SeekFrom::Start(0)).unwrap();
            part.fill(0);
            let reading = rate(parts, || file.read_exact(part).unwrap());
            assert!(part.iter().all(|byte| *byte == 7));
            println!("written at {writing:.1} MB/s, read at {reading:.1} MB/s, made for {wanted}");
            // Never faster, except in the first tenth of a second.
            let fastest = writing.max(reading);
            assert!(fastest < 1.05 * f64::from(wanted), "{fastest:.1} MB/s on a disk made for {wanted}");
            (written, read) = (written.max(writing), read.max(reading));
            if written.min(read) >= 0.75 * f64::from(wanted) {
                break;
            }
        }
        std::fs::remove_file(PLACE).unwrap();
        let slowest = written.min(read);
        assert!(slowest >= 0.75 * f64::from(wanted), "{slowest:.1} MB/s on a disk made for {wanted}");
    });
}
