// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images of containers with users of their own.

use std::fs;

use crate::dir::ImageDir;

/// How the names of images of user namespaces begin (source: `images/userns.proto` of CRIU, and its
/// `imgset.c`).
const USER_NAMESPACE: &[u8] = b"userns-";
/// Whether tasks without CAP_SYS_PTRACE in the first user namespace get a userfaultfd for faults of the
/// kernel, too.
const UNPRIVILEGED: &str = "/proc/sys/vm/unprivileged_userfaultfd";

impl ImageDir {
    /// Returns why this kernel gives tasks of the image no userfaultfd, which `criu restore --lazy-pages`
    /// needs; `None` where it does. CRIU asks for it in the restored task, when that is in its user
    /// namespace.
    #[must_use]
    pub fn userfaultfd_refusal(&self) -> Option<String> {
        // A directory that cannot be listed is reported by its reader.
        let mut files = self.entries().ok()?;
        let has_users = files.any(|file| file.file_name().as_encoded_bytes().starts_with(USER_NAMESPACE));
        has_users.then(user_namespace_refusal).flatten()
    }
}

/// Returns why this kernel gives tasks of a user namespace no userfaultfd; `None` where it does.
#[must_use]
pub fn user_namespace_refusal() -> Option<String> {
    let is_for_all = fs::read(UNPRIVILEGED).is_ok_and(|setting| setting.trim_ascii() != b"0");
    (!is_for_all).then(|| {
        "the processes are in a user namespace, where the kernel gives them no userfaultfd \
         (vm.unprivileged_userfaultfd is 0, and 1 permits it)"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_with_users_of_their_own_get_no_userfaultfd() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = || ImageDir::open(folder.path()).unwrap().userfaultfd_refusal();
        fs::write(folder.path().join("pages-1.img"), "").unwrap();
        assert_eq!(refusal(), None);
        fs::write(folder.path().join("userns-9.img"), "").unwrap();
        let is_refused = fs::read(UNPRIVILEGED).is_ok_and(|setting| setting.trim_ascii() == b"0");
        assert_eq!(refusal().is_some(), is_refused);
    }
}
