// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore, from a page server through a client.

use std::fmt;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use nix::sys::resource::UsageWho;
use nix::sys::signal::Signal;

use super::certificates::Certificates;
use super::{Options, ROUND_TRIP};
use crate::criu::server_log;
use crate::lazy::{Image, stop};
use crate::link::Link;
use crate::processes::{Exit, Process, Watch, anonymous_and_shared, cpu_seconds_of};

/// Whose program a side runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Maker {
    Stock,
    Rewake,
    /// An earlier rewake.
    Earlier,
}

/// A page server and its client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Pairing {
    pub(super) server: Maker,
    pub(super) client: Maker,
}

impl Pairing {
    pub(super) const STOCK: Self = Self { server: Maker::Stock, client: Maker::Stock };
    pub(super) const REWAKE: Self = Self { server: Maker::Rewake, client: Maker::Rewake };
    pub(super) const EARLIER: Self = Self { server: Maker::Earlier, client: Maker::Earlier };
    /// All pairs of stock and rewake.
    pub(super) const ALL: [Self; 4] = [
        Self::STOCK,
        Self { server: Maker::Stock, client: Maker::Rewake },
        Self { server: Maker::Rewake, client: Maker::Stock },
        Self::REWAKE,
    ];
}

impl fmt::Debug for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.server.name(), self.client.name())
    }
}

impl Maker {
    fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Rewake => "rewake",
            Self::Earlier => "earlier",
        }
    }

    fn program(self, options: &Options) -> &Path {
        match self {
            Self::Stock => &options.tools.criu,
            Self::Rewake => &options.tools.rewake,
            Self::Earlier => options.earlier.as_ref().unwrap_or(&options.tools.rewake),
        }
    }
}

/// The figures of one restore. GB is 10^9 bytes of the touched memory.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    /// Latencies of accesses that had to wait; none without one.
    pub(super) latency: Option<Latency>,
    /// From the start of `criu restore` until all memory is resident, in GB/s.
    pub(super) rate: f64,
    /// From the end of `criu restore`, in GB/s: the background load alone.
    pub(super) background_rate: f64,
    /// User and system seconds of all processes of each side, per GB.
    pub(super) client_cpu: f64,
    pub(super) server_cpu: f64,
    /// Anonymous and shared memory of the largest process of each side, in bytes.
    pub(super) client_memory: u64,
    pub(super) server_memory: u64,
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latency {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

/// How the pages of a round travel, and what the restored process does meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Conditions<'a> {
    pub(super) tls: Option<&'a Certificates>,
    /// Whether they travel over [`link`].
    pub(super) is_slow: bool,
    /// Whether the process accesses no memory.
    pub(super) is_idle: bool,
}

/// A page server that serves one client, and the port at which clients connect.
struct RunningServer {
    process: Process,
    port: u16,
    work: PathBuf,
}

impl RunningServer {
    fn start(
        options: &Options,
        image: &Image,
        maker: Maker,
        work: PathBuf,
        tls: &[String],
    ) -> anyhow::Result<Self> {
        std::fs::create_dir(&work)?;
        let port = free_port()?;
        let more = [vec!["--lazy-pages".to_owned()], address(port), tls.to_vec()].concat();
        let process = image.dumped.listen(maker.program(options), "page-server", &more, &work)?;
        Ok(Self { process, port, work })
    }

    fn ended(&mut self, image: &Image) -> anyhow::Result<Exit> {
        image.dumped.served(&mut self.process, &self.work).context("the page server")
    }
}

/// Restores the image by a client of a page server, while the process accesses its memory.
pub(super) fn run(
    options: &Options,
    image: &Image,
    pairing: Pairing,
    conditions: Conditions<'_>,
    work: &Path,
) -> anyhow::Result<Sample> {
    let dumped = &image.dumped;
    let tls = conditions.tls.map(Certificates::options).unwrap_or_default();
    let mut server = RunningServer::start(options, image, pairing.server, work.join("server"), &tls)?;
    let server_watch = Watch::start(server.process.pid(), anonymous_and_shared);
    let port = if conditions.is_slow { Link::to(server.port, ROUND_TRIP)?.port() } else { server.port };
    let more = [vec!["--page-server".to_owned()], address(port), tls].concat();
    let reaped_cpu = || cpu_seconds_of(UsageWho::RUSAGE_CHILDREN);
    let cpu_before = reaped_cpu()?;
    let mut client = dumped.listen(pairing.client.program(options), "lazy-pages", &more, work)?;
    let client_watch = Watch::start(client.pid(), anonymous_and_shared);
    let began = Instant::now();
    let (mut target, restored) = dumped
        .restore(&options.tools.criu, &["--lazy-pages"], work)
        .with_context(|| format!("the client's log:\n{}", server_log(work)))
        .with_context(|| format!("the page server's log:\n{}", server_log(&server.work)))?;
    if !conditions.is_idle {
        target.signal(Signal::SIGUSR1)?;
    }
    let served = dumped
        .served(&mut client, work)
        .with_context(|| format!("the page server's log:\n{}", server_log(&server.work)))?;
    let client_memory = client_watch.reap().largest();
    let client_cpu = reaped_cpu()? - cpu_before - restored.cpu_seconds;
    let cpu_before = reaped_cpu()?;
    server.ended(image)?;
    let server_memory = server_watch.reap().largest();
    let server_cpu = reaped_cpu()? - cpu_before;
    let touched = stop(&mut target, image)?;
    ensure!(conditions.is_idle || touched.touches > 0, "the restored process accessed no page");
    let gb = image.bytes() as f64 / 1e9;
    Ok(Sample {
        latency: touched.latency.map(|latency| Latency {
            p50: latency.p50 as f64 / 1e3,
            p99: latency.p99 as f64 / 1e3,
            max: latency.max as f64 / 1e3,
        }),
        rate: gb / (served.at - began).as_secs_f64(),
        background_rate: gb / (served.at - restored.at).as_secs_f64(),
        client_cpu: client_cpu / gb,
        server_cpu: server_cpu / gb,
        client_memory,
        server_memory,
    })
}

/// The options that name a port.
pub(super) fn address(port: u16) -> Vec<String> {
    ["--address", "127.0.0.1", "--port", &port.to_string()].map(str::to_owned).to_vec()
}

/// Returns a port that no process uses at the moment.
pub(super) fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port")?;
    Ok(listener.local_addr()?.port())
}
