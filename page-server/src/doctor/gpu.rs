// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes verdicts from facts about GPUs and what CRIU needs for them.

use std::path::PathBuf;

use rewake_amdgpu_uapi::criu::queues::{QueueSupport, restored_by};
use rewake_amdgpu_uapi::topology::GfxVersion;
use rewake_sdma_copy::{CopyPath, StagingMemory};

use super::Check;
use rewake_streamer::units;

/// The first version of the compute driver's interface with checkpoints.
const OLDEST: (u32, u32) = (1, 8);
/// `CAP_SYS_ADMIN` and `CAP_CHECKPOINT_RESTORE` (`include/uapi/linux/capability.h`).
const CAPABILITIES: u64 = 1 << 21 | 1 << 40;

/// The facts about a machine with AMD's compute driver.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The version of the driver's interface, or why `/dev/kfd` cannot be used.
    pub version: Result<(u32, u32), String>,
    /// The GPUs, or why the topology cannot be read.
    pub gpus: Result<Vec<Gpu>, String>,
    /// The effective capabilities, as the kernel's bits.
    pub capabilities: u64,
    /// Whether this is the initial user namespace. The driver ignores capabilities in other ones.
    pub initial_user_namespace: bool,
    /// The checks that environment variables turn off, or what is wrong with a variable.
    pub switched_off: Result<Vec<&'static str>, String>,
    /// Whether calls that register memory can be held, or why not.
    pub call_hold: Result<(), String>,
    /// The folders with a plugin.
    pub plugin: PluginFolders,
}

/// A GPU.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// The driver's id of the GPU.
    pub gpu_id: u32,
    /// Its instruction set.
    pub gfx: GfxVersion,
    /// Compute dies that share each queue.
    pub xccs: u64,
    /// What the driver does with its queues.
    pub queues: QueueSupport,
    /// The size of its memory in bytes.
    pub vram: u64,
    /// N of `/dev/dri/renderDN`.
    pub minor: u32,
    /// How memory would be copied to it and from it, or why it cannot.
    pub copies: Result<CopyMethod, String>,
}

/// How memory is copied to a GPU and from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyMethod {
    /// What copies.
    pub path: CopyPath,
    /// Whether the kernel signals the end of a copy (`SYNCOBJ_EVENTFD`).
    pub has_event: bool,
}

/// The folders with a plugin.
#[derive(Debug, Clone, Default)]
pub struct PluginFolders {
    /// The folder that `rewake dump` and `rewake restore` would give to CRIU.
    pub found: Option<PathBuf>,
    /// `$CRIU_LIBS_DIR`, if that is set.
    pub variable: Option<PathBuf>,
    /// CRIU's default folder, if it has an `amdgpu_plugin.so`: CRIU's own one.
    pub stock: Option<PathBuf>,
}

/// Returns all checks of GPUs; a machine without the driver has one.
#[must_use]
pub fn verdicts(facts: Option<&Facts>) -> Vec<Check> {
    let Some(facts) = facts else { return vec![Check::info("gpu", "no AMD GPU: CPU memory only")] };
    let mut checks =
        vec![driver(&facts.version), privilege(facts.capabilities, facts.initial_user_namespace)];
    match &facts.gpus {
        Err(error) => {
            let advice = "make /sys/class/kfd readable in this container, or report what is wrong with it";
            checks.push(Check::failed("gpu topology", error, advice));
        }
        Ok(gpus) => {
            checks.push(topology(gpus));
            checks.push(queues(gpus));
            checks.push(copies(gpus));
        }
    }
    checks.push(call_hold(&facts.call_hold));
    checks.push(switches(&facts.switched_off));
    checks.push(plugin(&facts.plugin));
    checks
}

fn driver(version: &Result<(u32, u32), String>) -> Check {
    let name = "gpu";
    match version {
        Ok((major, minor)) if (*major, *minor) >= OLDEST => {
            Check::ok(name, format!("/dev/kfd, interface {major}.{minor}"))
        }
        Ok((major, minor)) => {
            let (oldest_major, oldest_minor) = OLDEST;
            let found = format!(
                "/dev/kfd has interface {major}.{minor}, and checkpoints came with \
                 {oldest_major}.{oldest_minor}"
            );
            Check::failed(name, found, "use Linux 5.18 or newer")
        }
        Err(error) => {
            let advice = "run as root or in the group render, and let the container use /dev/kfd and a GPU";
            Check::failed(name, error, advice)
        }
    }
}

fn privilege(capabilities: u64, initial_user_namespace: bool) -> Check {
    let name = "gpu privilege";
    if capabilities & CAPABILITIES == 0 {
        let found = "without CAP_CHECKPOINT_RESTORE and CAP_SYS_ADMIN: the driver refuses checkpoints";
        return Check::failed(name, found, "run as root, or with CAP_CHECKPOINT_RESTORE");
    }
    if !initial_user_namespace {
        let found = "in a user namespace, whose capabilities the driver does not count";
        return Check::failed(
            name,
            found,
            "run in the initial user namespace: in a container without one of its own",
        );
    }
    Check::ok(name, "checkpoints are allowed")
}

fn topology(gpus: &[Gpu]) -> Check {
    let name = "gpu topology";
    if gpus.is_empty() {
        let advice = "let the device cgroup of this container have a GPU's /dev/dri/renderD* too";
        return Check::failed(name, "no GPU that this process may use", advice);
    }
    let gpu = |gpu: &Gpu| {
        let Gpu { gpu_id, vram, minor, .. } = gpu;
        format!("{gpu_id:#x} {} {}, renderD{minor}", gpu.gfx, units::bytes(*vram))
    };
    Check::ok(name, gpus.iter().map(gpu).collect::<Vec<_>>().join("; "))
}

/// Checks whether the driver can restore the GPUs' queues.
fn queues(gpus: &[Gpu]) -> Check {
    let name = "gpu queues";
    let reason = |gpu: &Gpu| {
        let xccs = format!("spread over {} XCCs, ", gpu.xccs);
        let why = match gpu.queues {
            QueueSupport::Restored => return None,
            QueueSupport::Firmware => "run by firmware (MES), which takes no saved state".to_owned(),
            QueueSupport::FirstXccSaved => {
                xccs + "of which this kernel saves one: a dump is refused, because restored queues would \
                    never run"
            }
            QueueSupport::Refused => xccs + "and this kernel saves their state and refuses to restore it",
            QueueSupport::Unknown => xccs + "and what AMD's own driver (DKMS) does with them is not known",
        };
        Some(format!("the queues of {:#x} ({}) are {why}", gpu.gpu_id, gpu.gfx))
    };
    let reasons: Vec<String> = gpus.iter().filter_map(reason).collect();
    if reasons.is_empty() {
        return Check::ok(name, "the driver can restore them");
    }
    let mut advice = vec![
        "dump only processes without queues on these GPUs (such as ones with a render node alone)".to_owned(),
    ];
    if gpus.iter().any(|gpu| gpu.queues == QueueSupport::Firmware) {
        advice.push("no kernel up to 7.3 restores queues of GFX11 and newer".to_owned());
    }
    if gpus.iter().any(|gpu| !matches!(gpu.queues, QueueSupport::Restored | QueueSupport::Firmware)) {
        advice.push(format!("of queues on several XCCs, {}", restored_by()));
    }
    Check::warning(name, format!("not all queues can be restored: {}", reasons.join("; ")), advice.join("; "))
}

fn copies(gpus: &[Gpu]) -> Check {
    let name = "gpu copies";
    let line = |gpu: &Gpu| {
        let (id, minor) = (gpu.gpu_id, gpu.minor);
        match &gpu.copies {
            Ok(CopyMethod { path, has_event: true }) => format!("{id:#x}: {path}"),
            Ok(CopyMethod { path, .. }) => format!("{id:#x}: {path}, without an event at the end"),
            Err(error) => format!("{id:#x}: renderD{minor}: {error}"),
        }
    };
    let found = gpus.iter().map(line).collect::<Vec<_>>().join("; ");
    let any = |bad: fn(&CopyMethod) -> bool| gpus.iter().any(|gpu| gpu.copies.as_ref().is_ok_and(bad));
    if gpus.iter().any(|gpu| gpu.copies.is_err()) {
        let advice = "let this process read and write /dev/dri/renderD* of each GPU, in its container too";
        return Check::failed(name, found, advice);
    }
    let mut advice = Vec::new();
    if any(|copies| matches!(copies.path, CopyPath::Cpu { .. })) {
        advice.push(
            "the CPU copies the memory of such GPUs, and their dumps take long: their driver offers \
                     no copy ring",
        );
    }
    if any(|copies| matches!(copies.path, CopyPath::Rings { memory: StagingMemory::Gtt, .. })) {
        advice.push(
            "modprobe udmabuf, let this process open /dev/udmabuf, and leave its size_limit_mb at 64 or more",
        );
    }
    if any(|copies| !copies.has_event) {
        advice.push("use Linux 6.6 or newer (SYNCOBJ_EVENTFD)");
    }
    if advice.is_empty() {
        return Check::ok(name, found);
    }
    Check::warning(name, found, advice.join("; "))
}

fn switches(switched_off: &Result<Vec<&'static str>, String>) -> Check {
    let name = "gpu checks";
    match switched_off {
        Ok(off) if off.is_empty() => {
            Check::ok(name, "a restore checks that its GPUs are like the dumped ones")
        }
        Ok(off) => {
            let found = format!(
                "switched off in this environment: {}; a restore does not refuse GPUs that differ in these",
                off.join(", ")
            );
            Check::info(name, found)
        }
        Err(error) => Check::failed(name, error, "correct the variable, or unset it"),
    }
}

fn call_hold(call_hold: &Result<(), String>) -> Check {
    let name = "gpu registered memory";
    match call_hold {
        Ok(()) => Check::ok(name, "calls that register memory can wait until it is resident"),
        Err(error) => {
            let found = format!("processes with GPUs run only after all their CPU memory is loaded: {error}");
            let advice =
                "as root, on a kernel with CONFIG_BPF_LSM, add bpf to its list of security modules (lsm=)";
            Check::warning(name, found, advice)
        }
    }
}

fn plugin(plugin: &PluginFolders) -> Check {
    let name = "gpu plugin";
    let stock = plugin.stock.as_ref().map(|folder| folder.display());
    let advice = "`cargo xtask plugin` in Rewake's source tree builds it; --plugin-dir names its folder";
    match (&plugin.found, &stock, &plugin.variable) {
        (Some(folder), Some(stock), _) if *folder != plugin.stock.clone().unwrap_or_default() => {
            let found = format!("{}; CRIU without --libdir loads the one in {stock}", folder.display());
            Check::info(name, found)
        }
        (Some(folder), ..) => Check::ok(name, folder.display().to_string()),
        (None, _, Some(variable)) => {
            let found = format!("CRIU_LIBS_DIR is {}, and has no amdgpu_plugin.so", variable.display());
            Check::failed(name, found, format!("unset CRIU_LIBS_DIR, or put the plugin there; {advice}"))
        }
        (None, Some(stock), None) => {
            Check::warning(name, format!("only CRIU's own plugin was found, in {stock}"), advice)
        }
        (None, None, None) => {
            let found = "not found: processes that use a GPU can be neither dumped nor restored";
            Check::failed(name, found, advice)
        }
    }
}

#[cfg(test)]
mod tests;
