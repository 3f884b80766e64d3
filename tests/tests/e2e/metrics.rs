// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve --metrics`: what a restore adds to the numbers, and what stays when it has ended.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rewake_tests::daemon::{DaemonOptions, timeline};
use rewake_tests::node_cache::{StoredScene, said};
use rewake_tests::process::{PATIENCE, until};
use rewake_tests::restore_gate::Gate;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Verdict, need};
use serde_json::Value;

const MIB: usize = 8;
/// Labels of what the restores of these tests load.
const CACHED: &str = "source=\"cache\"";

/// A scene in a store, and an agent with a cache and metrics.
struct MeteredScene {
    stored: StoredScene,
    address: String,
}

impl MeteredScene {
    fn new(criu: &Criu) -> Self {
        let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir().unwrap();
        let url = format!("file://{}/store/web", folder.path().display());
        let arguments = ["--metrics", "127.0.0.1:0"].map(Into::into).to_vec();
        let options = DaemonOptions { arguments, ..DaemonOptions::default() };
        let stored = StoredScene::with(criu, "plain", MIB, (folder, url), |push| push, options).unwrap();
        let log = stored.daemon.log();
        let (_, address) = log.split_once("metrics are served on http://").expect("a line of the log");
        let address = address.split('/').next().unwrap().to_owned();
        Self { stored, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request. Returns the status and all that was answered.
    fn answer(&self, request: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // The agent may answer, and close the connection, before it has read all.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{answer}")), answer)
    }

    /// Waits until a restore has ended, as this one of all, and its program has seen right bytes.
    fn ended(&self, restore: Child, number: f64) -> EndedRestore {
        let result = timeline(&restore.wait_with_output().unwrap()).unwrap();
        self.stored.scene.stop().unwrap();
        assert_eq!(self.stored.scene.verdict(ACT).unwrap(), Verdict::Ok);
        let is_it = |now: &Scraped| now.sum("rewake_sessions_ended_total", &["complete"]) == number;
        let scraped = until(ACT, || Some(self.scrape()).filter(is_it));
        EndedRestore { result, scraped: scraped.unwrap_or_else(|| panic!("{}", self.scrape().0)) }
    }

    fn scrape(&self) -> Scraped {
        let (status, answer) = self.answer(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n");
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(status == 200 && head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        Scraped(text.to_owned())
    }
}

/// A restore that has ended, and what was scraped after that.
struct EndedRestore {
    result: Value,
    scraped: Scraped,
}

/// The lines of a scrape.
struct Scraped(String);

impl Scraped {
    /// The sum of all values of a name that have these labels.
    fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let lines = self.0.lines().filter(|line| !line.starts_with('#'));
        let values = lines.filter_map(|line| {
            let (named, value) = line.rsplit_once(' ')?;
            let (found, rest) = named.split_once('{').unwrap_or((named, ""));
            let is_it = found == name && labels.iter().all(|label| rest.contains(label));
            is_it.then(|| value.parse::<f64>().unwrap())
        });
        let values: Vec<f64> = values.collect();
        assert!(!values.is_empty(), "{name} {labels:?} in\n{}", self.0);
        values.iter().sum()
    }

    /// CPU memory that was loaded from the cache.
    fn loaded(&self) -> f64 {
        self.sum("rewake_cpu_memory_loaded_bytes_total", &[CACHED])
    }

    fn faults(&self) -> f64 {
        self.sum("rewake_page_fault_seconds_count", &[CACHED, "memory=\"cpu\""])
    }
}

#[test]
fn a_restore_is_counted_while_it_runs_and_after_it() {
    let criu = need!(Criu::main());
    let mut metered = MeteredScene::new(&criu);
    let before = metered.scrape();
    assert_eq!((before.loaded(), before.faults()), (0.0, 0.0));
    assert_eq!(before.sum("rewake_store_read_bytes_total", &[]), 0.0);

    let gate = Gate::closed(metered.stored.folder().join("gate")).unwrap();
    metered.stored.scene.go().unwrap();
    // All that the program accesses is a page fault.
    let mut command = metered.stored.restore(&["--on-demand-only=1"]).unwrap();
    let restore = command.arg("--action-script").arg(gate.script()).spawn().unwrap();
    assert!(gate.is_reached_by(1, ACT));
    let restoring = until(ACT, || {
        (metered.scrape().sum("rewake_sessions", &["state=\"restoring\""]) == 1.0).then_some(())
    });
    assert!(restoring.is_some(), "{}", metered.scrape().0);
    gate.open().unwrap();
    let first = metered.ended(restore, 1.0);
    let number = |name: &str| first.result[name].as_f64().unwrap();
    let after = first.scraped;
    // What the program did not access before its end is lazy, too, and was not loaded.
    let loaded = |result: &serde_json::Value| {
        let early = result["ended_early"].as_array().into_iter().flatten();
        let missing: f64 = early.map(|of| of["missing_bytes"].as_f64().unwrap()).sum();
        result["lazy_bytes"].as_f64().unwrap() - missing
    };
    assert_eq!(after.loaded(), loaded(&first.result), "{}", after.0);
    // The program's memory, which cannot be compressed.
    let memory = f64::from(u32::try_from(MIB << 20).unwrap());
    assert!(after.loaded() >= memory, "{}", after.0);
    assert!(after.sum("rewake_cpu_memory_loaded_bytes_total", &[CACHED, "load=\"fault\""]) > 0.0);
    assert_eq!((after.faults(), after.faults() > 0.0), (number("faults"), true));
    let infinite = after.sum("rewake_page_fault_seconds_bucket", &[CACHED, "\"cpu\"", "le=\"+Inf\""]);
    assert_eq!(infinite, after.faults());
    assert!(after.sum("rewake_page_fault_seconds_sum", &[CACHED]) > 0.0);
    assert_eq!(after.sum("rewake_sessions", &[]), 0.0);
    assert_eq!(
        (after.sum("rewake_cache_misses_total", &[]), after.sum("rewake_cache_hits_total", &[])),
        (1.0, 0.0)
    );

    metered.stored.is_complete().unwrap();
    metered.stored.scene.next_round().unwrap();
    metered.stored.scene.go().unwrap();
    let restore = metered.stored.restore(&[]).unwrap().spawn().unwrap();
    let second = metered.ended(restore, 2.0);
    let twice = second.scraped;
    let both = loaded(&first.result) + loaded(&second.result);
    assert_eq!(twice.loaded(), both, "{}", twice.0);
    assert!(twice.faults() >= after.faults());
    assert_eq!(twice.sum("rewake_cache_hits_total", &[]), 1.0);
    let counted = until(ACT, || {
        (metered.scrape().sum("rewake_cache_images", &["state=\"complete\""]) == 1.0).then_some(())
    });
    assert!(counted.is_some(), "{}", metered.scrape().0);
    let read = twice.sum("rewake_store_read_bytes_total", &[]);
    let image = f64::from(u32::try_from(metered.stored.bytes).unwrap());
    assert!(read >= memory && read <= image * 1.1, "{read} of {image}: read once");
}

#[test]
fn failures_and_wrong_requests_get_their_answers() {
    let criu = need!(Criu::main());
    let metered = MeteredScene::new(&criu);
    let answer = |request: &str| metered.answer(request.as_bytes()).0;
    assert_eq!(answer("GET / HTTP/1.1\r\nHost: node\r\n\r\n"), 404);
    assert_eq!(answer("GET /metrics/x HTTP/1.1\r\nHost: node\r\n\r\n"), 404);
    let (status, text) = metered.answer(b"POST /metrics HTTP/1.1\r\nHost: node\r\nContent-Length: 0\r\n\r\n");
    assert!(status == 405 && text.to_ascii_lowercase().contains("allow: get"), "{text}");
    assert_eq!(answer("no request\r\n\r\n"), 400);
    let long = format!("GET /metrics HTTP/1.1\r\nHost: node\r\nCookie: {}\r\n\r\n", "x".repeat(64 << 10));
    assert_eq!(answer(&long), 431);

    // Clients that send no request, as many as may be connected but one.
    let idle: Vec<TcpStream> = (0..7).map(|_| metered.connect()).collect();
    let began = Instant::now();
    metered.scrape();
    metered.stored.daemon.status().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    drop(idle);

    let url = format!("{}-none", metered.stored.url);
    let (succeeded, _) = metered.stored.cache(&["warm", &url]).unwrap();
    let scraped = metered.scrape();
    assert!(!succeeded && scraped.sum("rewake_failures_total", &["kind=\"store\""]) == 1.0, "{}", scraped.0);

    let serve = |options: &[&str]| {
        let mut command = Command::new(rewake_testkit::programs::rewake().unwrap());
        let socket: PathBuf = metered.stored.folder().join("other");
        command.arg("serve").arg("--socket").arg(socket).args(options);
        let output = command.output().unwrap();
        (output.status.code(), said(&output))
    };
    let (code, text) = serve(&["--metrics", &metered.address]);
    let wanted = format!("--metrics {}: Address already in use", metered.address);
    assert!(code == Some(1) && text.contains(&wanted) && text.lines().count() == 1, "{text}");
    let (code, text) = serve(&["--metrics", "node"]);
    assert!(code == Some(2) && text.contains("invalid value 'node' for '--metrics <ADDRESS>'"), "{text}");
}
