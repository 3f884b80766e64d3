// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injected faults in the soft GPU's driver: of all calls of a process, one fails or kills its caller. A test
//! counts the calls of an operation first, and then repeats it once for each of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::judge::FOLDER;

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It returns this errno, and has no effect.
    Errno(i32),
    /// Its caller is killed before it runs.
    KillBefore,
    /// Its caller is killed after it has run.
    KillAfter,
}

/// Which calls are counted; all if neither is set.
#[derive(Debug, Clone, Copy, Default)]
pub struct Calls<'a> {
    /// The name of a process (of its first thread, so that of the program in CRIU's children before their
    /// restore).
    pub comm: Option<&'a str>,
    /// The kind of call: `kfd/CREATE_QUEUE`, `kfd/CRIU_OP`, `kfd/CRIU_OP/RESTORE`, `amdgpu/CS`,
    /// `drm/PRIME_FD_TO_HANDLE`.
    pub call: Option<&'a str>,
}

/// A call that was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its number, from 1.
    pub number: u64,
    /// The caller's process id.
    pub pid: u32,
    /// The name of its first thread.
    pub comm: String,
    /// The kind of call.
    pub name: String,
    /// What it returned: 0, or a negative errno. None while it runs, and when its caller was killed before.
    pub result: Option<i64>,
    /// Whether the fault was injected here.
    pub fault: bool,
}

/// The driver's switch; dropping it turns faults off.
#[derive(Debug)]
pub struct Faults {
    folder: PathBuf,
}

impl Faults {
    /// None where GPUs are real. Counts nothing until asked.
    #[must_use]
    pub fn find() -> Option<Self> {
        let folder = PathBuf::from(FOLDER);
        folder.is_dir().then_some(Self { folder })
    }

    /// Counts calls from 1, and injects no fault.
    ///
    /// # Panics
    /// There is no call of that name, or the driver refuses.
    pub fn count(&self, calls: Calls<'_>) {
        self.write(&format!("count{}", calls.words()));
    }

    /// Counts calls from 1, and has the `nth` of them fail.
    ///
    /// # Panics
    /// As [`Faults::count`].
    pub fn fail(&self, nth: u64, fault: Fault, calls: Calls<'_>) {
        let fault = match fault {
            Fault::Errno(errno) => format!("errno={errno}"),
            Fault::KillBefore => "kill=before".to_owned(),
            Fault::KillAfter => "kill=after".to_owned(),
        };
        self.write(&format!("nth={nth} {fault}{}", calls.words()));
    }

    /// Stops counting; counted calls can still be read.
    ///
    /// # Panics
    /// The driver refuses.
    pub fn off(&self) {
        self.write("off");
    }

    /// How many calls were counted.
    ///
    /// # Panics
    /// The file cannot be read.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.number("seen")
    }

    /// Whether the fault was injected.
    ///
    /// # Panics
    /// The file cannot be read.
    #[must_use]
    pub fn hit(&self) -> bool {
        self.number("hit") == 1
    }

    /// The first 8192 calls that were counted.
    ///
    /// # Panics
    /// The file cannot be read, or is malformed.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        let text = read(&self.folder.join("calls"));
        text.lines().map(|line| call(line).unwrap_or_else(|| panic!("no call: {line:?}"))).collect()
    }

    fn number(&self, name: &str) -> u64 {
        let text = read(&self.folder.join("faults"));
        let words = text.lines().filter_map(|line| line.split_once(' '));
        let found = words.filter(|(word, _)| *word == name).find_map(|(_, number)| number.parse().ok());
        found.unwrap_or_else(|| panic!("no {name}: {text:?}"))
    }

    fn write(&self, line: &str) {
        let written = fs::write(self.folder.join("faults"), line);
        written.unwrap_or_else(|error| panic!("the driver takes no fault {line:?}: {error}"));
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        // Best effort: a second panic would hide the first.
        let _ = fs::write(self.folder.join("faults"), "off");
    }
}

impl Calls<'_> {
    fn words(self) -> String {
        let word = |name: &str, value: Option<&str>| {
            value.map_or_else(String::new, |value| format!(" {name}={value}"))
        };
        word("comm", self.comm) + &word("call", self.call)
    }
}

/// `NUMBER PID COMM NAME RESULT [fault]`; a comm may have spaces.
fn call(line: &str) -> Option<Call> {
    let (line, fault) = line.strip_suffix(" fault").map_or((line, false), |line| (line, true));
    let (line, result) = line.rsplit_once(' ')?;
    let (line, name) = line.rsplit_once(' ')?;
    let (number, line) = line.split_once(' ')?;
    let (pid, comm) = line.split_once(' ')?;
    let result = if result == "?" { None } else { Some(result.parse().ok()?) };
    let (number, pid) = (number.parse().ok()?, pid.parse().ok()?);
    Some(Call { number, pid, comm: comm.to_owned(), name: name.to_owned(), result, fault })
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_read_as_the_driver_writes_it() {
        let found = call("3 77 a b kfd/CRIU_OP/RESUME -22 fault").unwrap();
        assert_eq!(
            (found.number, found.pid, &*found.comm, &*found.name),
            (3, 77, "a b", "kfd/CRIU_OP/RESUME")
        );
        assert_eq!((found.result, found.fault), (Some(-22), true));
        assert_eq!(call("1 2 criu drm/VERSION ?").unwrap().result, None);
        assert_eq!(call("1 2 criu"), None);
    }
}
