// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program that gets dumped and restored: fills memory, says "ready" through a file, waits for the file
//! "go", acts, checks every byte and writes what it found to the file "verdict". It holds no pipe, socket or
//! terminal. Exit status: 0 all good, 1 wrong bytes seen, 3 a part of it was killed, 2 it could not work.

mod active;
mod answers;
mod device;
mod discard;
mod family;
mod impostor;
mod leave;
mod mappings;
mod memory;
mod mixed;
mod moving;
mod plain;
mod sparse;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use stage::Stage;

/// What to play, and how large.
#[derive(Debug, Parser)]
struct Arguments {
    /// The scenario's name.
    scenario: String,
    /// Directory of ready, go and verdict.
    #[arg(long)]
    dir: PathBuf,
    /// Size of the main region in MiB.
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// Seed of the content and of every random choice.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The task that an impostor claims to be.
    #[arg(long, default_value_t = 0)]
    pid: i32,
    /// The page server's socket, for an impostor.
    #[arg(long, default_value = "lazy-pages.socket")]
    socket: PathBuf,
    /// The device to map.
    #[arg(long, default_value = "/dev/loop0")]
    device: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Whatever the test's own parents left open: CRIU would have to dump it.
    // SAFETY: nothing in this program has opened a descriptor yet.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    // A session of its own, as CRIU wants it; fails only after exec, where it leads one already.
    let _ = nix::unistd::setsid();
    Stage::report_panics(&arguments.dir);
    // A thread may outlive this one.
    let stage: &'static Stage = Box::leak(Box::new(Stage::new(arguments.dir, arguments.mib, arguments.seed)));
    let result = match arguments.scenario.as_str() {
        "plain" => plain::sequential(stage),
        "random" => plain::random(stage),
        "rewrite" => plain::rewrite(stage),
        "quarter" => plain::quarter(stage),
        "odd-names" => plain::odd_names(stage),
        "reserved" => plain::reserved(stage),
        "thp" => plain::huge(stage),
        "zeros" => plain::zeros(stage),
        "threads" => family::threads(stage),
        "first-thread-ends" => family::first_thread_ends(stage),
        "tree" => family::tree(stage),
        "zombies" => family::zombies(stage),
        "fork" => family::fork_missing(stage),
        "forks" => family::forks_without_end(stage),
        "mremap" => moving::mremap(stage),
        "munmap" => discard::unmap(stage),
        "dontneed" => discard::dontneed(stage),
        "free" => discard::free(stage),
        "prompt" => discard::promptly(stage),
        "sparse" => sparse::untouched(stage),
        "sparse-unmap" => sparse::unmap_most(stage, 64),
        "sparse-dontneed" => sparse::discard_most(stage, 64),
        "dense-unmap" => sparse::unmap_most(stage, 1),
        "mixed" => mixed::run(stage),
        "exit-early" => leave::exit_early(stage),
        "exec-early" => leave::exec_early(stage),
        "after-exec" => leave::after_exec(stage),
        "impostor" => impostor::run(stage, arguments.pid, &arguments.socket),
        "answers" => answers::plain(stage),
        "answers-odd-names" => answers::odd_names(stage),
        "answers-reserved" => answers::reserved(stage),
        "answers-threads" => answers::threads(stage),
        "answers-mappings" => answers::mappings(stage),
        "answers-terabyte" => answers::terabyte(stage),
        "answers-huge-pages" => answers::huge_pages(stage),
        "answers-strict" => answers::strict(stage),
        "active" => active::run(stage),
        "device" => device::run(stage, &arguments.device),
        "mappings" => mappings::run(stage, &arguments.device),
        other => Err(anyhow::anyhow!("no scenario is called {other:?}")),
    };
    stage.end(result)
}
