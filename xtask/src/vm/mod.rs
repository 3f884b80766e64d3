// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask vm`: a virtual machine with a Debian kernel and the software GPU, made on first use from
//! Debian's packages, kept under `.rewake/vm`. docs/setup.md describes it.

mod accelerator;
mod cache;
mod console;
mod disk;
mod initramfs;
mod machine;
mod module;
mod options;
mod shapes;
mod suite;
mod system;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::{files, progress, repository, root, setup};
pub(crate) use options::{Disk, Options};
use options::{Series, System};
pub(crate) use suite::{PROGRAM, Wanted, run as run_tests};

/// Whether a machine runs a test, by the test's path in its program.
#[cfg(test)]
pub(crate) fn runs(machine: &str, test: &str) -> bool {
    shapes::SHAPES.iter().any(|shape| shape.name == machine && shape.tests.have(test))
}

/// Runs one command in the machine; its exit code is this one's.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<ExitCode> {
    let options = Options::parse(words)?;
    root::become_root()?;
    let status = boot(&options)?;
    Ok(ExitCode::from(status))
}

/// Runs the tests that need a GPU.
pub(crate) fn test(wanted: &Wanted<'_>) -> anyhow::Result<()> {
    suite::build_and_run(wanted)
}

/// Makes missing or stale parts, then starts the machine; returns the command's exit code.
pub(crate) fn boot(options: &Options) -> anyhow::Result<u8> {
    let parts = parts(options.system, options.series)?;
    machine::run(options, &parts, accelerator(&parts)?)
}

fn accelerator(parts: &machine::Parts) -> anyhow::Result<[&'static str; 4]> {
    let _lock = lock()?;
    accelerator::arguments(parts)
}

/// Makes missing or stale parts of the demo's machine.
pub(crate) fn prepare_for_demo() -> anyhow::Result<()> {
    let Options { system, series, .. } = Options::for_demo(Vec::new());
    parts(system, series).map(drop)
}

/// Whether the demo's machine was made here before, so that the next starts at once.
pub(crate) fn is_made_for_demo() -> bool {
    home_of(System::Demo).join("disk.ext4.stamp").exists()
}

fn parts(kind: System, series: Series) -> anyhow::Result<machine::Parts> {
    let _lock = lock()?;
    setup::install(&system::HOST_PACKAGES)?;
    let home = home_of(kind);
    files::create_folder(&home)?;
    let system = system::ready(&home, kind)?;
    Ok(machine::Parts {
        kernel: system::kernel(&system, series)?,
        disk: disk::ready(&home, &system)?,
        initramfs: initramfs::ready(&home, &system, series)?,
        module: module::ready(&home, &system, series)?,
    })
}

/// Makes what all machines of the suite need, and finds out whether KVM works, which decides how many run at
/// once; returns the folder of the kernel's headers for users, of Debian's newest.
pub(crate) fn prepare_all() -> anyhow::Result<PathBuf> {
    root::become_root()?;
    for series in Series::ALL {
        accelerator(&parts(System::Whole, series)?)?;
    }
    Ok(home_of(System::Whole).join("system/usr/include"))
}

/// The releases of the kernels, of machines that are made.
pub(crate) fn kernels() -> anyhow::Result<Vec<String>> {
    let system = home_of(System::Whole).join("system");
    Series::ALL.into_iter().map(|series| system::release(&system, series)).collect()
}

/// The parts of machines with this system.
fn home_of(system: System) -> PathBuf {
    match system {
        System::Whole => home(),
        System::Demo => home().join("demo"),
    }
}

/// All machines.
fn home() -> PathBuf {
    repository::scratch().join("vm")
}

/// One process at a time makes parts here; the lock ends with the file.
fn lock() -> anyhow::Result<File> {
    files::create_folder(home())?;
    files::lock(&home().join("lock"))
}

fn say(line: &str) {
    progress::say(&format!("vm: {line}"));
}
