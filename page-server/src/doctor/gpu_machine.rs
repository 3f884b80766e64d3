// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads facts about this machine's GPUs, without verdicts.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use rewake_amdgpu_uapi::criu::queues::QueueSupport;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_amdgpu_uapi::{Error, Kfd};
use rewake_criu_images::amdgpu::settings::{Checks, Switch};
use rewake_sdma_copy::{CopyEngine, Shape, Staging};

use super::gpu::{CopyMethod, Facts, Gpu, PluginFolders};
use rewake_plugin_protocol::plugin_folder;

/// The folder where CRIU looks for plugins without `--libdir` (`CR_PLUGIN_DEFAULT`).
pub(super) const DEFAULT: &str = "/usr/lib/criu";
/// The inode of the initial user namespace (`PROC_USER_INIT_INO` of Linux).
const INITIAL_USER_NAMESPACE: u64 = 0xefff_fffd;
/// The largest staging memory that one GPU gets: limits of udmabuf show with it.
const TRIAL: Shape = Shape { slots: 16, slot_bytes: 2 << 20 };

/// Reads the facts about GPUs; returns none without AMD's compute driver.
#[must_use]
pub fn facts(capabilities: u64) -> Option<Facts> {
    if !plugin_folder::machine_has_gpu() {
        return None;
    }
    let text = |error: Error| error.to_string();
    Some(Facts {
        version: Kfd::open().and_then(|kfd| kfd.version()).map_err(text),
        gpus: Topology::read().map(|topology| topology.gpus().map(gpu).collect()).map_err(text),
        capabilities,
        // Without /proc, namespaces cannot be recognised.
        initial_user_namespace: std::fs::metadata("/proc/self/ns/user")
            .map_or(true, |namespace| namespace.ino() == INITIAL_USER_NAMESPACE),
        switched_off: switched_off(),
        call_hold: rewake_ioctl_filter::check().map_err(|error| format!("{:#}", anyhow::Error::from(error))),
        plugin: plugin(),
    })
}

fn gpu(node: &Node) -> Gpu {
    Gpu {
        gpu_id: node.gpu_id,
        gfx: node.gfx_version(),
        xccs: node.property("num_xcc"),
        queues: QueueSupport::here(node),
        vram: node.vram(),
        minor: node.render_minor(),
        copies: copies(node.render_minor()),
    }
}

/// Sets copies up as the plugin does.
fn copies(minor: u32) -> Result<CopyMethod, String> {
    let render = Render::open(minor).map_err(|error| error.to_string())?;
    let staging = Staging::new(TRIAL, &[&render]).map_err(|error| error.to_string())?;
    let engine = CopyEngine::open(render, &staging).map_err(|error| error.to_string())?;
    Ok(CopyMethod { path: engine.path().clone(), has_event: engine.event_fd().is_some() })
}

fn switched_off() -> Result<Vec<&'static str>, String> {
    let checks = Checks::from_environment().map_err(|error| error.to_string())?;
    Ok(Switch::ALL.into_iter().filter(|switch| !checks.has(*switch)).map(Switch::variable).collect())
}

fn plugin() -> PluginFolders {
    let stock = PathBuf::from(DEFAULT);
    PluginFolders {
        // No folder was named that could be refused.
        found: plugin_folder::find(None).unwrap_or_default(),
        variable: plugin_folder::variable(),
        stock: Some(stock).filter(|folder| folder.join(plugin_folder::FILE).is_file()),
    }
}
