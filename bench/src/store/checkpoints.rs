// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ten checkpoints of one program, after different requests, in one store.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::Context as _;
use rewake_testkit::process::output;

use super::{Options, push};
use crate::harness::folder;
use crate::programs::{Check, Client, Program, Question, Running};

const COUNT: u32 = 10;
/// Seeds of the requests between two checkpoints.
const SEED: u32 = 3001;

/// Measures, and returns one line.
pub(super) fn measure(options: &Options, directory: &Path) -> anyhow::Result<String> {
    let program = Program::Python;
    let (tools, mib) = (&options.tools, options.mib / 4);
    let running = Running::start(program, mib, directory)?;
    let store = directory.join("store");
    let (mut bytes, mut alone) = (0, 0);
    for number in 0..COUNT {
        eprintln!("checkpoint {number}");
        ask(program, mib, &running, SEED + number)?;
        let image = folder(directory, &format!("img{number}"))?;
        let mut dump = Command::new(&tools.criu);
        dump.args(["dump", "--leave-running", "-o", "dump.log", "-D"]).arg(&image);
        output(dump.args(["-t", &running.process.pid().to_string()]))?;
        bytes += size(&image)?;
        tools.seal(&image)?;
        push(tools, &image, &format!("file://{}/{number}", store.display()), &[])?;
        if number == 0 {
            alone = size(&store)?;
        }
        fs::remove_dir_all(&image)?;
    }
    let stored = size(&store)?;
    Ok(format!(
        "{COUNT} checkpoints of {program} with {mib} MiB, after different requests: {:.3} of their bytes are \
         stored ({} of {} MB; one alone: {} MB)",
        stored as f64 / bytes as f64,
        stored / 1_000_000,
        bytes / 1_000_000,
        alone / 1_000_000
    ))
}

fn ask(program: Program, mib: u64, running: &Running, seed: u32) -> anyhow::Result<()> {
    let stop = AtomicBool::new(false);
    let now = Instant::now();
    let client = Client { socket: &running.socket, deadline: now + running.limit, stop: &stop };
    let question = Question { seed, ..program.first_question(mib) };
    Check::new(program, mib, question).ask(&client, now).map(drop)
}

/// Bytes of all files below a folder.
fn size(folder: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let found = entry.metadata()?;
        bytes += if found.is_dir() { size(&entry.path())? } else { found.len() };
    }
    Ok(bytes)
}
