// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo --replicas`: the image of a process is pushed to a store, and three replicas of it are
//! restored at once. One node agent reads the store once for all of them. Each replica checks every byte of
//! its memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::actors::{Target, bytes_of, in_folder, keep_trace, wait_until};
use super::metrics::Metrics;
use crate::{files, program, repository, setup};

/// Memory of the process, in MiB.
const MEMORY_MIB: u64 = 128;
const REPLICAS: usize = 3;
/// Time that a step may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(120);
/// What the store may send, as a share of the image: it is stored compressed, and has an index.
const READ_ONCE: f64 = 1.1;

/// Runs the demo, and prints its steps.
pub(crate) fn run() -> anyhow::Result<()> {
    let criu = setup::run()?;
    let programs = [("rewake", "rewake"), ("rewake-tests", "target")];
    let [rewake, program] = repository::build_for_demo(programs, &["rewake/stores"])?;
    let home = repository::scratch().join("demo-replicas");
    let stage = ReplicasStage { home, rewake, criu: criu.path };
    in_folder(&stage.home, || stage.play(&program))
}

/// The folders of the demo, and its programs.
struct ReplicasStage {
    home: PathBuf,
    rewake: PathBuf,
    criu: PathBuf,
}

/// The node agent, which ends with the demo.
struct DemoAgent(Child);

impl Drop for DemoAgent {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ReplicasStage {
    /// Makes a folder of the demo.
    fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.home.join(name);
        files::create_folder(&path)?;
        Ok(path)
    }

    fn rewake(&self, command: &str) -> Command {
        let mut rewake = Command::new(&self.rewake);
        rewake.arg(command);
        rewake
    }

    fn socket(&self) -> PathBuf {
        self.home.join("socket")
    }

    fn url(&self) -> String {
        format!("file://{}/demo", self.home.join("store").display())
    }

    fn play(&self, program: &Path) -> anyhow::Result<()> {
        let (files, images) = (self.folder("files")?, self.folder("img")?);
        let target = Target::start(program, &files, MEMORY_MIB, LIMIT)?;
        println!("A process has filled {MEMORY_MIB} MiB of memory.");
        let mut dump = self.rewake("dump");
        dump.args(["-t", &target.pid().to_string(), "-D"]).arg(&images).arg("--criu").arg(&self.criu);
        program::capture(&mut dump)?;
        target.dumped()?;
        let bytes = bytes_of(&images, "")?;
        program::capture(self.rewake("push").arg(&images).arg(self.url()))?;
        files::remove(&images)?;
        println!("It was dumped, and its image pushed to the store {}: only the store has it.", self.url());

        let (_agent, address) = self.start_agent()?;
        println!("`rewake serve` has an empty cache, and metrics on http://{address}/metrics.\n");
        let began = Instant::now();
        let replicas: Vec<Child> =
            (0..REPLICAS).map(|number| self.start_replica(number)).collect::<anyhow::Result<_>>()?;
        println!("{REPLICAS} replicas are restored at once, each in namespaces of its own:");
        for (number, replica) in replicas.into_iter().enumerate() {
            self.finish_replica(number, replica, began)?;
        }
        self.show(&address, bytes)?;
        let path = keep_trace(&self.work(0))?;
        println!("\nThe trace of the first replica, for ui.perfetto.dev: {}", path.display());
        Ok(())
    }

    /// Starts the agent. Returns the address of its metrics, too.
    fn start_agent(&self) -> anyhow::Result<(DemoAgent, String)> {
        let log = self.home.join("serve.log");
        let mut serve = self.rewake("serve");
        serve.arg("--socket").arg(self.socket()).arg("--cache").arg(self.home.join("cache"));
        serve.args(["--metrics", "127.0.0.1:0", "-v3", "-o"]).arg(&log).stdin(Stdio::null());
        let mut agent = DemoAgent(serve.spawn().context("start rewake serve")?);
        let mut address = None;
        wait_until(LIMIT, "`rewake serve` does not listen", || {
            ensure!(agent.0.try_wait()?.is_none(), "`rewake serve` has ended: {}", log.display());
            address = metrics_address(&fs::read_to_string(&log).unwrap_or_default());
            Ok(address.is_some() && self.socket().exists())
        })?;
        Ok((agent, address.context("an address in the agent's log")?))
    }

    fn work(&self, number: usize) -> PathBuf {
        self.home.join(format!("work-{number}"))
    }

    /// Starts a restore as the first process of new namespaces, where a folder of its own is the process's.
    fn start_replica(&self, number: usize) -> anyhow::Result<Child> {
        let (own, work) = (self.folder(&format!("files-{number}"))?, self.folder(&format!("work-{number}"))?);
        for name in ["go", "stop"] {
            fs::write(own.join(name), "").with_context(|| format!("write to {}", own.display()))?;
        }
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]);
        command
            .arg("mount --bind \"$0\" \"$1\" && shift && exec \"$@\"")
            .arg(own)
            .arg(self.home.join("files"));
        command.arg(&self.rewake).args(["restore", &self.url(), "--json", "--quiet", "--socket"]);
        command.arg(self.socket()).arg("--criu").arg(&self.criu).arg("-W").arg(&work);
        let errors = fs::File::create(work.join("messages")).context("make a file for messages")?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        command.spawn().context("start unshare")
    }

    /// Waits for the end of a replica, which must have read what was dumped.
    fn finish_replica(&self, number: usize, replica: Child, began: Instant) -> anyhow::Result<()> {
        let output = replica.wait_with_output().context("wait for a replica")?;
        let messages = self.work(number).join("messages");
        ensure!(output.status.success(), "replica {number}: {}: {}", output.status, messages.display());
        let verdict = self.home.join(format!("files-{number}/verdict"));
        let verdict = fs::read_to_string(verdict).unwrap_or_default();
        ensure!(verdict.trim() == "OK", "replica {number} has wrong memory: {verdict:?}");
        let result = String::from_utf8_lossy(&output.stdout);
        let time = |name| number_in(&result, name).with_context(|| format!("no {name} in {result}"));
        println!(
            "  replica {number}: ran after {:.0} ms, had all memory after {:.0} ms, has checked every byte: \
             all right (seen after {:.1} s)",
            time("alive_ms")?,
            time("all_resident_ms")?,
            began.elapsed().as_secs_f64()
        );
        Ok(())
    }

    /// Prints what the metrics say, and checks it.
    fn show(&self, address: &str, image: u64) -> anyhow::Result<()> {
        let mut metrics = Metrics::scrape(address)?;
        wait_until(LIMIT, "the metrics do not have all replicas", || {
            metrics = Metrics::scrape(address)?;
            Ok(metrics.sum("rewake_sessions_ended_total{result=\"complete\"") >= REPLICAS as f64)
        })?;
        println!("\nWhat the metrics say:");
        for line in metrics.lines(&[
            "rewake_sessions_ended_total",
            "rewake_cpu_memory_loaded_bytes_total{source=\"cache\"",
            "rewake_page_fault_seconds_count{memory=\"cpu\",source=\"cache\"",
            "rewake_cache_hits_total",
            "rewake_cache_misses_total",
            "rewake_store_read_bytes_total",
        ]) {
            println!("  {line}");
        }
        #[expect(clippy::cast_precision_loss, reason = "for users")]
        let share = metrics.sum("rewake_store_read_bytes_total") / image as f64;
        println!(
            "\nThe store has sent {share:.2} times the image's {} MiB, for {REPLICAS} replicas.",
            image >> 20
        );
        ensure!(share <= READ_ONCE, "expected at most {READ_ONCE} times");
        Ok(())
    }
}

fn metrics_address(log: &str) -> Option<String> {
    let (_, rest) = log.split_once("metrics are served on http://")?;
    rest.split_once('/').map(|(address, _)| address.to_owned())
}

/// A number of a JSON text.
fn number_in(json: &str, name: &str) -> Option<f64> {
    let (_, rest) = json.split_once(&format!("\"{name}\":"))?;
    rest.trim_start().split([',', '}', '\n']).next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_s_log_has_the_address_of_its_metrics() {
        let log = "INFO metrics are served on http://127.0.0.1:4711/metrics\n";
        assert_eq!(metrics_address(log).as_deref(), Some("127.0.0.1:4711"));
        assert_eq!(metrics_address("INFO metrics are served on http://127"), None);
    }

    #[test]
    fn numbers_of_a_result_are_found() {
        let json = "{\n  \"alive_ms\": 12.5,\n  \"all_resident_ms\": null, \"faults\":3}";
        assert_eq!(number_in(json, "alive_ms"), Some(12.5));
        assert_eq!((number_in(json, "all_resident_ms"), number_in(json, "faults")), (None, Some(3.0)));
    }
}
