// SPDX-License-Identifier: MIT OR Apache-2.0
//! The user of a confined process.

use std::io;

use nix::errno::Errno;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use crate::capabilities;

/// The first of the users that confined processes have. No system gives numbers from here on to people,
/// services or containers: systemd lists 0x7000_0000 to 0x7ffd_ffff as unused, and podman's and Docker's
/// ranges for containers are below or above. A pid has 22 bits.
const FIRST: u32 = 0x7000_0000;

/// Gives up all capabilities, and becomes a user that no other process is: it has the number of this process.
/// So no file and no socket belongs to this process, and no process may be signalled or traced by it.
///
/// It keeps its user where the kernel lets it have no other one: if it is not root, or root of a user
/// namespace or container without such users. Returns whether it has another user.
///
/// # Errors
/// The kernel refuses to take capabilities away.
pub fn leave_user() -> io::Result<bool> {
    let own = FIRST + std::process::id();
    let change = || {
        let (uid, gid) = (Uid::from_raw(own), Gid::from_raw(own));
        setgroups(&[])?;
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)
    };
    let has_left = match change() {
        Ok(()) => true,
        Err(Errno::EPERM | Errno::EINVAL) => false,
        Err(errno) => return Err(io::Error::other(format!("becoming the user {own}: {errno}"))),
    };
    capabilities::drop_all()?;
    Ok(has_left)
}
