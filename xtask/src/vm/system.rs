// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Debian system of the machine, in which kernel modules are built, too: a folder, made by mmdebstrap
//! from sid, with trixie beside it for the older kernel and the older CRIU. It takes only this repository's
//! programs from the host, so that it is the same on every host.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use super::cache::{self, Inputs};
use super::options::Series;
use super::{home, say};
use crate::{program, setup};

/// Packages that the host needs: to make the system, to put it on a disk, to run it.
pub(super) const HOST_PACKAGES: [&str; 5] =
    ["mmdebstrap", "debian-archive-keyring", "e2fsprogs", "cpio", "qemu-system-x86"];

/// Packages beside Debian's essential ones and those that `system.sh` adds.
const PACKAGES: [&str; 32] = [
    // To build kernel modules: compilers of both kernels come with their headers.
    "gcc",
    "make",
    "dwarves",
    "libc6-dev",
    // To boot.
    "busybox-static",
    "xz-utils",
    "kmod",
    "mount",
    // To work in.
    "criu",
    "iproute2",
    "iptables",
    "nftables",
    "procps",
    "psmisc",
    "runc",
    "strace",
    "ca-certificates",
    // Programs of other projects that use GPUs.
    "rocminfo",
    "libdrm-amdgpu1",
    "libdrm-tests",
    // Packages that CRIU's C plugin for GPUs needs.
    "libbsd-dev",
    "libcap-dev",
    "libdrm-dev",
    "libgnutls28-dev",
    "libnet1-dev",
    "libnl-3-dev",
    "libprotobuf-c-dev",
    "libprotobuf-dev",
    "pkgconf",
    "protobuf-c-compiler",
    "protobuf-compiler",
    "uuid-dev",
];
const SUITES: [&str; 2] = ["sid", "trixie"];
const SCRIPT: &str = include_str!("guest/system.sh");

/// The system's folder.
pub(super) fn ready() -> anyhow::Result<PathBuf> {
    let system = home().join("system");
    let inputs = Inputs::default().text(&PACKAGES.join(" ")).text(&SUITES.join(" ")).text(SCRIPT);
    cache::ready(&system, &inputs, || make(&system))?;
    Ok(system)
}

/// The kernel to boot.
pub(super) fn kernel(series: Series) -> anyhow::Result<PathBuf> {
    let system = home().join("system");
    Ok(system.join("boot").join(format!("vmlinuz-{}", release(&system, series)?)))
}

/// The kernel's full name, `uname -r`.
pub(super) fn release(system: &Path, series: Series) -> anyhow::Result<String> {
    let link = system.join("kernels").join(series.name());
    let name = fs::read_link(&link).with_context(|| format!("read the link {}", link.display()))?;
    Ok(name.to_string_lossy().into_owned())
}

/// A command inside.
pub(super) fn inside(system: &Path, program: &str) -> Command {
    let mut command = Command::new("chroot");
    command.arg(system).arg(program).env("LC_ALL", "C");
    command
}

/// Built in a temporary folder first: a system in place is whole.
fn make(system: &Path) -> anyhow::Result<()> {
    let partial = home().join("system.partial");
    let script = home().join("system.sh");
    fs::write(&script, SCRIPT).with_context(|| format!("write {}", script.display()))?;
    let mut refusals = Vec::new();
    for archive in setup::archives()? {
        say(&format!("making a Debian system with two kernels from {} (minutes)", archive.address()));
        let sources = home().join("system.sources");
        fs::write(&sources, SUITES.map(|suite| archive.for_suite(suite)).join("\n"))
            .with_context(|| format!("write {}", sources.display()))?;
        cache::remove(&partial)?;
        let log = home().join("system.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = mmdebstrap(&partial, &sources, &script);
        command.stdin(Stdio::null()).stdout(output.try_clone().context("share the log")?).stderr(output);
        match program::run(&mut command) {
            Ok(()) => {
                return fs::rename(&partial, system)
                    .with_context(|| format!("rename {} to {}", partial.display(), system.display()));
            }
            Err(error) => {
                let text = fs::read_to_string(&log).unwrap_or_default();
                program::last_lines(&text).iter().for_each(|line| say(&format!("| {line}")));
                refusals.push(format!("{}: {error:#}", archive.address()));
            }
        }
    }
    bail!(
        "cannot make the machine's Debian system: {}. Check the network, and the end of {}",
        refusals.join("; "),
        home().join("system.log").display()
    )
}

fn mmdebstrap(partial: &Path, sources: &Path, script: &Path) -> Command {
    // If this program is killed, all processes of mmdebstrap end, and the mounts end with their namespace.
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount-proc",
        "--pid",
        "--fork",
        "--kill-child",
        "mmdebstrap",
    ]);
    command.args(["--mode=root", "--variant=apt", "--format=directory", "--skip=cleanup/apt"]);
    for option in [
        // A mirror's snapshot may be older than the lifetime of its signature.
        "Acquire::Check-Valid-Until \"false\"",
        "Acquire::Languages \"none\"",
        "Acquire::Retries \"3\"",
        "APT::Install-Recommends \"false\"",
    ] {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(format!("--include={}", PACKAGES.join(",")));
    command.arg(format!("--customize-hook=sh '{}' \"$1\"", script.display()));
    command.args(["sid".as_ref(), partial.as_os_str(), sources.as_os_str()]);
    command
}
