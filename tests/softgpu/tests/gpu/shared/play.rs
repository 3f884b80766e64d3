// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tree of puppets, dumped and restored.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_testkit::soon;
use softgpu_tests::criu::{Criu, Plugin, Version, queues_can_be_restored, wait_for_the_end_of};
use softgpu_tests::{Judge, Scene};

use crate::shared::puppet::{self, Puppet};

/// One test's tree, whose first process is `root`.
#[derive(Debug)]
pub(crate) struct Play {
    folder: tempfile::TempDir,
    pub(crate) root: Puppet,
    /// None once it has been dumped: a restored process is no child.
    child: Option<Child>,
    others: Vec<Puppet>,
    /// Whether the process runs.
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

    /// Asks a child to end.
    pub(crate) fn leave(&mut self, child: &Puppet) {
        let before = alive("processes");
        child.tell("quit");
        self.others.retain(|other| other.pid != child.pid);
        // The driver releases its BOs later.
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

    /// Kills the restored tree.
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

    /// Restores the tree; false where no queue can be restored.
    pub(crate) fn restore(&mut self, plugin: Plugin) -> bool {
        let restored = self.criu(plugin).restore();
        if !queues_can_be_restored() {
            assert!(restored.is_err());
            self.gone();
            return false;
        }
        restored.unwrap();
        self.up = true;
        true
    }

    /// Restores the tree, which must fail; returns the reason.
    pub(crate) fn refused(&mut self) -> String {
        let refused = self.criu(Plugin::Ours).restore().unwrap_err().to_string();
        self.gone();
        refused
    }

    /// Dumps and restores the tree: as many BOs as before are alive. False where no queue can be restored.
    pub(crate) fn dump_and_restore(&mut self) -> bool {
        let before = buffers();
        self.dump();
        if !self.restore(Plugin::Ours) {
            return false;
        }
        // A shared BO counts once.
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
                // It may have ended; the failure has been reported.
                let _ = kill(Pid::from_raw(puppet.pid.cast_signed()), Signal::SIGKILL);
            }
        }
    }
}

/// BOs that are alive; None where GPUs are real.
pub(crate) fn buffers() -> Option<u64> {
    alive("bos")
}

fn alive(what: &str) -> Option<u64> {
    Judge::find().and_then(|judge| judge.alive().get(what).copied())
}

fn wait_for_the_driver(done: impl Fn() -> bool) {
    let alive = || Judge::find().map(|judge| judge.alive());
    assert!(soon(|| done() || alive().is_none()), "the driver still has BOs: {:?}", alive());
}

/// Whether a GPU can access another one's VRAM: over XGMI only, with Debian's kernels.
pub(crate) fn gpus_reach_each_other() -> bool {
    let topology = Topology::read().unwrap();
    let hives: Vec<u64> = topology.gpus().map(|gpu| gpu.property("hive_id")).collect();
    hives.iter().all(|hive| *hive != 0 && *hive == hives[0])
}

/// Whether BOs in VRAM have a mapping for the CPU.
pub(crate) fn cpu_reaches_vram() -> bool {
    Topology::read().unwrap().gpus().all(Node::has_large_bar)
}
