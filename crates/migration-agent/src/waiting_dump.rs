// SPDX-License-Identifier: MIT OR Apache-2.0
//! A `criu dump` that is held after the dump, up to the end of the migration.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::criu::{CriuChoice, CriuReports, RunningCriu, page_socket};
use crate::folder::MigrationFolder;
use crate::script::{self, WaitingScript};

/// Time that a CRIU has to end once its tree is killed.
pub(crate) const CRIU_LIMIT: Duration = Duration::from_secs(10);

/// A dump, up to the end of the migration.
pub(crate) struct WaitingDump {
    criu: RunningCriu,
    /// When CRIU began to stop the tree.
    pub(crate) started: Instant,
    script: Option<WaitingScript>,
    /// CRIU's client of lazy pages. CRIU ends when it is closed; it has no other client and no port.
    pages: UnixStream,
}

impl WaitingDump {
    /// Starts the dump of a tree.
    pub(crate) fn start(criu: &CriuChoice, tree: i32, folder: &MigrationFolder) -> anyhow::Result<Self> {
        let (pages, criu_end, number) = page_socket()?;
        let mut command = criu.command("dump", &folder.images(), folder.path());
        command.arg("-t").arg(tree.to_string());
        command.args(["--lazy-pages", "--ps-socket", &number, "--manage-cgroups=ignore"]);
        script::add_to(&mut command, folder.path())?;
        command.args(&criu.options);
        let criu = RunningCriu::start(&mut command, "dump", folder.path())?;
        drop(criu_end);
        Ok(Self { criu, started: Instant::now(), script: None, pages })
    }

    /// CRIU's script waits after the dump.
    pub(crate) fn hold(&mut self, script: WaitingScript) {
        self.script = Some(script);
    }

    /// Why the dump failed, if it has. Also one that is held must not end: the queues of a GPU process are
    /// then resumed.
    pub(crate) fn failure(&mut self) -> Option<String> {
        match self.criu.ended() {
            Ok(Some(status)) => Some(self.criu.failure(status)),
            _ => None,
        }
    }

    /// Has CRIU release the tree. In the middle of a dump it is not killed before it has taken its code out
    /// of the tree: `next` waits a moment for its script.
    pub(crate) fn release(mut self, mut next: impl FnMut() -> Option<WaitingScript>) {
        let mut reports = CriuReports::new("criu dump is in the middle of its dump, and is not killed");
        while self.script.is_none() && matches!(self.criu.ended(), Ok(None)) {
            reports.look();
            self.script = next();
        }
        self.decide(false).wait("criu dump releases the tree, and is not killed");
    }

    /// Has CRIU end, whose tree was killed.
    pub(crate) fn end(self) {
        self.decide(true).end_within(CRIU_LIMIT);
    }

    /// Lets the dump end: CRIU kills its tree if it `succeeds`, and releases it otherwise.
    fn decide(self, succeeds: bool) -> RunningCriu {
        if let Some(script) = self.script {
            // CRIU may have died, and its script with it.
            let _ = script.decide(succeeds);
        }
        drop(self.pages);
        self.criu
    }
}
