// SPDX-License-Identifier: MIT OR Apache-2.0
//! Uses KVM where a kernel boots under it, emulation elsewhere: on some hosts /dev/kvm opens, and then hangs
//! every guest.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::cache::{self, Inputs};
use super::machine::{self, Parts};
use super::{home, say};

/// A boot under KVM takes a second.
const PROBE: Duration = Duration::from_secs(15);

/// QEMU's arguments; tries KVM once per host kernel.
///
/// Emulated processors share one thread, because QEMU before 8.1 otherwise keeps code that the other
/// processor is rewriting (it reads a page before it locks it), and a kernel that switches a static key then
/// stops at its own marker, "Oops: int3". Sharing a thread does not slow the suite measurably.
///
/// Emulated processors do not offer fast string instructions, because QEMU before 10 emulates these byte by
/// byte, while a kernel without them clears and copies eight bytes at a time: tests that restore servers take
/// 0.6 of the time.
pub(super) fn arguments(parts: &Parts) -> anyhow::Result<[&'static str; 4]> {
    let answer = home().join("kvm");
    let host = fs::read_to_string("/proc/version").context("read /proc/version")?;
    let exists = Path::new("/dev/kvm").exists();
    let inputs = Inputs::default().text(&host).text(if exists { "kvm" } else { "none" });
    cache::ready(&answer, &inputs, || {
        let boots = exists && boots(parts)?;
        say(if boots { "KVM works here" } else { "KVM does not work here: plain emulation" });
        fs::write(&answer, if boots { "yes" } else { "no" }).context("note whether KVM works")
    })?;
    let answer = fs::read_to_string(&answer).context("read whether KVM works")?;
    Ok(if answer == "yes" {
        ["-accel", "kvm", "-cpu", "max"]
    } else {
        ["-accel", "tcg,thread=single", "-cpu", "max,erms=off,fsrm=off"]
    })
}

/// Whether machines are emulated here, as far as that is known: where `/dev/kvm` exists, the first machine
/// tries it.
pub(super) fn is_emulated() -> bool {
    !Path::new("/dev/kvm").exists()
        || fs::read_to_string(home().join("kvm")).is_ok_and(|answer| answer == "no")
}

/// Whether the kernel reaches the initramfs's first program, which powers the machine off.
fn boots(parts: &Parts) -> anyhow::Result<bool> {
    let mut qemu = Command::new("setpriv");
    qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    qemu.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-machine",
        "q35",
        "-cpu",
        "max",
    ]);
    qemu.args(["-accel", "kvm", "-smp", "2", "-m", "512", "-append", "rewake.probe panic=-1"]);
    qemu.arg("-kernel").arg(&parts.kernel).arg("-initrd").arg(&parts.initramfs);
    let mut child = qemu
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start `qemu-system-x86_64`")?;
    Ok(machine::wait(&mut child, PROBE)?.is_some_and(|status| status.success()))
}
