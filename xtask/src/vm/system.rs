// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Debian system of a machine, in which kernel modules are built, too: a folder, made by mmdebstrap from
//! sid. The whole one has trixie in addition, for the older kernel and the older CRIU. It takes only this
//! repository's programs from the host, so that it is the same on every host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use super::cache::{self, Inputs};
use super::options::{Series, System};
use super::say;
use crate::{files, program, setup};

/// Packages that the host needs: to make the system, to put it on a disk, to run it.
pub(super) const HOST_PACKAGES: [&str; 5] =
    ["mmdebstrap", "debian-archive-keyring", "e2fsprogs", "cpio", "qemu-system-x86"];

/// Packages of every system.
const COMMON: [&str; 7] = [
    // To build kernel modules: compilers come with the kernels' headers.
    "make",
    // To boot.
    "busybox-static",
    "xz-utils",
    "kmod",
    "mount",
    // To work in.
    "criu",
    "iproute2",
];

/// What `whole.sh` does not install.
const WHOLE: [&str; 25] = [
    // Their headers alone lack these.
    "gcc",
    "dwarves",
    "libc6-dev",
    // To work in.
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

/// The kernel, and what the demo's commands and the build of a module use of Debian's essential packages.
const DEMO: [&str; 13] = [
    "linux-image-amd64",
    "linux-headers-amd64",
    "base-files",
    "base-passwd",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "grep",
    "hostname",
    "mawk",
    "sed",
    "util-linux",
];

/// How a system is made.
#[derive(Debug)]
struct Recipe {
    /// What is being made, and how long that takes.
    what: &'static str,
    /// The first has all packages that are not named with another.
    suites: &'static [&'static str],
    /// Packages in addition to [`COMMON`].
    packages: &'static [&'static str],
    /// Options of mmdebstrap.
    options: &'static [&'static str],
    script: &'static str,
    /// Whether mmdebstrap runs the script, with /proc and the lists of packages, or it runs afterwards.
    is_hook: bool,
}

impl Recipe {
    const fn of(system: System) -> Self {
        match system {
            // Debian's essential packages and apt, all installed.
            System::Whole => Self {
                what: "a Debian system with two kernels (minutes)",
                suites: &["sid", "trixie"],
                packages: &WHOLE,
                options: &["--variant=apt", "--skip=cleanup/apt"],
                script: include_str!("guest/whole.sh"),
                is_hook: true,
            },
            // Unpacked alone: scripts of packages would take four times as long as everything else.
            System::Demo => Self {
                what: "a small Debian system",
                suites: &["sid"],
                packages: &DEMO,
                options: &["--variant=extract"],
                script: include_str!("guest/demo.sh"),
                is_hook: false,
            },
        }
    }

    fn packages(&self) -> String {
        [&COMMON, self.packages].concat().join(",")
    }
}

/// The system's folder, in the machine's.
pub(super) fn ready(home: &Path, kind: System) -> anyhow::Result<PathBuf> {
    let (system, recipe) = (home.join("system"), Recipe::of(kind));
    let inputs = Inputs::default().text(&recipe.packages()).text(&recipe.suites.join(" "));
    let inputs = inputs.text(&recipe.options.join(" ")).text(recipe.script);
    cache::ready(&system, &inputs, || make(home, &system, &recipe))?;
    Ok(system)
}

/// The kernel to boot.
pub(super) fn kernel(system: &Path, series: Series) -> anyhow::Result<PathBuf> {
    Ok(system.join("boot").join(format!("vmlinuz-{}", release(system, series)?)))
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
fn make(home: &Path, system: &Path, recipe: &Recipe) -> anyhow::Result<()> {
    let partial = home.join("system.partial");
    let log = home.join("system.log");
    let script = home.join("system.sh");
    files::write(&script, recipe.script)?;
    let mut refusals = Vec::new();
    for archive in setup::archives()? {
        say(&format!("making {} from {}", recipe.what, archive.address()));
        let sources = home.join("system.sources");
        let suites: Vec<String> = recipe.suites.iter().map(|suite| archive.for_suite(suite)).collect();
        files::write(&sources, suites.join("\n"))?;
        files::remove(&partial)?;
        let output = files::create(&log)?;
        let logged = |command: &mut Command| {
            command.stdin(Stdio::null()).stdout(output.try_clone().context("share the log")?);
            program::run(command.stderr(output.try_clone().context("share the log")?))
        };
        let made = logged(&mut mmdebstrap(recipe, &partial, &sources, &script)).and_then(|()| {
            if recipe.is_hook { Ok(()) } else { logged(Command::new("sh").arg(&script).arg(&partial)) }
        });
        match made {
            Ok(()) => {
                return files::rename(&partial, system);
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
        log.display()
    )
}

fn mmdebstrap(recipe: &Recipe, partial: &Path, sources: &Path, script: &Path) -> Command {
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
    command.args(["--mode=root", "--format=directory"]).args(recipe.options);
    for option in [
        // A mirror's snapshot may be older than the lifetime of its signature.
        "Acquire::Check-Valid-Until \"false\"",
        "Acquire::Languages \"none\"",
        "Acquire::Retries \"3\"",
        "APT::Install-Recommends \"false\"",
    ] {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(format!("--include={}", recipe.packages()));
    if recipe.is_hook {
        command.arg(format!("--customize-hook=sh '{}' \"$1\"", script.display()));
    }
    command.args([recipe.suites[0].as_ref(), partial.as_os_str(), sources.as_os_str()]);
    command
}
