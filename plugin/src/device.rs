// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which files are AMD GPUs'.

use std::fs;
use std::path::{Path, PathBuf};

/// Major number of every DRM device.
const DRM: u32 = 226;
/// The first minor number of render nodes.
const RENDER: u32 = 128;

/// The device numbers of this machine's GPUs.
#[derive(Debug)]
pub(crate) struct Devices {
    sysfs: PathBuf,
    /// Of the compute driver: `/dev/kfd`.
    kfd: Option<(u32, u32)>,
}

impl Devices {
    /// Looks for the compute driver.
    pub(crate) fn of_machine(sysfs: &Path) -> Self {
        let kfd = fs::read_to_string(sysfs.join("class/kfd/kfd/dev")).ok();
        Self { sysfs: sysfs.to_owned(), kfd: kfd.and_then(|text| numbers(&text)) }
    }

    /// Whether a process can compute on an AMD GPU here.
    pub(crate) fn any(&self) -> bool {
        self.kfd.is_some()
    }

    /// What to call a file, if it is an AMD GPU's.
    pub(crate) fn name_of(&self, status: &libc::stat) -> Option<String> {
        if status.st_mode & libc::S_IFMT != libc::S_IFCHR {
            return None;
        }
        let (major, minor) = (libc::major(status.st_rdev), libc::minor(status.st_rdev));
        if self.kfd == Some((major, minor)) {
            return Some("/dev/kfd".to_owned());
        }
        (major == DRM && minor >= RENDER && self.is_amd(major, minor))
            .then(|| format!("the render node /dev/dri/renderD{minor}"))
    }

    fn is_amd(&self, major: u32, minor: u32) -> bool {
        let driver = self.sysfs.join(format!("dev/char/{major}:{minor}/device/driver"));
        fs::read_link(driver).is_ok_and(|link| link.file_name().is_some_and(|name| name == "amdgpu"))
    }
}

/// Whether a path is that of a compute driver or render node, wherever it was dumped.
pub(crate) fn is_path_of_gpu(path: &str) -> bool {
    path.ends_with("/dev/kfd") || path.contains("/dev/dri/renderD")
}

/// `MAJOR:MINOR`
fn numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn status(kind: libc::mode_t, major: u32, minor: u32) -> libc::stat {
        let mut status = nix::sys::stat::stat("/").expect("a root folder");
        (status.st_mode, status.st_rdev) = (kind | 0o600, libc::makedev(major, minor));
        status
    }

    #[test]
    fn a_machine_without_the_compute_driver_has_no_gpu() {
        let sysfs = tempfile::tempdir().unwrap();
        let devices = Devices::of_machine(sysfs.path());
        assert!(!devices.any());
        assert_eq!(devices.name_of(&status(libc::S_IFCHR, 10, 232)), None);
    }

    #[test]
    fn gpus_are_known_by_their_numbers_and_drivers() {
        let sysfs = tempfile::tempdir().unwrap();
        fs::create_dir_all(sysfs.path().join("class/kfd/kfd")).unwrap();
        fs::write(sysfs.path().join("class/kfd/kfd/dev"), "511:0\n").unwrap();
        for (node, driver) in [("226:128", "amdgpu"), ("226:129", "i915"), ("226:0", "amdgpu")] {
            let device = sysfs.path().join("dev/char").join(node).join("device");
            fs::create_dir_all(&device).unwrap();
            symlink(format!("../bus/pci/drivers/{driver}"), device.join("driver")).unwrap();
        }
        let devices = Devices::of_machine(sysfs.path());
        let name = |kind, major, minor| devices.name_of(&status(kind, major, minor));
        assert!(devices.any());
        assert_eq!(name(libc::S_IFCHR, 511, 0).as_deref(), Some("/dev/kfd"));
        assert_eq!(name(libc::S_IFCHR, 226, 128).as_deref(), Some("the render node /dev/dri/renderD128"));
        assert_eq!(name(libc::S_IFBLK, 511, 0), None, "a block device");
        assert_eq!(name(libc::S_IFCHR, 226, 129), None, "another maker's");
        assert_eq!(name(libc::S_IFCHR, 226, 0), None, "a display");
        assert_eq!(name(libc::S_IFCHR, 511, 1), None);
    }

    #[test]
    fn paths_in_containers_count() {
        assert!(is_path_of_gpu("/dev/kfd") && is_path_of_gpu("/dev/dri/renderD128"));
        assert!(is_path_of_gpu("/rootfs/dev/kfd"));
        assert!(!is_path_of_gpu("/dev/loop0") && !is_path_of_gpu("/srv/dev/kfd.txt"));
    }
}
