// SPDX-License-Identifier: MIT OR Apache-2.0
//! Identifies device files of AMD GPUs.

use std::path::Path;
use std::{fs, io};

use nix::sys::stat::stat;
use rewake_amdgpu_uapi::topology::{Node, Topology};

/// The compute driver's class folder.
pub(crate) const CLASS: &str = "/sys/class/kfd/kfd";

/// Major number of every DRM device.
const DRM_MAJOR: u32 = 226;

/// The device numbers of this machine's GPUs.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// The device number of `/dev/kfd`; none without the compute driver.
    kfd: Option<(u32, u32)>,
    /// Minor numbers of the GPUs' render nodes.
    render: Vec<u32>,
}

impl Devices {
    /// Reads the compute driver's topology, if the driver is loaded; `class` is [`CLASS`].
    pub(crate) fn of_machine(class: &Path) -> Result<Self, rewake_amdgpu_uapi::Error> {
        let Ok(text) = fs::read_to_string(class.join("dev")) else { return Ok(Self::default()) };
        let topology = Topology::read_from(&class.join("topology"))?;
        Ok(Self { kfd: numbers(&text), render: topology.gpus().map(Node::render_minor).collect() })
    }

    /// Returns whether processes can compute on AMD GPUs of this machine.
    pub(crate) fn has_gpus(&self) -> bool {
        self.kfd.is_some()
    }

    /// Returns which GPU device a file is, if it is one.
    pub(crate) fn gpu(&self, status: &libc::stat) -> Option<DeviceFile> {
        if status.st_mode & libc::S_IFMT != libc::S_IFCHR {
            return None;
        }
        let (major, minor) = (libc::major(status.st_rdev), libc::minor(status.st_rdev));
        if self.kfd == Some((major, minor)) {
            return Some(DeviceFile::Kfd);
        }
        (major == DRM_MAJOR && self.render.contains(&minor)).then_some(DeviceFile::Render(minor))
    }

    /// Returns a task's descriptors of GPU devices. A descriptor that cannot be read is left out.
    pub(crate) fn open_in(&self, pid: i32) -> io::Result<Vec<(i32, DeviceFile)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let entry = entry?;
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let gpu = stat(&entry.path()).ok().and_then(|status| self.gpu(&status));
            found.extend(number.zip(gpu));
        }
        Ok(found)
    }
}

/// A device file of an AMD GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceFile {
    /// `/dev/kfd`, which is one file for all GPUs.
    Kfd,
    /// `/dev/dri/renderDN` of one GPU, with N.
    Render(u32),
}

impl DeviceFile {
    /// Identifies a device by the end of its path: in a container `/dev` may be below another folder.
    pub(crate) fn of_path(path: impl AsRef<[u8]>) -> Option<Self> {
        let path = path.as_ref();
        if path.ends_with(b"/dev/kfd") {
            return Some(Self::Kfd);
        }
        let (folder, name) = path.split_at(path.iter().rposition(|byte| *byte == b'/')?);
        let minor = name.strip_prefix(b"/renderD").filter(|_| folder.ends_with(b"/dev/dri"))?;
        str::from_utf8(minor).ok()?.parse().ok().map(Self::Render)
    }
}

/// Parses `MAJOR:MINOR`.
fn numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(kind: libc::mode_t, major: u32, minor: u32) -> libc::stat {
        let mut status = nix::sys::stat::stat("/").expect("a root folder");
        (status.st_mode, status.st_rdev) = (kind | 0o600, libc::makedev(major, minor));
        status
    }

    #[test]
    fn a_machine_without_the_compute_driver_has_no_gpu() {
        let class = tempfile::tempdir().unwrap();
        let devices = Devices::of_machine(&class.path().join("kfd")).unwrap();
        assert!(!devices.has_gpus());
        assert_eq!(devices.gpu(&status(libc::S_IFCHR, 10, 232)), None);
    }

    #[test]
    fn gpus_are_known_by_the_driver_s_numbers() {
        let class = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = class.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("dev", "511:0\n");
        put("topology/generation_id", "1\n");
        for (node, gpu_id, minor) in [(0, 0, 0), (1, 0x1234, 129)] {
            put(&format!("topology/nodes/{node}/name"), "\n");
            put(&format!("topology/nodes/{node}/gpu_id"), &format!("{gpu_id}\n"));
            put(&format!("topology/nodes/{node}/properties"), &format!("drm_render_minor {minor}\n"));
            for folder in ["mem_banks", "caches", "io_links"] {
                fs::create_dir(class.path().join(format!("topology/nodes/{node}/{folder}"))).unwrap();
            }
        }
        let devices = Devices::of_machine(class.path()).unwrap();
        let name = |kind, major, minor| devices.gpu(&status(kind, major, minor));
        assert!(devices.has_gpus());
        assert_eq!(name(libc::S_IFCHR, 511, 0), Some(DeviceFile::Kfd));
        assert_eq!(name(libc::S_IFCHR, 226, 129), Some(DeviceFile::Render(129)));
        assert_eq!(name(libc::S_IFBLK, 511, 0), None, "a block device");
        assert_eq!(name(libc::S_IFCHR, 226, 128), None, "another maker's");
        assert_eq!(name(libc::S_IFCHR, 226, 0), None, "a CPU has no render node");
        assert_eq!(name(libc::S_IFCHR, 511, 1), None);
    }

    #[test]
    fn paths_in_containers_count() {
        assert_eq!(DeviceFile::of_path("/dev/kfd"), Some(DeviceFile::Kfd));
        assert_eq!(DeviceFile::of_path("/rootfs/dev/kfd"), Some(DeviceFile::Kfd));
        assert_eq!(DeviceFile::of_path("/dev/dri/renderD128"), Some(DeviceFile::Render(128)));
        assert_eq!(DeviceFile::of_path(b"/caf\xe9/dev/dri/renderD128"), Some(DeviceFile::Render(128)));
        for other in ["/dev/loop0", "/srv/dev/kfd.txt", "/dev/dri/renderD", "/dev/dri/renderDx", "/renderD1"]
        {
            assert_eq!(DeviceFile::of_path(other), None, "{other}");
        }
    }
}
