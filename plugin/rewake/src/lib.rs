// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's plugin for processes that a session of `rewake` restored and that have missing memory. It has no
//! GPU code, and belongs into the plugin folder of every CRIU on the host.
//!
//! * Restore: it becomes lazy where the host's policy (`/etc/rewake/rewake.toml`) wants it.
//! * Restore: each task gets the session's fd store before it runs. So missing memory is never read as zeros,
//!   also when all processes of the streamer have ended.
//! * Dump: CRIU waits, before it stops any task, until no process of the tree has missing memory.
//! * `criu pre-dump` does not wait: it dumps no descriptors, and the dump that follows waits.
//!
//! `docs/plugin.md` describes its use, [`rewake_plugin_session`] has the code.
#![deny(unsafe_code)]

use std::ffi::CStr;

use rewake_criu_plugin::{Answer, Host, Plugin, Refusal, Stage, register};
use rewake_plugin_session::{Dumped, Parking, PluginImages, restore_lazily};

/// The plugin of one CRIU command.
#[derive(Debug)]
enum Rewake {
    Dump(Dumped),
    Restore(Parking),
}

register!(Rewake);

impl Plugin for Rewake {
    const NAME: &'static CStr = c"rewake_plugin";

    fn init(host: &Host, stage: Stage) -> Answer<Self> {
        match stage {
            Stage::Dump => Ok(Self::Dump(Dumped::wait(host)?)),
            Stage::PreDump => Err(Refusal::NotMine),
            Stage::Restore { .. } => {
                restore_lazily(host, PluginImages::WithoutGpus)?;
                Ok(Self::Restore(Parking::new()))
            }
        }
    }

    fn pause_devices(&mut self, _: &Host, pid: i32) -> Answer {
        if let Self::Dump(dumped) = self {
            dumped.check(pid)?;
        }
        // CRIU then asks other plugins, too.
        Err(Refusal::NotMine)
    }

    fn resume_devices_late(&mut self, host: &Host, pid: i32) -> Answer {
        if let Self::Restore(parking) = self {
            parking.task(host, pid);
        }
        Err(Refusal::NotMine)
    }
}
