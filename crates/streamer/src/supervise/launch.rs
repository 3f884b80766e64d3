// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides how an image is served, and makes the command of its streamer.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use rewake_criu_images::ImageDir;
use rewake_criu_tls::TlsOptions;
use rewake_fetcher::plan::PeerTls;
use rewake_manifest::refuse_partial;

use crate::fetch_peer::FetchedImage;
use crate::session::image::NotLazy;
use crate::working_set::LoadingOptions;
use crate::{planner, sys};
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_plugin_protocol::plugin_folder;

/// Seconds that a restore has to connect to its streamer.
const CONNECT_TIMEOUT: u64 = 60;

/// How an image is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// The image has GPU state.
    pub gpus: bool,
    /// Why CRIU must load all CPU memory before the processes run, or `None` if the streamer loads it.
    pub eager: Option<String>,
    /// Where missing memory of the image comes from, or `None` if the image has all its memory.
    pub from: Option<MemoryServer>,
    /// Files of signers that the image needs a signature of, with absolute paths.
    pub signers: Vec<PathBuf>,
}

/// What has missing memory of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryServer {
    /// An image server.
    Host(ImageServerAddress),
    /// The node agent with this control socket.
    Agent {
        /// The socket.
        socket: PathBuf,
        /// The id of the image, in full.
        id: String,
    },
}

/// An image on an image server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageServerAddress {
    /// The addresses of the host.
    pub addresses: Vec<SocketAddr>,
    /// The image there.
    pub image: FetchedImage,
    /// How the connection is encrypted, with absolute paths; none: it is not.
    pub tls: Option<PeerTls>,
}

impl LaunchPlan {
    /// Checks an image and this kernel.
    ///
    /// # Errors
    /// The image cannot be served.
    pub fn of(images: &Path, signers: Vec<PathBuf>) -> anyhow::Result<Self> {
        let mut plan = Self::with_log(images, signers)?;
        if !plan.gpus {
            plan.eager = planner::open(images, &plan.signers)?.not_lazy().map(NotLazy::to_string);
        }
        Ok(plan)
    }

    /// The same for a streamer whose log says why it does not serve an image. An image without GPU state is
    /// left to it: a planner's process for each of two checks would delay the restore.
    ///
    /// CPU memory of an image with GPU state is loaded in the background only where the kernel can hold calls
    /// that register missing memory (decision 11).
    ///
    /// # Errors
    /// The image cannot be served.
    pub fn with_log(images: &Path, signers: Vec<PathBuf>) -> anyhow::Result<Self> {
        let directory = ImageDir::open(images)?;
        refuse_partial(&directory)?;
        let gpus = image_has_gpu(images).with_context(|| format!("reading {}", images.display()))?;
        let lazily = || {
            planner::open(images, &signers)?.not_lazy().map_or(Ok(()), |reason| Err(reason.clone().into()))
        };
        let checked = if gpus { holds_calls().and_then(|()| lazily()) } else { Ok(()) };
        let eager = checked.err().map(|error| format!("{error:#}"));
        if eager.is_some() {
            // CRIU would read the holes of a partial parent. The planner refuses them in all other cases:
            // only it may wait for the parent's file system.
            directory.ancestors().iter().try_for_each(refuse_partial)?;
        }
        Ok(Self { gpus, eager, from: None, signers })
    }

    /// Returns why all GPU memory of another host must be copied before the processes run, or `None` if it
    /// may arrive later: CRIU's plugin waits for it, and this kernel can hold calls that register missing
    /// memory. `plugins` is the folder of CRIU's plugins; none: CRIU's own. `remedy` says how the user gives
    /// another one.
    ///
    /// # Errors
    /// The plugin cannot be read.
    pub fn eager_reason(plugins: Option<&Path>, remedy: &str) -> anyhow::Result<Option<String>> {
        let is_own = plugins.map_or(Ok(false), |folder| {
            plugin_folder::is_own(folder).with_context(|| format!("reading {}", folder.display()))
        });
        if !is_own? {
            let file = plugin_folder::FILE;
            return Ok(Some(format!("CRIU's {file} is not known to be Rewake's of this release ({remedy})")));
        }
        Ok(Self::cannot_hold_calls())
    }

    /// Returns why this kernel cannot hold calls that register missing memory, or `None` if it can.
    #[must_use]
    pub fn cannot_hold_calls() -> Option<String> {
        holds_calls().err().map(|error| format!("{error:#}"))
    }

    /// The plan for an image of which a server has memory. The streamer checks the image.
    #[must_use]
    pub fn from_server(gpus: bool, from: MemoryServer, signers: Vec<PathBuf>) -> Self {
        Self { gpus, eager: None, from: Some(from), signers }
    }

    /// Checks that an image whose CPU memory CRIU loads is loaded as its user wants.
    ///
    /// # Errors
    /// The working set was to be recorded, or memory to be loaded only when it is accessed.
    pub fn check(&self, loading: LoadingOptions) -> anyhow::Result<()> {
        let Some(reason) = self.eager.as_ref().filter(|_| !self.gpus) else { return Ok(()) };
        let option = match loading {
            LoadingOptions { record: true, .. } => "--record",
            LoadingOptions { on_demand_only: Some(_), .. } => "--on-demand-only",
            _ => return Ok(()),
        };
        bail!("{option}: {reason}; restore it without {option}")
    }

    /// Whether CRIU is to be called with `--lazy-pages`.
    #[must_use]
    pub fn lazy_pages(&self) -> bool {
        self.eager.is_none()
    }
}

/// Checks that this kernel can hold calls that register missing memory.
fn holds_calls() -> anyhow::Result<()> {
    Ok(rewake_ioctl_filter::attach().map(drop)?)
}

/// Makes the command for the streamer of one restore, with CRIU's work directory. It writes a zero byte to
/// its standard output when it listens.
///
/// `loading` says what is wanted of the load. It leads a process group of its own, so a terminal's signals do
/// not reach it, and ends if no restore connects within a minute.
///
/// # Errors
/// The path of this program cannot be found.
pub fn command(
    images: &Path,
    work: &Path,
    plan: &LaunchPlan,
    loading: LoadingOptions,
) -> anyhow::Result<Command> {
    let mut command = Command::new(sys::program()?);
    command.arg("streamer").arg("-W").arg(work).args(["--status-fd", "1"]).process_group(0);
    command.args(["--connect-timeout", &CONNECT_TIMEOUT.to_string()]);
    if plan.lazy_pages() {
        command.arg("-D").arg(images);
    } else if !plan.gpus {
        command.arg("--no-gpus");
    }
    match &plan.from {
        Some(MemoryServer::Host(from)) => add_server(&mut command, from),
        Some(MemoryServer::Agent { socket, id }) => {
            command.arg("--from-agent").arg(socket).arg("--from-id").arg(id);
        }
        None => {}
    }
    for file in &plan.signers {
        command.arg("--signers").arg(file);
    }
    if loading.record {
        command.arg("--record");
    }
    if let Some(time) = loading.on_demand_only {
        command.arg("--on-demand-only").arg(time.as_secs().to_string());
    }
    // An agent may have a store's credentials, which no streamer needs.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"AWS_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    sys::leave_descriptors(&mut command);
    Ok(command)
}

/// Makes the command that serves sessions again all of whose streamer's processes were killed.
///
/// # Errors
/// The path of this program cannot be found.
pub fn recover_command() -> anyhow::Result<Command> {
    let mut command = Command::new(sys::program()?);
    command.arg("recover").process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
    sys::leave_descriptors(&mut command);
    Ok(command)
}

/// Adds the options for an image server.
fn add_server(command: &mut Command, from: &ImageServerAddress) {
    for address in &from.addresses {
        command.arg("--from-address").arg(address.to_string());
    }
    command.arg("--from-image").arg(&from.image.name).arg("--from-id").arg(&from.image.id);
    let Some(PeerTls { options, host }) = &from.tls else { return };
    command.arg("--tls");
    if let Some(host) = host {
        command.arg("--from-host").arg(host);
    }
    let TlsOptions { ca, crl, certificate, key, any_name } = options;
    for (option, path) in
        [("--tls-cacert", ca), ("--tls-cacrl", crl), ("--tls-cert", certificate), ("--tls-key", key)]
    {
        if let Some(path) = path {
            command.arg(option).arg(path);
        }
    }
    if *any_name {
        command.arg("--tls-no-cn-verify");
    }
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::add_arriving_file;

    use super::*;

    #[test]
    fn an_image_whose_gpu_memory_arrives_is_not_launched() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("amdgpu-renderD-7.img"), "").unwrap();
        add_arriving_file(folder.path(), "amdgpu-pages-1-00ab.img").unwrap();
        let refused = LaunchPlan::of(folder.path(), Vec::new()).unwrap_err().to_string();
        assert!(refused.contains("whose GPU memory was not copied"), "{refused}");
    }
}
