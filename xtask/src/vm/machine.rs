// SPDX-License-Identifier: MIT OR Apache-2.0
//! One run of the machine: QEMU from its start to its end, and the verdict.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::options::Options;
use super::{console, disk, home, initramfs, say};
use crate::commands::plugin;
use crate::{files, program, repository};

const BOOT: &str = include_str!("guest/boot.sh");
/// What the command printed, as a file.
const OUTPUT: &str = "output.log";
/// The polling interval for the machine's end.
const GLANCE: Duration = Duration::from_millis(20);
/// What `boot.sh` reports when it fails before the command.
const NOT_STARTED: u8 = 125;
/// Only errors are printed to the (slow) console until the command starts. A kernel panics at an oops.
/// Emulated processors need no mitigations. `norandmaps`: QEMU before 8 translates a program's code anew for
/// each address at which it runs, so with addresses that are random every process begins with tenths of a
/// second of translation (`rewake --version`: 0.33 s, 0.10 s without).
const KERNEL: &str = "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off no_timer_check norandmaps";

/// The parts of a machine.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) kernel: PathBuf,
    pub(super) disk: PathBuf,
    pub(super) initramfs: PathBuf,
    /// softgpu.ko
    pub(super) module: PathBuf,
}

/// Boots, runs the command, returns its exit code. An error if the machine failed, or its kernel reported an
/// error.
pub(super) fn run(options: &Options, parts: &Parts, accelerator: [&str; 4]) -> anyhow::Result<u8> {
    let folder = home().join("runs").join(std::process::id().to_string());
    clear_runs()?;
    files::create_folder(&folder)?;
    let result = supervise(options, parts, accelerator, &folder);
    let log = folder.join("console.log");
    let console =
        fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let result = match (console::trouble(&console), result) {
        (Some(line), Ok(status)) => {
            Err(anyhow::anyhow!("the machine's kernel says: {line} (the command's exit code was {status})"))
        }
        (Some(line), Err(error)) => Err(error.context(format!("the machine's kernel says: {line}"))),
        (None, result) => result,
    };
    if matches!(result, Ok(0)) {
        files::remove(&folder)?;
    } else {
        for name in ["console.log", OUTPUT] {
            let (made, kept) = (folder.join(name), home().join(name));
            if !made.exists() {
                continue;
            }
            files::rename(&made, &kept)?;
            say(&format!("kept: {}", kept.display()));
        }
        files::remove(&folder)?;
    }
    result
}

/// Removes files of killed runs, and of an earlier one of this process.
fn clear_runs() -> anyhow::Result<()> {
    let runs = home().join("runs");
    files::create_folder(&runs)?;
    let own = std::process::id().to_string();
    for run in files::list(&runs)? {
        let pid = run.file_name().unwrap_or_default();
        if pid == own.as_str() || !Path::new("/proc").join(pid).exists() {
            files::remove(&run)?;
        }
    }
    Ok(())
}

fn supervise(options: &Options, parts: &Parts, accelerator: [&str; 4], folder: &Path) -> anyhow::Result<u8> {
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let shares = shares()?;
    let initrd = initrd(options, parts, folder, &shares, interactive)?;
    // The machine ends with this program, however that ends.
    let mut qemu = Command::new("setpriv");
    qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    qemu.args(arguments(options, parts, folder, &shares)).args(accelerator);
    qemu.arg("-initrd").arg(initrd);
    if let Some(scratch) = &options.disk {
        let path = disk::scratch(scratch, folder)?;
        qemu.args(disk::scratch_arguments(scratch, &escaped(&path)));
    }
    if !interactive {
        qemu.stdin(Stdio::null());
    }
    let mut child = qemu.spawn().context("start `qemu-system-x86_64`")?;
    let end = wait(&mut child, options.time_limit)?;
    if interactive {
        // QEMU restores the terminal's settings unless it is killed.
        program::run(Command::new("stty").arg("sane"))?;
    }
    let Some(end) = end else {
        bail!("the machine was stopped at its time limit of {} s", options.time_limit.as_secs());
    };
    ensure!(end.success(), "`qemu-system-x86_64` failed: {end}");
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    let status = status.trim().parse().ok().with_context(|| {
        "the machine ended before the command did: did its kernel stop, or the command power it off?"
            .to_owned()
    })?;
    ensure!(status != NOT_STARTED, "the machine could not start the command; see its console's last lines");
    Ok(status)
}

/// The end of the machine; `None` if it had to be stopped.
pub(super) fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().context("wait for QEMU")? {
            return Ok(Some(status));
        }
        std::thread::sleep(GLANCE);
    }
    child.kill().context("stop QEMU")?;
    child.wait().context("wait for QEMU")?;
    Ok(None)
}

/// The host's folders that the command has at the same paths, read only: the repository, and cargo's target
/// folder.
fn shares() -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut folders = vec![repository::root().to_owned()];
    let target = repository::target()?;
    if !target.starts_with(repository::root()) {
        files::create_folder(&target)?;
        folders.push(target);
    }
    Ok(folders.into_iter().enumerate().map(|(number, folder)| (format!("share{number}"), folder)).collect())
}

/// A path in the value of an option of QEMU's.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn arguments(options: &Options, parts: &Parts, folder: &Path, shares: &[(String, PathBuf)]) -> Vec<OsString> {
    let mut words: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-machine",
        "q35",
        "-device",
        "virtio-rng-pci",
        "-device",
        "virtio-serial-pci",
    ]
    .map(str::to_owned)
    .to_vec();
    let mut more = |option: &str, value: String| words.extend([option.to_owned(), value]);
    // The command's standard input and output.
    let log = escaped(&folder.join(OUTPUT));
    more("-chardev", format!("stdio,id=terminal,signal=off,logfile={log}"));
    more("-device", "virtconsole,chardev=terminal".to_owned());
    more("-smp", options.processors.to_string());
    more("-m", options.memory.to_string());
    more("-chardev", format!("file,id=status,path={}", escaped(&folder.join("status"))));
    more("-device", "virtserialport,chardev=status,name=status".to_owned());
    more("-serial", format!("file:{}", escaped(&folder.join("console.log"))));
    // Writes go to a file that QEMU removes.
    more("-drive", format!("if=none,id=system,file={},format=raw,snapshot=on", escaped(&parts.disk)));
    // The first disk, which the initramfs mounts.
    more("-device", "virtio-blk-pci,drive=system".to_owned());
    for (tag, shared) in shares {
        let value = format!(
            "local,path={},mount_tag={tag},security_model=none,readonly=on,multidevs=remap",
            escaped(shared)
        );
        more("-virtfs", value);
    }
    more("-append", format!("{KERNEL} {}", options.kernel_arguments));
    more("-kernel", parts.kernel.display().to_string());
    words.into_iter().map(OsString::from).collect()
}

/// The kernel's initramfs, followed by this run's files.
fn initrd(
    options: &Options,
    parts: &Parts,
    folder: &Path,
    shares: &[(String, PathBuf)],
    interactive: bool,
) -> anyhow::Result<PathBuf> {
    let stage = folder.join("stage");
    let inside = stage.join("rewake");
    files::create_folder(&inside)?;
    let write = |name: &str, text: &str| {
        fs::write(inside.join(name), text).with_context(|| format!("write {name} for the machine"))
    };
    write("boot.sh", BOOT)?;
    write(
        "command",
        &format!("exec {}\n", options.command.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")),
    )?;
    let shares: Vec<String> = shares.iter().map(|(tag, path)| format!("{tag}={}", path.display())).collect();
    let settings = [
        ("shares", shares.join(" ")),
        ("module_arguments", options.module_arguments.clone()),
        ("directory", repository::root().display().to_string()),
        (
            "disk_mbps",
            options.disk.and_then(|disk| disk.mbps).map_or_else(String::new, |mbps| mbps.to_string()),
        ),
        ("interactive", if interactive { "yes" } else { "no" }.to_owned()),
        ("SOFTGPU_KO", "/run/rewake/softgpu.ko".to_owned()),
        ("REWAKE_PLUGIN", plugin::latest()?.display().to_string()),
    ];
    write("settings", &settings.map(|(name, value)| format!("{name}={}\n", quote(&value))).concat())?;
    files::copy(&parts.module, &inside.join("softgpu.ko"))?;
    let own = folder.join("own.cpio");
    initramfs::pack(&stage, &own)?;
    let mut whole = files::bytes(&parts.initramfs)?;
    whole.extend(files::bytes(&own)?);
    let initrd = folder.join("initrd");
    files::write(&initrd, whole)?;
    Ok(initrd)
}

/// A word for a shell.
pub(super) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_command_as_they_are() {
        assert_eq!(quote("it's $HOME"), r"'it'\''s $HOME'");
    }

    #[test]
    fn a_program_that_does_not_end_is_stopped() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(wait(&mut child, Duration::from_millis(50)).unwrap().is_none());
        let mut child = Command::new("true").spawn().unwrap();
        assert!(wait(&mut child, Duration::from_secs(60)).unwrap().unwrap().success());
    }
}
