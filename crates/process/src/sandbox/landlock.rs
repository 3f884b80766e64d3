// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a confined process may reach by a name (Landlock).

use std::io;
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope,
};

/// What a confined process may read.
#[derive(Debug, Clone, Copy)]
pub enum Readable<'a> {
    /// A folder, and all below it.
    Folder(BorrowedFd<'a>),
    /// A file.
    File(BorrowedFd<'a>),
}

/// Restricts this thread, and the threads that it starts, for good: it may read this, and reach nothing else
/// by a path, a TCP port or an abstract unix socket, nor send a signal to a process that is not confined
/// with it. What it has open stays open. On an older kernel, what it does not know is not restricted.
/// Returns whether the kernel restricts anything.
///
/// # Errors
/// The kernel has Landlock, and refuses.
pub fn allow_reading<'a>(what: impl IntoIterator<Item = Readable<'a>>) -> io::Result<bool> {
    let rules = what.into_iter().map(|readable| {
        Ok::<_, RulesetError>(match readable {
            Readable::Folder(folder) => PathBeneath::new(folder, AccessFs::ReadFile | AccessFs::ReadDir),
            Readable::File(file) => PathBeneath::new(file, AccessFs::ReadFile),
        })
    });
    let restrict = || -> Result<RulesetStatus, RulesetError> {
        let restricted = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(ABI::V5))?
            .handle_access(AccessNet::from_all(ABI::V5))?
            .scope(Scope::from_all(ABI::V6))?
            .create()?
            .add_rules(rules)?
            .restrict_self()?;
        Ok(restricted.ruleset)
    };
    let status = restrict().map_err(|error| io::Error::other(format!("Landlock: {error}")))?;
    Ok(status != RulesetStatus::NotEnforced)
}
