// SPDX-License-Identifier: MIT OR Apache-2.0
//! The software GPU's kernel module, built inside the system for each kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::{self, Inputs};
use super::options::Series;
use super::{say, system};
use crate::{files, program, repository};

/// objtool needs /proc; the mount ends with the mount namespace. Without debug information, which nothing
/// reads: it is nine tenths of the module, which every machine copies and loads.
const BUILD: &str = "mount -t proc proc \"$0/proc\" && \
                     exec chroot \"$0\" make -s -C \"/lib/modules/$1/build\" \"M=$2\" KCFLAGS=-g0 \
                     CONFIG_DEBUG_INFO_BTF_MODULES= modules";

/// softgpu.ko for a kernel, in the machine's folder.
pub(super) fn ready(home: &Path, system: &Path, series: Series) -> anyhow::Result<PathBuf> {
    let sources = sources()?;
    let module = home.join(format!("softgpu-{}.ko", series.name()));
    let mut inputs = Inputs::default().text(BUILD).made(system)?;
    for source in &sources {
        inputs = inputs.text(&name(source)).file(source)?;
    }
    cache::ready(&module, &inputs, || make(system, series, &sources, &module))?;
    Ok(module)
}

fn sources() -> anyhow::Result<Vec<PathBuf>> {
    let folder = repository::root().join("tests/softgpu/kmod");
    let mut sources = files::list(&folder)?;
    sources.retain(|path| {
        let extension = path.extension().unwrap_or_default();
        extension == "c" || extension == "h" || ["Kbuild", "Makefile"].contains(&name(path).as_str())
    });
    Ok(sources)
}

fn make(system: &Path, series: Series, sources: &[PathBuf], module: &Path) -> anyhow::Result<()> {
    let release = system::release(system, series)?;
    say(&format!("building softgpu.ko for {release}"));
    let inside = Path::new("/build").join(series.name());
    let stage = system.join("build").join(series.name());
    // Keeps the last build, so that make does nothing where no source has changed; removes deleted sources.
    files::create_folder(&stage)?;
    for path in files::list(&stage)? {
        if !sources.iter().any(|source| name(source) == name(&path)) && is_source(&path) {
            files::remove(&path)?;
        }
    }
    for source in sources {
        update(source, &stage.join(name(source)))?;
    }
    let mut make = Command::new("unshare");
    make.args(["--mount", "sh", "-ec", BUILD]).arg(system).arg(&release).arg(&inside).env("LC_ALL", "C");
    program::run(make.stdout(std::io::stderr()).env_remove("MAKEFLAGS"))?;
    let built = stage.join("softgpu.ko");
    files::copy(&built, module)?;
    Ok(())
}

fn is_source(path: &Path) -> bool {
    let name = name(path);
    let made = name.ends_with(".mod.c") || name == "all.c";
    !made && (name.ends_with(".c") || name.ends_with(".h"))
}

/// Copies only files that differ, so that make builds what changed.
fn update(from: &Path, to: &Path) -> anyhow::Result<()> {
    let bytes = files::bytes(from)?;
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    files::write(to, bytes)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
