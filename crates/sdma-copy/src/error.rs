// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors with the call, its object and the remedy.

use std::fmt;
use std::io;
use std::time::Duration;

/// A copy, or its preparation, failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An amdgpu call on the render node failed.
    #[error("renderD{minor}: {source}")]
    Kernel {
        /// The render node.
        minor: u32,
        /// The call, and the kernel's answer.
        r#source: rewake_amdgpu_uapi::Error,
    },
    /// A call that every DRM driver has failed on the render node.
    #[error("renderD{minor}: {call}: {source}")]
    Drm {
        /// The render node.
        minor: u32,
        /// The call.
        call: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Staging memory could not be created.
    #[error("{bytes} bytes of staging memory: {act}: {source}")]
    Staging {
        /// The size of all slots.
        bytes: u64,
        /// The call that failed.
        act: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// The shape of the staging memory is not valid.
    #[error(
        "staging memory of {slots} slots of {slot_bytes} bytes: slots are whole pages, and all of them less \
         than 2^40 bytes"
    )]
    Shape {
        /// The requested number.
        slots: u32,
        /// The requested size.
        slot_bytes: u64,
    },
    /// The GPU's address space has no room.
    #[error("renderD{minor}: no {bytes} bytes of GPU addresses are free: release BOs first")]
    Addresses {
        /// The render node.
        minor: u32,
        /// The size of the BO or the staging memory.
        bytes: u64,
    },
    /// A BO is smaller than the caller expects.
    #[error("renderD{minor}: a BO has {size} bytes, and {wanted} bytes were expected")]
    Size {
        /// The render node.
        minor: u32,
        /// The size of its dma-buf.
        size: u64,
        /// The size that the caller expects.
        wanted: u64,
    },
    /// A transfer exceeds its BO or slot, has no bytes, or fills incomplete words.
    #[error("transfer of {bytes} bytes at {at:#x} of {what} of {size:#x} bytes: {reason}")]
    Range {
        /// The object: a BO or a slot.
        what: &'static str,
        /// The first byte.
        at: u64,
        /// The number of bytes.
        bytes: u64,
        /// The size of the object.
        size: u64,
        /// The violated rule.
        reason: &'static str,
    },
    /// The BO was released, or belongs to another engine.
    #[error("renderD{minor}: the BO was released, or belongs to another engine")]
    Bo {
        /// The render node.
        minor: u32,
    },
    /// The ticket's end was reported before, or it belongs to another engine.
    #[error("renderD{minor}: the ticket's end was reported before, or it belongs to another engine")]
    Ticket {
        /// The render node.
        minor: u32,
    },
    /// All rings have as many submissions in flight as they can take.
    #[error("renderD{minor}: every copy ring is full: wait for a ticket")]
    Full {
        /// The render node.
        minor: u32,
    },
    /// The transfers exceed one submission.
    #[error(
        "renderD{minor}: {packets} packets in one submission, which holds {most}: submit fewer transfers"
    )]
    Long {
        /// The render node.
        minor: u32,
        /// The packets of all transfers.
        packets: u64,
        /// The limit.
        most: u64,
    },
    /// The GPU has no copy ring, and the CPU has no mapping of the BO.
    #[error(
        "renderD{minor} offers no copy ring, and the CPU cannot reach a BO of {bytes} bytes either \
         ({source}): load the amdgpu driver with copy rings for the kernel (user_queue=0), or enable a large \
         BAR"
    )]
    Unreachable {
        /// The render node.
        minor: u32,
        /// The size of the BO.
        bytes: u64,
        /// The driver's answer.
        r#source: rewake_amdgpu_uapi::Error,
    },
    /// The thread for copies by the CPU could not be started.
    #[error("renderD{minor}: start the thread that copies: {source}")]
    Thread {
        /// The render node.
        minor: u32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Copies by the CPU are late, and still run.
    #[error(
        "renderD{minor}, copies by the CPU: {transfers} transfers of {bytes} bytes are not done after \
         {age:.3?}: does the GPU's memory answer?"
    )]
    Slow {
        /// The render node.
        minor: u32,
        /// The transfers in the submission.
        transfers: usize,
        /// Their bytes.
        bytes: u64,
        /// The time since it was submitted.
        age: Duration,
    },
    /// A submission failed on the GPU, or a reset lost it: its bytes were not copied.
    #[error("{0}")]
    Failed(Box<SubmitFault>),
    /// A submission is late, and still in flight.
    #[error("{0}")]
    Late(Box<SubmitFault>),
    /// An earlier submission of this engine failed.
    #[error("renderD{minor}: an earlier submission failed: open a new engine")]
    Lost {
        /// The render node.
        minor: u32,
    },
}

/// The facts about a submission that failed or is late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmitFault {
    /// The render node.
    pub minor: u32,
    /// The ring.
    pub ring: u32,
    /// The transfers in the submission.
    pub transfers: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes in flight on that ring, including these.
    pub queued: u64,
    /// The time since it was submitted.
    pub age: Duration,
    /// The kernel's answer if it failed: ECANCELED or ETIME after a reset of the GPU or its ring.
    pub errno: Option<i32>,
    /// `AMDGPU_CTX_QUERY2_FLAGS_*`, if the kernel reports them: the GPU's state since the engine was opened.
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
        let Some(state) = state else { return f.write_str("; the kernel does not report the GPU's state") };
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
    fn a_fault_names_the_ring_the_amount_the_time_and_the_gpu_state() {
        assert_eq!(
            Error::Late(Box::new(LATE)).to_string(),
            "renderD129, copy ring 1: 3 transfers of 4096 bytes are not done after 1.500s, 8192 bytes in \
             flight there; the GPU was not reset: look for page faults in the kernel's log"
        );
        let failed = SubmitFault { errno: Some(125), state: Some(5), ..LATE };
        assert_eq!(
            failed.to_string(),
            "renderD129, copy ring 1: 3 transfers of 4096 bytes failed after 1.500s: Operation canceled (os \
             error 125); the GPU was reset, this engine's commands are the cause"
        );
        let silent = SubmitFault { state: None, ..failed };
        assert!(silent.to_string().ends_with("; the kernel does not report the GPU's state"), "{silent}");
    }
}
