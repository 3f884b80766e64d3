// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which kernels restore the queues of which GPUs: the only table of them.
//!
//! Two kinds of GPUs are special. Firmware (MES) runs the queues of GFX11 and newer chips, and takes no saved
//! state. And MI300 in SPX mode spreads a queue over several compute dies (XCCs), whose state is one die's
//! after the other's. Kernels save and accept that state since different releases:
//!
//! * Before 6.16.4 a checkpoint saves the first XCC. A restore succeeds, and the queue never runs.
//! * 6.16.4 to 6.18.41, and 6.19 to 7.1.5, save all XCCs and restore them.
//! * 6.18.42 and later 6.18, 7.1.6 and later, save all XCCs. They refuse the restore (EINVAL), because the
//!   fix of CVE-2026-68258 compares the state's length with one XCC's.
//!
//! In CPX mode each partition is a GPU with one XCC, which every kernel restores.
//!
//! Sources: `kfd_device_queue_manager.c`, `kfd_process_queue_manager.c` and `kfd_mqd_manager_v9.c` of these
//! releases; commits a578f2a58c3a (saves all XCCs) and f19d8086f664 (compares with one).

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use super::blob::Queue;
use crate::topology::{GfxVersion, Node};

/// The first generation whose queues firmware (MES) runs.
const FIRST_WITH_MES: u32 = 11;
/// `KFD_QUEUE_TYPE_COMPUTE` of `kfd_priv.h`, in the kernel's private data.
const COMPUTE: u32 = 0;
/// Bytes of a compute queue's state on one XCC (`struct v9_mqd` of `v9_structs.h`: 512 words).
const MQD: usize = 2048;
/// The releases that restore queues which are spread over several XCCs.
const RESTORING: [RangeInclusive<Release>; 2] =
    [Release::new(6, 16, 4)..=Release::new(6, 18, 41), Release::new(6, 19, 0)..=Release::new(7, 1, 5)];

/// A kernel's release, as in 6.18.41.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    major: u32,
    minor: u32,
    patch: u32,
}

/// What a kernel does with a GPU's queues in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueSupport {
    /// All of their state is saved, and restored.
    Restored,
    /// Firmware (MES) runs them, and takes no saved state: Linux 7.2 and 7.3 refuse the restore, and 6.12
    /// uses a null pointer (`kfd_process_queue_manager.c`).
    Firmware,
    /// The state of the first of several XCCs is saved: a restored queue never runs.
    FirstXccSaved,
    /// The state of all XCCs is saved, and a restore is refused.
    Refused,
    /// They have several XCCs, and the driver is not the kernel's own, so that the release does not matter.
    Unknown,
}

impl Release {
    /// A release by its numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Parses the numbers at the start of a release, such as `6.18.41-1-amd64`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
        let mut numbers = text[..end].split('.').map(str::parse);
        let major = numbers.next()?.ok()?;
        let minor = numbers.next()?.ok()?;
        Some(Self { major, minor, patch: numbers.next().and_then(Result::ok).unwrap_or(0) })
    }

    /// Returns the release of this machine's GPU driver, or `None` where the driver is AMD's own package
    /// (DKMS), because that package has a version of its own.
    #[must_use]
    pub fn of_driver() -> Option<Self> {
        if Path::new("/sys/module/amdgpu/version").exists() {
            return None;
        }
        Self::parse(&std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
    }
}

impl fmt::Display for Release {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { major, minor, patch } = self;
        match patch {
            0 => write!(to, "{major}.{minor}"),
            _ => write!(to, "{major}.{minor}.{patch}"),
        }
    }
}

impl QueueSupport {
    /// Returns what a kernel does with the queues of a chip that has `xccs` compute dies. Distributions may
    /// have a change earlier or later than the release says.
    #[must_use]
    pub fn of(gfx: GfxVersion, xccs: u64, driver: Option<Release>) -> Self {
        if gfx.major >= FIRST_WITH_MES {
            return Self::Firmware;
        }
        match driver {
            _ if xccs < 2 => Self::Restored,
            None => Self::Unknown,
            Some(release) if RESTORING.iter().any(|releases| releases.contains(&release)) => Self::Restored,
            Some(release) if release < *RESTORING[0].start() => Self::FirstXccSaved,
            Some(_) => Self::Refused,
        }
    }

    /// The same, of a GPU and the driver of this machine.
    #[must_use]
    pub fn here(gpu: &Node) -> Self {
        Self::of(gpu.gfx_version(), gpu.property("num_xcc"), Release::of_driver())
    }
}

/// What restores queues that are spread over several XCCs, for messages.
#[must_use]
pub fn restored_by() -> String {
    let [older, newer] = RESTORING.map(|releases| format!("{} to {}", releases.start(), releases.end()));
    format!(
        "Linux {older} and {newer} restore them, and every kernel does in CPX mode, in which a GPU has one \
         XCC"
    )
}

impl Queue {
    /// Whether a GPU that has `xccs` compute dies spreads the queue over them. Copy engines (SDMA) are not
    /// spread.
    #[must_use]
    pub fn is_spread(&self, xccs: u64) -> bool {
        self.kind == COMPUTE && xccs > 1
    }

    /// Whether the saved state is that of fewer XCCs than the GPU has.
    #[must_use]
    pub fn is_of_part(&self, xccs: u64) -> bool {
        let whole = usize::try_from(xccs).unwrap_or(usize::MAX).saturating_mul(MQD);
        self.is_spread(xccs) && self.mqd().len() < whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        let parsed = |text| Release::parse(text).map(|release| release.to_string());
        for (text, release) in [
            ("6.18.41", Some("6.18.41")),
            ("6.12.48+deb13-amd64", Some("6.12.48")),
            ("7.2-rc3", Some("7.2")),
            ("6.17.0-5-generic", Some("6.17")),
            ("6.16.", Some("6.16")),
            ("", None),
            ("6", None),
            ("99999999999.1", None),
            ("linux", None),
        ] {
            assert_eq!(parsed(text).as_deref(), release, "{text:?}");
        }
        assert!(
            Release::new(6, 18, 9) < Release::new(6, 18, 41)
                && Release::new(6, 9, 99) < Release::new(6, 16, 0)
        );
    }

    #[test]
    fn kernels_differ_for_queues_on_several_xccs() {
        use QueueSupport::{FirstXccSaved, Refused, Restored};
        let mi300 = GfxVersion { major: 9, minor: 4, step: 2 };
        for (release, support) in [
            ("5.18", FirstXccSaved),
            ("6.12.99", FirstXccSaved),
            ("6.16.3", FirstXccSaved),
            ("6.16.4", Restored),
            ("6.17", Restored),
            ("6.18.41", Restored),
            ("6.18.42", Refused),
            ("6.19", Restored),
            ("7.0.12", Restored),
            ("7.1.5", Restored),
            ("7.1.6", Refused),
            ("7.2", Refused),
            ("7.3.4", Refused),
        ] {
            let driver = Release::parse(release);
            assert_eq!(QueueSupport::of(mi300, 8, driver), support, "{release}");
            assert_eq!(QueueSupport::of(mi300, 1, driver), Restored, "{release}, CPX");
        }
        assert_eq!(QueueSupport::of(mi300, 8, None), QueueSupport::Unknown);
        let rdna3 = GfxVersion { major: 11, minor: 0, step: 0 };
        assert_eq!(QueueSupport::of(rdna3, 1, None), QueueSupport::Firmware);
        let said = "Linux 6.16.4 to 6.18.41 and 6.19 to 7.1.5 restore them";
        assert!(restored_by().starts_with(said), "{}", restored_by());
    }
}
