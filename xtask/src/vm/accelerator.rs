// SPDX-License-Identifier: MIT OR Apache-2.0
//! KVM where a kernel really boots under it, emulation elsewhere: there are hosts whose /dev/kvm opens, and then
//! hangs every guest.

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

/// QEMU's arguments; asks the machine once per host kernel. Emulated processors take turns on one thread: side by side,
/// QEMU before 8.1 keeps code that the other processor is just rewriting (it reads a page before it locks it), and a kernel
/// that switches a static key then dies of its own marker, "Oops: int3". Turns cost the suite nothing that can be seen.
pub(super) fn arguments(parts: &Parts) -> anyhow::Result<[&'static str; 2]> {
    let answer = home().join("kvm");
    let host = fs::read_to_string("/proc/version").context("read /proc/version")?;
    let exists = Path::new("/dev/kvm").exists();
    let inputs = Inputs::default().text(&host).text(if exists { "kvm" } else { "none" });
    cache::ready(&answer, &inputs, || {
        let boots = exists && boots(parts)?;
        say(if boots { "KVM works here" } else { "no KVM that works here: plain emulation" });
        fs::write(&answer, if boots { "yes" } else { "no" }).context("note whether KVM works")
    })?;
    let answer = fs::read_to_string(&answer).context("read whether KVM works")?;
    Ok(["-accel", if answer == "yes" { "kvm" } else { "tcg,thread=single" }])
}

/// Whether the kernel gets as far as the initramfs's first program, which powers the machine off.
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
