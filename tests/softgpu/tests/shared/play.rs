// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tree of puppets, dumped and restored.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_testkit::soon;
use softgpu_tests::criu::{Criu, Plugin, Version, queues_come_back, wait_for_the_end_of};
use softgpu_tests::{Judge, Scene};

use crate::puppet::{self, Puppet};

/// One test's tree, whose first process is `root`.
#[derive(Debug)]
pub(crate) struct Play {
    folder: tempfile::TempDir,
    pub(crate) root: Puppet,
    /// None once it has been dumped: what comes back is nobody's child.
    child: Option<Child>,
    others: Vec<Puppet>,
    /// Whether it runs.
    up: bool,
    version: Version,
}

/// Runs `act` with a tree, or one of the tree's processes.
pub(crate) fn play(scene: &Scene, version: Version, act: impl FnOnce(&mut Play)) {
    if let Some(socket) = scene.role() {
        puppet::obey(scene, Path::new(socket));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (root, child) = Puppet::start(scene, folder.path(), "root");
    let mut play = Play { folder, root, child: Some(child), others: Vec::new(), up: true, version };
    act(&mut play);
    play.end();
}

impl Play {
    /// Another process, the root's child: `start` for a program of its own, `fork` for the root's fork.
    pub(crate) fn child(&mut self, act: &str, name: &str) -> Puppet {
        let child = self.root.child(act, name);
        self.others.push(child.clone());
        child
    }

    /// Ends a child in good order.
    pub(crate) fn leave(&mut self, child: &Puppet) {
        let before = alive("processes");
        child.tell("quit");
        self.others.retain(|other| other.pid != child.pid);
        // The driver takes it apart later.
        wait_for_the_driver(|| alive("processes") < before);
    }

    pub(crate) fn criu(&self, plugin: Plugin) -> Criu {
        Criu::with(plugin, self.version, &self.images()).unwrap()
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.folder.path().join("images")
    }

    /// Dumps the tree and waits until nothing is left of it.
    pub(crate) fn dump(&mut self) {
        self.criu(Plugin::Ours).dump(self.root.pid).unwrap();
        self.gone();
    }

    /// Ends the restored tree at once.
    pub(crate) fn kill(&mut self) {
        for puppet in self.others.iter().chain([&self.root]) {
            kill(Pid::from_raw(puppet.pid.cast_signed()), Signal::SIGKILL).unwrap();
        }
        self.gone();
    }

    fn gone(&mut self) {
        self.up = false;
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
        for puppet in self.others.iter().chain([&self.root]) {
            wait_for_the_end_of(puppet.pid).unwrap();
        }
        wait_for_the_driver(|| buffers() == Some(0));
    }

    /// Restores it; false where no queue can be restored.
    pub(crate) fn restore(&mut self, plugin: Plugin) -> bool {
        let restored = self.criu(plugin).restore();
        if !queues_come_back() {
            assert!(restored.is_err());
            self.gone();
            return false;
        }
        restored.unwrap();
        self.up = true;
        true
    }

    /// Restores it in vain; gives the reason.
    pub(crate) fn refused(&mut self) -> String {
        let refused = self.criu(Plugin::Ours).restore().unwrap_err().to_string();
        self.gone();
        refused
    }

    /// Dumps and restores it: as many buffers as before are alive. False where no queue can be restored.
    pub(crate) fn there_and_back(&mut self) -> bool {
        let before = buffers();
        self.dump();
        if !self.restore(Plugin::Ours) {
            return false;
        }
        // A shared one is one.
        wait_for_the_driver(|| buffers() == before);
        true
    }

    fn end(mut self) {
        if self.up {
            self.others.iter().chain([&self.root]).for_each(|puppet| drop(puppet.tell("quit")));
            self.gone();
        }
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        if thread::panicking() {
            for puppet in self.others.iter().chain([&self.root]) {
                // It may have ended; the failure has been told.
                let _ = kill(Pid::from_raw(puppet.pid.cast_signed()), Signal::SIGKILL);
            }
        }
    }
}

/// Buffers alive; None where GPUs are real.
pub(crate) fn buffers() -> Option<u64> {
    alive("bos")
}

fn alive(what: &str) -> Option<u64> {
    Judge::find().and_then(|judge| judge.alive().get(what).copied())
}

fn wait_for_the_driver(done: impl Fn() -> bool) {
    let alive = || Judge::find().map(|judge| judge.alive());
    assert!(soon(|| done() || alive().is_none()), "the driver still has what was there: {:?}", alive());
}

/// Whether a GPU reaches another one's VRAM: over XGMI only, with Debian's kernels.
pub(crate) fn gpus_reach_each_other() -> bool {
    let topology = Topology::read().unwrap();
    let hives: Vec<u64> = topology.gpus().map(|gpu| gpu.property("hive_id")).collect();
    hives.iter().all(|hive| *hive != 0 && *hive == hives[0])
}

/// Whether buffers in VRAM have a mapping for the CPU.
pub(crate) fn cpu_reaches_vram() -> bool {
    Topology::read().unwrap().gpus().all(Node::has_large_bar)
}
