// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake push`, `verify` and `gc`, beside a plain loop of uploads and `restic`. The store is on this host, without
//! the link. Each of them has a store of its own.

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use rewake_testkit::seaweedfs::SeaweedServer;

use super::stored::folder;
use super::{Options, Tools, run};
use crate::lazy::Image;
use crate::report::{Spread, spread};

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
pub(super) fn measure(options: &Options, tools: &Tools, directory: &Path) -> anyhow::Result<String> {
    let mib = options.mib / 2;
    let image = Image::dump(&tools.criu, &folder(directory, "image")?, mib, 0)?;
    image.seal(&tools.rewake)?;
    let gb = image.bytes() as f64 / 1e9;
    let mut all = Vec::new();
    for round in 0..options.rounds {
        eprintln!("push, verify and gc, round {round}");
        let files = &image.dumped().page_files;
        let upload = gb / with_store(tools, |server| seconds(|| upload(server, files)))?;
        let rewake = with_store(tools, |server| rewake(tools, server, &image.dumped().directory))?;
        let restic = with_store(tools, |server| restic(server, &image.dumped().directory))?;
        all.push(Round {
            upload,
            rewake: rewake.map(|took| gb / took),
            restic: restic.map(|took| gb / took),
        });
    }
    let cell = |value: &dyn Fn(&Round) -> f64| spread(Spread::of(all.iter().map(value).collect()));
    let mut text = format!(
        "| {mib} MiB, rate in GB/s | rewake | plain loop of uploads | share | restic | share |\n|---|---|---|---|---|---|\n"
    );
    for (number, name) in ["push", "verify", "rm and gc"].into_iter().enumerate() {
        let beside_loop = |text: String| if number == 0 { text } else { "-".to_owned() };
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} |",
            cell(&|of| of.rewake[number]),
            beside_loop(cell(&|of| of.upload)),
            beside_loop(cell(&|of| of.rewake[0] / of.upload)),
            cell(&|of| of.restic[number]),
            cell(&|of| of.rewake[number] / of.restic[number])
        );
    }
    Ok(text)
}

fn with_store<T>(tools: &Tools, with: impl FnOnce(&SeaweedServer) -> anyhow::Result<T>) -> anyhow::Result<T> {
    with(&SeaweedServer::start(&tools.weed).context("SeaweedFS")?)
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
        run(command.envs(SeaweedServer::environment(server.port()))).map(drop)
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
        run(command.envs(SeaweedServer::environment(server.port()))).map(drop)
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
