// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes a restore lazy that did not ask for it, where the host's [policy](crate::policy) wants it. So
//! container engines need no option for it.
//!
//! CRIU makes its plugins before it looks whether the restore is lazy. In that moment the plugin has the node
//! agent start a streamer, waits until the streamer listens in CRIU's work directory with all files of the
//! image open, and turns `--lazy-pages` on. A plugin starts no process itself, because runc has moved CRIU
//! into the container's cgroup by then.
//!
//! Until the option is on, nothing has changed, so in all other cases CRIU restores as it would have done.

use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_criu_plugin::{Answer, Host, HostError};
use rewake_plugin_protocol::control::{self, OpenError, proto};
use rewake_process::private_socket::default_socket;

use crate::policy::{FILE, Laziness, OnRefusal, Policy};

/// The socket that a lazy restore connects to, in CRIU's work directory.
const SOCKET: &str = "lazy-pages.socket";
/// The manifest of a sealed image.
const MANIFEST: &str = "rewake-manifest";

/// The images that a plugin is for. Each image has one of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginImages {
    /// Those with GPU memory.
    WithGpus,
    /// The others.
    WithoutGpus,
}

/// Why a restore stays what it is, although the policy wants lazy ones.
#[derive(Debug, thiserror::Error)]
enum LeftAlone {
    #[error("a {SOCKET} lies in CRIU's work directory, so this restore has a streamer or had one")]
    HasSocket,
    #[error("it is not sealed, and the policy is lazy = \"sealed\"")]
    NotSealed,
    #[error("it has less than {0} MiB of memory (min_size_mib)")]
    Small(u64),
    /// Another plugin of Rewake takes it.
    #[error("it has GPU memory: `amdgpu_plugin.so` of Rewake decides, where it is loaded")]
    Other,
}

/// Why a restore that should be lazy cannot be.
#[derive(Debug, thiserror::Error)]
enum NotLazy {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("looking at the image: {0}")]
    Image(#[source] io::Error),
    #[error("{0}")]
    Socket(String),
    #[error(transparent)]
    Agent(#[from] OpenError),
    #[error("the node agent cannot serve it lazily: {0}")]
    Eager(String),
    #[error(
        "the node agent's streamer does not listen in CRIU's work directory: they see different files \
         (mount namespaces)"
    )]
    Elsewhere,
}

/// The policy wants no eager restore in the place of a lazy one.
#[derive(Debug, thiserror::Error)]
#[error("this restore cannot be lazy, and {FILE} has on_refusal = \"fail\": {0}")]
struct Refused(#[from] NotLazy);

/// Makes this restore lazy if the policy wants it. It must be called when the plugin is made, before anything
/// looks for the session of CRIU's work directory.
///
/// # Errors
/// The policy cannot be read, or it wants restores that cannot be lazy to fail.
pub fn restore_lazily(host: &Host, images: PluginImages) -> Answer {
    let policy = Policy::of_host()?;
    if policy.lazy == Laziness::Never {
        return Ok(());
    }
    match open(host, images, &policy) {
        Ok(Ok(())) => host.info("the restore is lazy, as the host's policy wants it"),
        Ok(Err(LeftAlone::Other)) => {}
        Ok(Err(reason)) => host.info(format_args!("the policy leaves this restore alone: {reason}")),
        Err(error) if policy.on_refusal == OnRefusal::Fail => return Err(Refused(error).into()),
        Err(error) => host.info(format_args!("the image is restored eagerly: {error}")),
    }
    Ok(())
}

fn open(host: &Host, which: PluginImages, policy: &Policy) -> Result<Result<(), LeftAlone>, NotLazy> {
    let folder = host.image_dir()?;
    let images = fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).map_err(NotLazy::Image)?;
    if let Err(reason) = is_wanted(&images, which, policy).map_err(NotLazy::Image)? {
        return Ok(Err(reason));
    }
    let work = fs::canonicalize(".").map_err(NotLazy::Image)?;
    let socket = default_socket().map_err(|error| NotLazy::Socket(format!("{error:#}")))?;
    let open = proto::Open {
        images_dir: images.as_os_str().as_bytes().to_vec(),
        work_dir: work.as_os_str().as_bytes().to_vec(),
        by_plugin: true,
        ..proto::Open::default()
    };
    let opened = control::open(&socket, open, policy.wait())?;
    if !opened.lazy_pages {
        return Err(NotLazy::Eager(opened.reason));
    }
    if Path::new(SOCKET).symlink_metadata().is_err() {
        return Err(NotLazy::Elsewhere);
    }
    host.restore_lazily()?;
    Ok(Ok(()))
}

fn is_wanted(images: &Path, which: PluginImages, policy: &Policy) -> io::Result<Result<(), LeftAlone>> {
    if image_has_gpu(images)? != (which == PluginImages::WithGpus) {
        return Ok(Err(LeftAlone::Other));
    }
    if Path::new(SOCKET).symlink_metadata().is_ok() {
        return Ok(Err(LeftAlone::HasSocket));
    }
    if policy.lazy == Laziness::Sealed && !images.join(MANIFEST).is_file() {
        return Ok(Err(LeftAlone::NotSealed));
    }
    if policy.min_size_mib > 0 && memory(images)? >> 20 < policy.min_size_mib {
        return Ok(Err(LeftAlone::Small(policy.min_size_mib)));
    }
    Ok(Ok(()))
}

/// Returns the length of an image's memory, in bytes.
fn memory(images: &Path) -> io::Result<u64> {
    let is_pages = |name: &Path| {
        let name = name.as_os_str().as_bytes();
        name.starts_with(b"pages-") && name.ends_with(b".img")
    };
    fs::read_dir(images)?.try_fold(0, |sum, entry| {
        let name = PathBuf::from(entry?.file_name());
        Ok(if is_pages(&name) { sum + fs::metadata(images.join(name))?.len() } else { sum })
    })
}

#[cfg(test)]
mod tests {
    use rewake_manifest::MANIFEST_NAME;

    use super::*;

    fn sealed() -> Policy {
        Policy { lazy: Laziness::Sealed, ..Policy::default() }
    }

    fn wanted(images: &Path, which: PluginImages, policy: &Policy) -> Result<(), LeftAlone> {
        is_wanted(images, which, policy).unwrap()
    }

    #[test]
    fn a_sealed_image_is_wanted_where_only_sealed_ones_are() {
        let images = tempfile::tempdir().unwrap();
        let asked = || wanted(images.path(), PluginImages::WithoutGpus, &sealed());
        assert!(matches!(asked(), Err(LeftAlone::NotSealed)));
        fs::write(images.path().join(MANIFEST_NAME), "").unwrap();
        assert!(asked().is_ok());
    }

    #[test]
    fn a_small_image_is_left_alone() {
        let images = tempfile::tempdir().unwrap();
        let policy = Policy { lazy: Laziness::Always, min_size_mib: 2, ..Policy::default() };
        for (pages, is_small) in [(1, true), (2, false)] {
            let file = fs::File::create(images.path().join(format!("pages-{pages}.img"))).unwrap();
            file.set_len(1 << 20).unwrap();
            let asked = wanted(images.path(), PluginImages::WithoutGpus, &policy);
            assert_eq!(matches!(asked, Err(LeftAlone::Small(2))), is_small, "{asked:?}");
        }
    }

    #[test]
    fn each_image_is_one_plugin_s() {
        let images = tempfile::tempdir().unwrap();
        let policy = Policy { lazy: Laziness::Always, ..Policy::default() };
        let asked = |which| wanted(images.path(), which, &policy);
        assert!(asked(PluginImages::WithoutGpus).is_ok());
        assert!(matches!(asked(PluginImages::WithGpus), Err(LeftAlone::Other)));
        fs::write(images.path().join("amdgpu-kfd-1.img"), "").unwrap();
        assert!(matches!(asked(PluginImages::WithoutGpus), Err(LeftAlone::Other)));
        assert!(asked(PluginImages::WithGpus).is_ok());
    }
}
