// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of an image in the place of tasks: an extension of Rewake's, for a migration. The address is the
//! offset in the file, whose last page has zeros after the end. CRIU has no such tasks: Linux has no process
//! of these numbers.

/// The first number of a file. Linux has less than 2^22 processes (`PID_MAX_LIMIT`).
const FIRST: u32 = 1 << 30;

/// Returns the task that stands for a file, by its number among the files that are requested so, or `None` if
/// it is too large.
#[must_use]
pub fn file_task(number: u32) -> Option<u32> {
    (number < FIRST).then_some(FIRST | number)
}

/// Returns the number of the file that a task stands for; none for a process.
#[must_use]
pub fn file_of_task(task: u32) -> Option<u32> {
    task.checked_sub(FIRST).filter(|number| *number < FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeaderLayout, PageMessage, PageRun};

    #[test]
    fn a_file_s_task_is_no_process_and_travels_as_one() {
        assert_eq!([0, 1, (1 << 22) - 1].map(file_of_task), [None; 3]);
        assert_eq!([file_task(1 << 30), file_of_task(u32::MAX)], [None; 2]);
        for number in [0, 1, (1 << 30) - 1] {
            let pid = file_task(number).unwrap();
            assert_eq!(file_of_task(pid), Some(number));
            let request = PageMessage::Get { pid, run: PageRun::new(0, 3).unwrap() };
            for layout in [HeaderLayout::Narrow, HeaderLayout::Wide] {
                let mut bytes = [0; crate::WIDE_LEN];
                let encoded = layout.encode(&request.header()).unwrap();
                bytes[..encoded.len()].copy_from_slice(&encoded);
                assert_eq!(PageMessage::parse(&layout.decode(&bytes)).unwrap(), request);
            }
        }
    }
}
