// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes the soft GPUs of this machine: loads softgpu.ko again with other parameters.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rewake_testkit::process::output;
use rewake_testkit::soon;

use crate::Judge;

const PARAMETERS: &str = "/sys/module/softgpu/parameters";

/// The machine with its first parameters; dropping this restores them.
#[derive(Debug)]
pub struct Machine {
    module: PathBuf,
    found: BTreeMap<String, String>,
}

impl Machine {
    /// None where GPUs are real. `SOFTGPU_KO` names the module's file.
    ///
    /// # Panics
    /// The module's parameters cannot be read.
    #[must_use]
    pub fn find() -> Option<Self> {
        let module = PathBuf::from(std::env::var_os("SOFTGPU_KO")?);
        Some(Self { module, found: Self::parameters()? })
    }

    /// The module's parameters now. None where GPUs are real.
    ///
    /// # Panics
    /// They cannot be read.
    pub(crate) fn parameters() -> Option<BTreeMap<String, String>> {
        let files = fs::read_dir(PARAMETERS).ok()?.flatten();
        let parameter = |path: &Path| {
            let value = fs::read_to_string(path).expect("a parameter can be read");
            (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), value.trim().to_owned())
        };
        Some(files.map(|file| parameter(&file.path())).collect())
    }

    /// A machine with these parameters until it is dropped. None where GPUs are real.
    ///
    /// # Panics
    /// As [`Machine::find`] and [`Machine::becomes`].
    #[must_use]
    pub fn with(changes: &[(&str, &str)]) -> Option<Self> {
        let machine = Self::find()?;
        machine.becomes(changes);
        Some(machine)
    }

    /// A parameter's first value.
    ///
    /// # Panics
    /// There is no such parameter.
    #[must_use]
    pub fn found(&self, name: &str) -> &str {
        self.found.get(name).unwrap_or_else(|| panic!("the module has no parameter {name}"))
    }

    /// Changes some of the parameters; all others have their first values. Empties the judge's list.
    ///
    /// # Panics
    /// The judge has noted a violation, a process uses a GPU, or the module does not load.
    pub fn becomes(&self, changes: &[(&str, &str)]) {
        if let Some(judge) = Judge::find() {
            assert_eq!(judge.violations(), Vec::<String>::new(), "before the machine changes");
        }
        self.load(changes).unwrap_or_else(|error| panic!("{changes:?}: {error:#}"));
    }

    fn load(&self, changes: &[(&str, &str)]) -> anyhow::Result<()> {
        let unload = || output(Command::new("rmmod").arg("softgpu"));
        // The driver cleans up ended processes in the background.
        if !soon(|| unload().is_ok()) {
            unload()?;
        }
        let mut parameters = self.found.clone();
        parameters.extend(changes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let words = parameters.iter().map(|(name, value)| format!("{name}={value}"));
        output(Command::new("insmod").arg(&self.module).args(words)).map(drop)
    }
}

/// Whether GPUs retry faults here, in processes that do not set it (XNACK), by the module's parameters. False
/// where GPUs are real.
#[must_use]
pub fn gpus_retry_faults() -> bool {
    let parameter = fs::read_to_string(Path::new(PARAMETERS).join("xnack"));
    parameter.is_ok_and(|parameter| parameter.trim() == "Y")
}

impl Drop for Machine {
    /// Unloading the module empties the judge's list, so this reads it first.
    fn drop(&mut self) {
        let noted = Judge::find().map(|judge| judge.violations()).unwrap_or_default();
        let loaded = self.load(&[]);
        if thread::panicking() {
            eprintln!("the judge's list: {noted:?}; the module with its first parameters: {loaded:?}");
        } else {
            assert_eq!(noted, Vec::<String>::new(), "before the module is loaded again");
            loaded.expect("no process of this test still uses a GPU");
        }
    }
}
