// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every CRIU with every plugin that it accepts, on a process that uses no GPU. All other tests with CRIU
//! rely on this.

use std::process::{Child, Command, Stdio};

use softgpu_tests::criu::{Criu, Plugin, Version};
use softgpu_tests::isolated;

/// A process that CRIU can dump: a session leader without a terminal.
fn sleeper() -> Child {
    let mut command = Command::new("setsid");
    command.args(["sleep", "1000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
}

/// Dumps it while it runs, dumps and ends it, restores it.
fn dump_and_restore(plugin: Plugin, version: Version, says: &str) {
    let folder = tempfile::tempdir().unwrap();
    let criu = Criu::with(plugin, version, &folder.path().join("images")).unwrap();
    let mut sleeper = sleeper();
    let pid = sleeper.id();
    while !runs(pid) {
        std::thread::yield_now();
    }
    criu.dump_running(pid).unwrap();
    assert!(runs(pid), "after a dump that leaves it running");
    criu.dump(pid).unwrap();
    sleeper.wait().unwrap();
    let log = criu.log("dump");
    assert!(log.contains(says) && log.contains("amdgpu_plugin"), "{log}");
    criu.restore().unwrap();
    assert!(runs(pid), "after its restore");
    Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
}

#[test]
fn our_plugin_in_both_versions() {
    isolated(0, |_| {
        dump_and_restore(Plugin::Ours, Version::V4_2, "Version: 4.2");
        dump_and_restore(Plugin::Ours, Version::V4_1, "Version: 4.1");
    });
}

#[test]
fn the_stock_plugin_in_its_own_version_only() {
    isolated(0, |_| {
        dump_and_restore(Plugin::Stock, Version::V4_2, "Version: 4.2");
        let folder = tempfile::tempdir().unwrap();
        let old = Criu::with(Plugin::Stock, Version::V4_1, folder.path()).unwrap();
        let mut sleeper = sleeper();
        // The plugin has a hook that CRIU 4.1 does not know.
        let error = old.dump(sleeper.id()).unwrap_err().to_string();
        assert!(error.contains("Corrupted plugin"), "{error}");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    });
}

#[test]
fn a_failure_quotes_the_log() {
    isolated(0, |_| {
        let folder = tempfile::tempdir().unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, folder.path()).unwrap();
        let error = criu.restore().unwrap_err().to_string();
        assert!(error.contains("restore") && error.contains("Unexpected EOF on (empty-image)"), "{error}");
    });
}
