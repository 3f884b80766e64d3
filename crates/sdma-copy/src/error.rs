// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors that name the act, its object and the way out.

use std::fmt;
use std::io;
use std::time::Duration;

/// What goes wrong with copies.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call on the render node failed.
    #[error("renderD{minor}: {source}")]
    Kernel {
        /// The render node.
        minor: u32,
        /// Which call, and the kernel's answer.
        r#source: rewake_amdgpu_uapi::Error,
    },
    /// A call of the render node that every DRM driver has failed.
    #[error("renderD{minor}: {call}: {source}")]
    Drm {
        /// The render node.
        minor: u32,
        /// Which.
        call: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Staging memory could not be made.
    #[error("{bytes} bytes of staging memory: {act}: {source}")]
    Staging {
        /// All of it.
        bytes: u64,
        /// What failed.
        act: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Staging memory of no use.
    #[error(
        "staging memory of {slots} slots of {slot_bytes} bytes: slots are whole pages, and all of them less than 2^40 bytes"
    )]
    Shape {
        /// As asked for.
        slots: u32,
        /// As asked for.
        slot_bytes: u64,
    },
    /// The GPU's address space has no room.
    #[error("renderD{minor}: no {bytes} bytes of GPU addresses are free: release BOs first")]
    Addresses {
        /// The render node.
        minor: u32,
        /// Of the BO or the staging memory.
        bytes: u64,
    },
    /// A BO is not as large as it was said to be.
    #[error("renderD{minor}: a BO of {size} bytes was to be imported as one of {wanted}")]
    Size {
        /// The render node.
        minor: u32,
        /// Its dma-buf's.
        size: u64,
        /// The caller's.
        wanted: u64,
    },
    /// A transfer outside of its BO or its slot, of no bytes, or a fill that is not whole words.
    #[error("transfer of {bytes} bytes at {at:#x} of {what} of {size:#x} bytes: {reason}")]
    Range {
        /// A BO or a slot.
        what: &'static str,
        /// Where.
        at: u64,
        /// How many.
        bytes: u64,
        /// What there is.
        size: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// A BO that was released, or another engine's.
    #[error("renderD{minor}: the BO was released, or is another engine's")]
    Bo {
        /// The render node.
        minor: u32,
    },
    /// A ticket whose end was told already, or another engine's.
    #[error("renderD{minor}: the ticket's end was told already, or it is another engine's")]
    Ticket {
        /// The render node.
        minor: u32,
    },
    /// All rings have as many submissions in flight as they can: take finished ones first.
    #[error("renderD{minor}: every copy ring is full: wait for a ticket")]
    Full {
        /// The render node.
        minor: u32,
    },
    /// More than one submission can hold.
    #[error(
        "renderD{minor}: {packets} packets in one submission, and there is room for {most}: submit fewer transfers"
    )]
    Long {
        /// The render node.
        minor: u32,
        /// Packets of all transfers.
        packets: u64,
        /// The limit.
        most: u64,
    },
    /// No ring, and no CPU view.
    #[error(
        "renderD{minor} offers no copy ring, and the CPU cannot reach a BO of {bytes} bytes either ({source}): \
             load the amdgpu driver with copy rings for the kernel (user_queue=0), or enable a large BAR"
    )]
    Unreachable {
        /// The render node.
        minor: u32,
        /// The BO.
        bytes: u64,
        /// Why not.
        r#source: rewake_amdgpu_uapi::Error,
    },
    /// The thread that copies by the CPU could not be started.
    #[error("renderD{minor}: start the thread that copies: {source}")]
    Thread {
        /// The render node.
        minor: u32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Copies by the CPU are not done in time. They go on.
    #[error(
        "renderD{minor}, copies by the CPU: {transfers} transfers of {bytes} bytes are not done after {age:.3?}: does the \
             GPU's memory answer?"
    )]
    Slow {
        /// The render node.
        minor: u32,
        /// In the submission.
        transfers: usize,
        /// All of them.
        bytes: u64,
        /// Since it was submitted.
        age: Duration,
    },
    /// A submission failed on the GPU, or was lost with it: its bytes are not there.
    #[error("{0}")]
    Failed(Box<SubmitFault>),
    /// A submission is not done in time. It is still in flight.
    #[error("{0}")]
    Late(Box<SubmitFault>),
    /// An earlier submission failed: no more go there.
    #[error("renderD{minor}: a submission failed before: open a new engine")]
    Lost {
        /// The render node.
        minor: u32,
    },
}

/// What is known about a submission that failed or is late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmitFault {
    /// The render node.
    pub minor: u32,
    /// The ring.
    pub ring: u32,
    /// Transfers in the submission.
    pub transfers: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes in flight on that ring, with these.
    pub queued: u64,
    /// Since it was submitted.
    pub age: Duration,
    /// The kernel's answer, for one that failed: ECANCELED or ETIME after the GPU, or its ring, was reset.
    pub errno: Option<i32>,
    /// `AMDGPU_CTX_QUERY2_FLAGS_*`: what happened to the GPU since the engine was opened, if the kernel tells.
    pub state: Option<u64>,
}

impl fmt::Display for SubmitFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { minor, ring, transfers, bytes, queued, age, errno, state } = self;
        write!(f, "renderD{minor}, copy ring {ring}: {transfers} transfers of {bytes} bytes ")?;
        if let Some(errno) = errno {
            write!(f, "failed after {age:.3?}: {}", io::Error::from_raw_os_error(*errno))?;
        } else {
            write!(f, "are not done after {age:.3?}, {queued} bytes in flight there")?;
        }
        let Some(state) = state else { return f.write_str("; the kernel does not tell the GPU's state") };
        let found: Vec<_> = STATES.iter().filter(|(flag, _)| state & u64::from(*flag) != 0).collect();
        if found.is_empty() {
            return f.write_str("; the GPU was not reset: look for page faults in the kernel's log");
        }
        for (index, (_, text)) in found.iter().enumerate() {
            write!(f, "{}{text}", if index == 0 { "; " } else { ", " })?;
        }
        Ok(())
    }
}

const STATES: [(u32, &str); 6] = {
    use rewake_amdgpu_uapi::abi::{
        AMDGPU_CTX_QUERY2_FLAGS_GUILTY, AMDGPU_CTX_QUERY2_FLAGS_RAS_CE, AMDGPU_CTX_QUERY2_FLAGS_RAS_UE,
        AMDGPU_CTX_QUERY2_FLAGS_RESET, AMDGPU_CTX_QUERY2_FLAGS_RESET_IN_PROGRESS,
        AMDGPU_CTX_QUERY2_FLAGS_VRAMLOST,
    };
    [
        (AMDGPU_CTX_QUERY2_FLAGS_RESET_IN_PROGRESS, "the GPU is being reset"),
        (AMDGPU_CTX_QUERY2_FLAGS_RESET, "the GPU was reset"),
        (AMDGPU_CTX_QUERY2_FLAGS_VRAMLOST, "its memory is lost"),
        (AMDGPU_CTX_QUERY2_FLAGS_GUILTY, "this engine's commands are the cause"),
        (AMDGPU_CTX_QUERY2_FLAGS_RAS_CE, "memory errors were corrected"),
        (AMDGPU_CTX_QUERY2_FLAGS_RAS_UE, "memory errors could not be corrected"),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: SubmitFault = SubmitFault {
        minor: 129,
        ring: 1,
        transfers: 3,
        bytes: 4096,
        queued: 8192,
        age: Duration::from_millis(1500),
        errno: None,
        state: Some(0),
    };

    #[test]
    fn trouble_says_where_how_much_how_long_and_what_the_gpu_went_through() {
        assert_eq!(
            Error::Late(Box::new(LATE)).to_string(),
            "renderD129, copy ring 1: 3 transfers of 4096 bytes are not done after 1.500s, 8192 bytes in flight \
             there; the GPU was not reset: look for page faults in the kernel's log"
        );
        let failed = SubmitFault { errno: Some(125), state: Some(5), ..LATE };
        assert_eq!(
            failed.to_string(),
            "renderD129, copy ring 1: 3 transfers of 4096 bytes failed after 1.500s: Operation canceled (os error \
             125); the GPU was reset, this engine's commands are the cause"
        );
        let silent = SubmitFault { state: None, ..failed };
        assert!(silent.to_string().ends_with("; the kernel does not tell the GPU's state"), "{silent}");
    }
}
