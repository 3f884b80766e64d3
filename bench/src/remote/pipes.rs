// SPDX-License-Identifier: MIT OR Apache-2.0
//! Room for the pipes of CRIU's page server, which fails where the kernel gives it short ones.

use std::fs;

use anyhow::Context as _;

const LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// Bytes of a pipe that CRIU's servers for lazy restores need.
const ENOUGH: u64 = 4 << 20;

/// The raised limit of this machine. Dropping it sets the limit that was before.
#[derive(Debug)]
pub(super) struct PipeRoom(Option<String>);

impl PipeRoom {
    pub(super) fn made() -> anyhow::Result<Self> {
        let before = fs::read_to_string(LIMIT).context(LIMIT)?;
        let bytes: u64 = before.trim().parse().context(LIMIT)?;
        if bytes >= ENOUGH {
            return Ok(Self(None));
        }
        fs::write(LIMIT, ENOUGH.to_string()).with_context(|| format!("raising {LIMIT}"))?;
        Ok(Self(Some(before)))
    }
}

impl Drop for PipeRoom {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // It could be raised, so it can be lowered.
            let _ = fs::write(LIMIT, before);
        }
    }
}
