// SPDX-License-Identifier: MIT OR Apache-2.0
//! The initramfs, in two archives that the kernel unpacks over each other: one with the modules that find the
//! disk, the same for every run of a kernel, and a small one for the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::cache::{self, Inputs};
use super::options::Series;
use super::system;
use crate::{files, program};

const INIT: &str = include_str!("guest/init.sh");

/// Modules that find and read the disk.
fn modules(series: Series) -> &'static [&'static str] {
    match series {
        // ext4 asks for its checksums by another name than the module's.
        Series::Linux6_12 => &["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"],
        Series::Linux7 => &["virtio_pci", "virtio_blk", "ext4"],
    }
}

/// The archive that is the same for every run, in the machine's folder.
pub(super) fn ready(home: &Path, system: &Path, series: Series) -> anyhow::Result<PathBuf> {
    let archive = home.join(format!("initramfs-{}.cpio", series.name()));
    let inputs = Inputs::default().text(INIT).text(&modules(series).join(" ")).made(system)?;
    cache::ready(&archive, &inputs, || make(system, series, &archive))?;
    Ok(archive)
}

fn make(system: &Path, series: Series, archive: &Path) -> anyhow::Result<()> {
    let stage = archive.with_extension("");
    files::remove(&stage)?;
    for folder in ["bin", "modules", "proc", "dev", "disk"] {
        files::create_folder(stage.join(folder))?;
    }
    files::copy(&system.join("usr/bin/busybox"), &stage.join("bin/busybox"))?;
    files::write_program(&stage.join("init"), INIT)?;
    let folder = Path::new("usr/lib/modules").join(system::release(system, series)?);
    let dependencies = files::read(system.join(&folder).join("modules.dep"))?;
    let builtin = files::read(system.join(&folder).join("modules.builtin"))?;
    let mut order = String::new();
    for module in load_order(&dependencies, &builtin, modules(series))? {
        let (_, file) = module.rsplit_once('/').unwrap_or(("", &module));
        let name = file.trim_end_matches(".xz");
        let bytes = Path::new("/").join(&folder).join(&module);
        let unpacked = stage.join("modules").join(name);
        let script = "case $0 in *.xz) xz -dc -- \"$0\" ;; *) cat -- \"$0\" ;; esac";
        let mut unpack = system::inside(system, "sh");
        let file = files::create(&unpacked)?;
        program::run(unpack.args(["-c", script]).arg(bytes).stdout(file))?;
        order += &format!("{name}\n");
    }
    files::write(stage.join("modules/order"), &order)?;
    pack(&stage, archive)
}

/// Modules and their dependencies, in the order to load them, as paths below the kernel's folder.
///
/// `dependencies` is modules.dep: `module: dependency...`, the last dependency to be loaded first.
fn load_order(dependencies: &str, builtin: &str, names: &[&str]) -> anyhow::Result<Vec<String>> {
    let stem = |path: &str| {
        let file = path.rsplit_once('/').map_or(path, |(_, file)| file);
        file.split_once(".ko").map_or(file, |(stem, _)| stem).to_owned()
    };
    let mut order: Vec<String> = Vec::new();
    for name in names {
        if builtin.lines().any(|path| stem(path) == *name) {
            continue;
        }
        let line = dependencies.lines().filter_map(|line| line.split_once(':'));
        let (module, needs) = line
            .into_iter()
            .find(|(module, _)| stem(module) == *name)
            .with_context(|| format!("the kernel has no module {name}"))?;
        for path in needs.split_whitespace().rev().chain([module]) {
            if !order.iter().any(|known| known == path) {
                order.push(path.to_owned());
            }
        }
    }
    Ok(order)
}

/// The files of a folder as a cpio archive.
pub(super) fn pack(stage: &Path, archive: &Path) -> anyhow::Result<()> {
    let file = files::create(archive)?;
    let mut cpio = Command::new("sh");
    cpio.args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"]).current_dir(stage).stdout(file);
    program::run(&mut cpio)?;
    let size = fs::metadata(archive).with_context(|| format!("look at {}", archive.display()))?.len();
    ensure!(size > 0, "cpio wrote nothing into {}", archive.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "kernel/fs/ext4/ext4.ko.xz: kernel/lib/crc16.ko.xz kernel/fs/mbcache.ko.xz \
        kernel/fs/jbd2/jbd2.ko.xz\n\
        kernel/lib/crc16.ko.xz:\n\
        kernel/fs/jbd2/jbd2.ko.xz: kernel/lib/crc16.ko.xz\n\
        kernel/drivers/block/virtio_blk.ko.xz:\n";
    const BUILTIN: &str = "kernel/drivers/virtio/virtio_pci.ko\n";

    #[test]
    fn dependencies_of_a_module_are_loaded_first_and_once() {
        let order = load_order(DEPENDENCIES, BUILTIN, &["virtio_pci", "jbd2", "ext4", "virtio_blk"]).unwrap();
        let names: Vec<&str> = order.iter().filter_map(|path| path.rsplit('/').next()).collect();
        assert_eq!(names, ["crc16.ko.xz", "jbd2.ko.xz", "mbcache.ko.xz", "ext4.ko.xz", "virtio_blk.ko.xz"]);
    }

    #[test]
    fn a_module_that_the_kernel_lacks_is_named() {
        let error = load_order(DEPENDENCIES, BUILTIN, &["xfs"]).unwrap_err().to_string();
        assert!(error.contains("xfs"), "{error}");
    }
}
