// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake push`, `verify` and `gc`, beside a plain loop of uploads and `restic`. The store is on this host,
//! without the link. Each of them has a store of its own.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use rewake_testkit::process::output;
use rewake_testkit::seaweedfs::SeaweedServer;

use super::Options;
use crate::harness::{Tools, folder, in_turn};
use crate::lazy::Image;
use crate::report::{Column, Table};

/// Bytes of one object of the plain loop, as of a pack.
const PIECE: usize = 16 << 20;
/// Uploads of the plain loop at once, as of a push.
const THREADS: usize = 4;

/// Rates in GB (10^9 bytes of the image) a second.
#[derive(Debug, Clone, Copy)]
struct Round {
    upload: f64,
    rewake: [f64; 3],
    restic: [f64; 3],
}

/// Measures, and returns the table.
pub(super) fn measure(options: &Options, directory: &Path) -> anyhow::Result<Table> {
    let (tools, mib) = (&options.tools, options.mib / 2);
    let image = Image::dump(&tools.criu, &folder(directory, "image")?, mib, 0)?;
    image.seal(&tools.rewake)?;
    let gb = image.bytes() as f64 / 1e9;
    let all = in_turn(
        options.rounds,
        |_| vec!["push, verify and gc"],
        |_, _| {
            let files = &image.dumped.page_files;
            let upload = gb / with_store(options, |server| seconds(|| upload(server, files)))?;
            let rewake = with_store(options, |server| rewake(tools, server, &image.dumped.directory))?;
            let restic = with_store(options, |server| restic(server, &image.dumped.directory))?;
            Ok(Round { upload, rewake: rewake.map(|took| gb / took), restic: restic.map(|took| gb / took) })
        },
    )?;
    // The step of the row, and a round. Only the first step, the push, has a plain loop.
    let columns: [Column<'_, (usize, Round)>; 5] = [
        ("rewake", &|(step, of)| Some(of.rewake[*step])),
        ("plain loop of uploads", &|(step, of)| (*step == 0).then_some(of.upload)),
        ("share", &|(step, of)| (*step == 0).then_some(of.rewake[0] / of.upload)),
        ("restic", &|(step, of)| Some(of.restic[*step])),
        ("share", &|(step, of)| Some(of.rewake[*step] / of.restic[*step])),
    ];
    let mut table = Table::of(&format!("{mib} MiB, rate in GB/s"), &columns);
    for (step, name) in ["push", "verify", "rm and gc"].into_iter().enumerate() {
        let rounds: Vec<_> = all.iter().map(|taken| (step, taken.sample)).collect();
        table.spreads(name.to_owned(), rounds.iter(), &columns);
    }
    Ok(table)
}

fn with_store<T>(
    options: &Options,
    with: impl FnOnce(&SeaweedServer) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    with(&SeaweedServer::start(&options.weed).context("SeaweedFS")?)
}

fn seconds(what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let began = Instant::now();
    what()?;
    Ok(began.elapsed().as_secs_f64())
}

/// Seconds of a push, a verification, and a removal.
fn rewake(tools: &Tools, server: &SeaweedServer, image: &Path) -> anyhow::Result<[f64; 3]> {
    let rewake = |arguments: &[&str]| {
        let mut command = tools.rewake(arguments);
        output(command.envs(SeaweedServer::environment(server.port()))).map(drop)
    };
    let image = image.to_str().context("a path that is not UTF-8")?;
    Ok([
        seconds(|| rewake(&["push", image, "s3://bucket/image"]))?,
        seconds(|| rewake(&["verify", "s3://bucket/image"]))?,
        seconds(|| {
            rewake(&["rm", "s3://bucket/image"])?;
            rewake(&["gc", "--now", "s3://bucket"])
        })?,
    ])
}

/// The same of restic.
fn restic(server: &SeaweedServer, image: &Path) -> anyhow::Result<[f64; 3]> {
    let restic = |arguments: &[&str]| {
        let mut command = Command::new("restic");
        command.args([
            "--no-cache",
            "--repo",
            &format!("s3:http://127.0.0.1:{}/bucket/restic", server.port()),
        ]);
        command.args(arguments).env("RESTIC_PASSWORD", "of-a-test");
        output(command.envs(SeaweedServer::environment(server.port()))).map(drop)
    };
    restic(&["init"]).context("the Debian package restic")?;
    let image = image.to_str().context("a path that is not UTF-8")?;
    Ok([
        seconds(|| restic(&["backup", image]))?,
        seconds(|| restic(&["check", "--read-data"]))?,
        seconds(|| restic(&["forget", "--prune", "latest"]))?,
    ])
}

/// Uploads files in pieces, some at once.
fn upload(server: &SeaweedServer, files: &[PathBuf]) -> anyhow::Result<()> {
    let mut pieces = Vec::new();
    for path in files {
        let len = path.metadata()?.len();
        pieces.extend((0..len).step_by(PIECE).map(|at| (path, at, len.min(at + PIECE as u64) - at)));
    }
    let pieces = Mutex::new(pieces.into_iter().enumerate());
    let next = || pieces.lock().expect("no thread panics with the lock").next();
    let work = || {
        while let Some((number, (path, at, len))) = next() {
            let mut piece = vec![0; usize::try_from(len)?];
            File::open(path)?.read_exact_at(&mut piece, at)?;
            let status = server.upload(&format!("plain/{number}"), &piece)?;
            ensure!(status == 201, "SeaweedFS answered {status} to an upload");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread returns errors"))
    })
}
