// SPDX-License-Identifier: MIT OR Apache-2.0
//! System management events: the driver's reports about a GPU's queues (`kfd_smi_events.c`).

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};

use crate::abi::{KFD_SMI_EVENT_ALL_PROCESS, KFD_SMI_EVENT_QUEUE_EVICTION, KFD_SMI_EVENT_QUEUE_RESTORE};
use crate::{Error, FailedCall, Kfd};

/// Bytes of one read: all that the driver keeps for a reader, or more (`MAX_KFIFO_SIZE`).
const FIFO: usize = 8192;

/// An eviction or a restore of a process's queues on a GPU. The queues run if both counts are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueEvent {
    /// The process's number in the first PID namespace, or on some kernels in its own.
    pub pid: u32,
    /// The GPU's id in the topology.
    pub gpu: u32,
    /// The kind of event.
    pub what: SmiEvent,
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmiEvent {
    /// QUEUE_EVICTION: the driver evicted the queues.
    QueueEviction,
    /// QUEUE_RESTORE: the driver resumed the queues.
    QueueRestore,
    /// QUEUE_RESTORE, rescheduled: memory that GPUs can access was not available, or has changed, and the
    /// driver will retry.
    RestoreRescheduled,
}

/// The queue events of one GPU, of all processes.
#[derive(Debug)]
pub struct Stream {
    events: File,
    /// The start of an incomplete line.
    partial: Vec<u8>,
}

impl Stream {
    /// Subscribes to events. Events of other processes need CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// SMI_EVENTS failed, or the driver refuses the event mask.
    pub fn open(kfd: &Kfd, gpu: u32) -> Result<Self, Error> {
        let mut events = File::from(kfd.smi_events(gpu)?);
        let bit = |event: u32| 1_u64 << (event - 1);
        let chosen = bit(KFD_SMI_EVENT_ALL_PROCESS)
            | bit(KFD_SMI_EVENT_QUEUE_EVICTION)
            | bit(KFD_SMI_EVENT_QUEUE_RESTORE);
        events
            .write_all(&chosen.to_ne_bytes())
            .map_err(FailedCall::named("choose SMI events").on(gpu).failed())?;
        Ok(Self { events, partial: Vec::new() })
    }

    /// Returns the events since the last call, without waiting. Events beyond the driver's buffer are lost,
    /// the newest first. Linux 6.12 keeps 1 KiB, some 30 events.
    ///
    /// # Errors
    /// The read failed.
    pub fn read(&mut self) -> std::io::Result<Vec<QueueEvent>> {
        let mut found = Vec::new();
        let mut bytes = [0; FIFO];
        loop {
            match self.events.read(&mut bytes) {
                Ok(0) => return Ok(found),
                Ok(count) => found.extend(take(&mut self.partial, &bytes[..count])),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

/// Returns the events of complete lines.
fn take(partial: &mut Vec<u8>, bytes: &[u8]) -> Vec<QueueEvent> {
    partial.extend_from_slice(bytes);
    let Some(end) = partial.iter().rposition(|byte| *byte == b'\n') else {
        // No line is that long, so this is other data.
        if partial.len() > FIFO {
            partial.clear();
        }
        return Vec::new();
    };
    let rest = partial.split_off(end + 1);
    let whole = std::mem::replace(partial, rest);
    whole.split(|byte| *byte == b'\n').filter_map(parse).collect()
}

/// Parses `9 NANOSECONDS -PID GPU TRIGGER` or `a NANOSECONDS -PID GPU [HOW]` (`KFD_EVENT_FMT_*` of
/// `kfd_ioctl.h`). Numbers of events and GPUs are hexadecimal. Some kernels put a NUL for HOW.
fn parse(line: &[u8]) -> Option<QueueEvent> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let event = u32::from_str_radix(words.next()?, 16).ok()?;
    let pid = words.nth(1)?.strip_prefix('-')?.parse().ok()?;
    let gpu = u32::from_str_radix(words.next()?, 16).ok()?;
    let what = match (event, words.next()) {
        (KFD_SMI_EVENT_QUEUE_EVICTION, _) => SmiEvent::QueueEviction,
        (KFD_SMI_EVENT_QUEUE_RESTORE, Some("R")) => SmiEvent::RestoreRescheduled,
        (KFD_SMI_EVENT_QUEUE_RESTORE, _) => SmiEvent::QueueRestore,
        _ => return None,
    };
    Some(QueueEvent { pid, gpu, what })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(pieces: &[&[u8]]) -> Vec<QueueEvent> {
        let mut partial = Vec::new();
        pieces.iter().flat_map(|piece| take(&mut partial, piece)).collect()
    }

    fn event(pid: u32, gpu: u32, what: SmiEvent) -> QueueEvent {
        QueueEvent { pid, gpu, what }
    }

    #[test]
    fn evictions_restores_and_reschedules_are_parsed() {
        let said = b"9 5012345 -812 1a2b 5\na 5012399 -812 1a2b R\na 5012400 -812 1a2b 0\n";
        let events = [SmiEvent::QueueEviction, SmiEvent::RestoreRescheduled, SmiEvent::QueueRestore]
            .map(|what| event(812, 0x1a2b, what));
        assert_eq!(all(&[said]), events);
    }

    #[test]
    fn older_kernels_omit_the_letter_or_send_a_nul() {
        let in_ = event(7, 0xff, SmiEvent::QueueRestore);
        assert_eq!(all(&[b"a 1 -7 ff\n"]), [in_]);
        assert_eq!(all(&[b"a 1 -7 ff \0\na 2 -7 ff \0\n"]), [in_, in_]);
    }

    #[test]
    fn a_line_may_arrive_in_pieces() {
        assert_eq!(all(&[b"9 1 -3", b"1 e", b" 5\n9"]), [event(31, 0xe, SmiEvent::QueueEviction)]);
    }

    #[test]
    fn other_events_are_ignored() {
        assert!(all(&[b"1 2f:worker\n2 0:1\nb 1 -7 @10(20) ff 1\n\n", b"9 1 -7\n9 1 7 ff 5\n"]).is_empty());
    }

    #[test]
    fn data_without_lines_is_dropped() {
        let mut partial = Vec::new();
        for _ in 0..100 {
            assert!(take(&mut partial, &[b'x'; 1000]).is_empty());
        }
        assert!(partial.len() <= FIFO + 1000);
    }

    proptest! {
        #[test]
        fn pieces_give_the_same_events_as_the_whole(bytes in "([9a1] [0-9]{1,3} -?[0-9]{1,3} [0-9a-f]{1,4} \
            [0R\0\n]{0,2}\n?){0,8}", cut: usize) {
            let bytes = bytes.as_bytes();
            let cut = cut % (bytes.len() + 1);
            prop_assert_eq!(all(&[&bytes[..cut], &bytes[cut..]]), all(&[bytes]));
        }

        #[test]
        fn any_bytes_are_accepted(pieces: Vec<Vec<u8>>) {
            all(&pieces.iter().map(Vec::as_slice).collect::<Vec<_>>());
        }
    }
}
