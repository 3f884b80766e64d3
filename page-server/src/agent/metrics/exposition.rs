// SPDX-License-Identifier: MIT OR Apache-2.0
//! A status of the agent as text, in the format `OpenMetrics`, which Prometheus reads.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use rewake_node_cache::{CacheContents, CacheCounts};
use rewake_streamer::control::proto::{self, FaultLatencies, LoadCounts, MemorySource, State, Streaming};
use rewake_streamer::fault_latencies::COUNTED_POWERS;

use crate::agent::counts::totals;

/// The type of the text.
pub(super) const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What is exported.
#[derive(Debug, Clone)]
pub(super) struct Exposition {
    pub(super) status: proto::Status,
    /// None: the agent has no cache. Without contents: its disk does not answer.
    pub(super) cache: Option<(CacheCounts, Option<CacheContents>)>,
}

/// The labels of a value.
type Labels<const N: usize> = [(&'static str, String); N];

impl Exposition {
    pub(super) fn text(self) -> String {
        let (mut text, mut registry) = (String::new(), Registry::default());
        registry.register_collector(Box::new(self));
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }

    fn agent(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let agent = self.status.agent.clone().unwrap_or_default();
        // Not the type `info` of OpenMetrics, for which older parsers refuse the whole text.
        let version = [("version", env!("CARGO_PKG_VERSION").to_owned())];
        gauges(to, "rewake_build_info", "The release of rewake", &[(version, 1_u64)])?;
        let uptime = Duration::from_nanos(agent.uptime_ns).as_secs_f64();
        gauges(to, "rewake_agent_uptime_seconds", "Time since the agent was started", &[([], uptime)])?;
        let help = "Resident memory of the agent, without its streamers";
        gauges(to, "rewake_agent_resident_memory_bytes", help, &[([], agent.rss_bytes)])
    }

    fn sessions(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let agent = self.status.agent.clone().unwrap_or_default();
        let state = |state: State, name: &str| {
            let count = self.live().filter(|now| now.state() == state).count();
            ([("state", name.to_owned())], count as u64)
        };
        let states = [
            state(State::Listening, "listening"),
            state(State::Restoring, "restoring"),
            state(State::Running, "running"),
            state(State::Complete, "complete"),
        ];
        gauges(to, "rewake_sessions", "Restores that are served now", &states)?;
        let ended = [("complete", agent.sessions_served), ("failed", agent.sessions_failed)];
        let ended = ended.map(|(result, count)| ([("result", result.to_owned())], count));
        counters(to, "rewake_sessions_ended", "Restores that have ended", &ended)?;
        let store = self.cache.iter().map(|(counts, _)| ("store".to_owned(), counts.failures));
        let kinds = agent.failures.into_iter().map(|failure| (failure.kind, failure.count)).chain(store);
        let kinds: Vec<_> = kinds.map(|(kind, count)| ([("kind", kind)], count)).collect();
        let help = "Restores and requests for an image that failed or were refused, by what failed";
        counters(to, "rewake_failures", help, &kinds)
    }

    fn memory(
        &self,
        to: &mut DescriptorEncoder<'_>,
        totals: &BTreeMap<&'static str, LoadCounts>,
    ) -> fmt::Result {
        let missing: u64 = self.live().flat_map(|now| &now.processes).map(missing).sum();
        let help = "Memory of the restores that are served now that is not resident yet";
        gauges(to, "rewake_missing_memory_bytes", help, &[([], missing)])?;
        let loads = totals.iter().flat_map(|(source, counts)| {
            let loads = [
                ("fault", counts.fault_bytes),
                ("working_set", counts.working_set_bytes),
                ("background", counts.background_bytes),
            ];
            loads.map(|(load, bytes)| ([("source", (*source).to_owned()), ("load", load.to_owned())], bytes))
        });
        let help = "CPU memory that was made resident, by where it came from and what loaded it";
        counters(to, "rewake_cpu_memory_loaded_bytes", help, &loads.collect::<Vec<_>>())?;
        let help = "GPU memory that was made resident, by where it came from";
        let gpus = by_source(totals, |counts| counts.gpu_bytes);
        counters(to, "rewake_gpu_memory_loaded_bytes", help, &gpus)?;
        let is_closed =
            |process: &&proto::StreamedProcess| !process.without_gate && process.gate_open_us == 0;
        let closed = self.live().flat_map(|now| &now.processes).filter(is_closed).count() as u64;
        gauges(to, "rewake_gates_closed", "Processes whose GPU queues are evicted", &[([], closed)])?;
        let opened = totals.values().map(|counts| counts.gates_opened).sum();
        counters(to, "rewake_gates_opened", "Processes whose GPU queues were resumed", &[([], opened)])
    }

    fn contents(contents: CacheContents, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let images = [("complete", contents.complete), ("partial", contents.partial)];
        let images = images.map(|(state, count)| ([("state", state.to_owned())], count));
        gauges(to, "rewake_cache_images", "Images in the cache", &images)?;
        let help = "Bytes of the cache's images on the disk";
        gauges(to, "rewake_cache_bytes", help, &[([], contents.bytes)])
    }

    fn cache(cache: &CacheCounts, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Bytes that the cache's images may have together";
        gauges(to, "rewake_cache_limit_bytes", help, &[([], cache.size)])?;
        let help = "Requests for an image that the cache had, or was fetching for another restore";
        counters(to, "rewake_cache_hits", help, &[([], cache.hits)])?;
        let help = "Requests for an image that had to be fetched from its store";
        counters(to, "rewake_cache_misses", help, &[([], cache.misses)])?;
        let help = "Bytes that stores have sent to the cache";
        counters(to, "rewake_store_read_bytes", help, &[([], cache.store_bytes)])
    }

    /// The sessions that are served.
    fn live(&self) -> impl Iterator<Item = &Streaming> {
        self.status.sessions.iter().filter_map(|session| session.progress.as_ref())
    }

    /// What was counted, by the name of its source. Sources of this agent are always exported.
    fn totals(&self) -> BTreeMap<&'static str, LoadCounts> {
        let mut totals: BTreeMap<_, _> =
            totals(&self.status).into_iter().map(|(source, counts)| (name(source), counts)).collect();
        totals.entry(name(MemorySource::Image)).or_default();
        if self.cache.is_some() {
            totals.entry(name(MemorySource::Cache)).or_default();
        }
        totals
    }
}

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let totals = self.totals();
        self.agent(&mut encoder)?;
        self.sessions(&mut encoder)?;
        self.memory(&mut encoder, &totals)?;
        faults(&mut encoder, &totals)?;
        let Some((counts, contents)) = self.cache else { return Ok(()) };
        contents.map_or(Ok(()), |contents| Self::contents(contents, &mut encoder))?;
        Self::cache(&counts, &mut encoder)
    }
}

fn name(source: MemorySource) -> &'static str {
    match source {
        MemorySource::Unknown => "unknown",
        MemorySource::Image => "image",
        MemorySource::Cache => "cache",
        MemorySource::Peer => "peer",
    }
}

fn missing(process: &proto::StreamedProcess) -> u64 {
    let memory = process.memory.iter().chain(&process.of_cpus);
    memory.map(|of| of.bytes.saturating_sub(of.resident)).sum()
}

fn by_source(
    totals: &BTreeMap<&'static str, LoadCounts>,
    value: impl Fn(&LoadCounts) -> u64,
) -> Vec<(Labels<1>, u64)> {
    totals.iter().map(|(source, counts)| ([("source", (*source).to_owned())], value(counts))).collect()
}

/// The histogram of page faults, by where the memory comes from and whose it is.
fn faults(to: &mut DescriptorEncoder<'_>, totals: &BTreeMap<&'static str, LoadCounts>) -> fmt::Result {
    let help = "How long threads waited for a page fault, from its message until it was served";
    let mut family = to.encode_descriptor("rewake_page_fault_seconds", help, None, MetricType::Histogram)?;
    for (source, counts) in totals {
        for (memory, latencies) in [("cpu", &counts.page_faults), ("gpu", &counts.gpu_faults)] {
            let (buckets, sum) = buckets(latencies.as_ref());
            let count = buckets.iter().map(|(_, count)| count).sum();
            let labels = [("memory", memory), ("source", *source)];
            let mut histogram = family.encode_family(&labels)?;
            histogram.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
    }
    Ok(())
}

/// The upper bounds of buckets, in seconds, with their counts; and the sum of all waits.
fn buckets(latencies: Option<&FaultLatencies>) -> (Vec<(f64, u64)>, f64) {
    let bounds = COUNTED_POWERS.map(|power| Duration::from_nanos(1 << power).as_secs_f64());
    let count = |place: usize| latencies.and_then(|of| of.counts.get(place)).copied().unwrap_or_default();
    let bounds = bounds.chain([f64::INFINITY]).enumerate();
    let sum = Duration::from_nanos(latencies.map_or(0, |of| of.sum_ns)).as_secs_f64();
    (bounds.map(|(place, bound)| (bound, count(place))).collect(), sum)
}

fn gauges<const N: usize, V: EncodeGaugeValue>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: &[(Labels<N>, V)],
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        if labels.is_empty() {
            family.encode_gauge(value)?;
        } else {
            family.encode_family(labels)?.encode_gauge(value)?;
        }
    }
    Ok(())
}

/// The names of counters end with `_total` in the text.
fn counters<const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: &[(Labels<N>, u64)],
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in values {
        if labels.is_empty() {
            family.encode_counter::<NoLabelSet, _, u64>(value, None)?;
        } else {
            family.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(value, None)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rewake_streamer::control::proto::{
        Agent, Session, SourceCounts, Status, StreamedMemory, StreamedProcess,
    };

    use super::*;

    const DASHBOARD: &str = include_str!("../../../../docs/grafana-dashboard.json");
    /// The page, whose part on metrics begins with `DOCS_HEADING`.
    const DOCS: &str = include_str!("../../../../docs/diagnose.md");
    const DOCS_HEADING: &str = "\n## Metrics\n";

    fn counts(fault_bytes: u64) -> Option<LoadCounts> {
        let page_faults = Some(FaultLatencies { counts: vec![1, 0, 2], sum_ns: 5000 });
        Some(LoadCounts {
            fault_bytes,
            working_set_bytes: 8192,
            gates_opened: 1,
            page_faults,
            ..Default::default()
        })
    }

    /// One session that is served, and the counts of others.
    fn example() -> Exposition {
        let memory = StreamedMemory { bytes: 8192, resident: 4096, ..Default::default() };
        let process = StreamedProcess { of_cpus: Some(memory), ..Default::default() };
        let progress = Streaming {
            state: State::Running.into(),
            source: MemorySource::Cache.into(),
            counts: counts(4096),
            processes: vec![process],
            ..Default::default()
        };
        let agent = Agent {
            sessions_served: 2,
            ended: vec![SourceCounts { source: MemorySource::Cache.into(), counts: counts(100) }],
            uptime_ns: 1_500_000_000,
            ..Default::default()
        };
        let session = Session { progress: Some(progress), ..Default::default() };
        let status = Status { sessions: vec![session], agent: Some(agent), ..Default::default() };
        let counts = CacheCounts { hits: 7, store_bytes: 1 << 40, ..Default::default() };
        let contents = CacheContents { complete: 1, ..Default::default() };
        Exposition { status, cache: Some((counts, Some(contents))) }
    }

    /// The names of metrics, and the names of all lines.
    fn names(text: &str) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let metrics = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        (metrics.collect(), lines.filter_map(|line| line.split(['{', ' ']).next()).collect())
    }

    /// The metrics that an expression names.
    fn named(expression: &str) -> impl Iterator<Item = &str> {
        let words = expression.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
        words.filter(|word| word.starts_with("rewake_"))
    }

    #[test]
    fn ended_and_live_sessions_are_added_up() {
        let text = example().text();
        for line in [
            "rewake_sessions{state=\"running\"} 1",
            "rewake_sessions{state=\"listening\"} 0",
            "rewake_sessions_ended_total{result=\"complete\"} 2",
            "rewake_cpu_memory_loaded_bytes_total{source=\"cache\",load=\"fault\"} 4196",
            "rewake_cpu_memory_loaded_bytes_total{source=\"cache\",load=\"working_set\"} 16384",
            "rewake_cpu_memory_loaded_bytes_total{source=\"image\",load=\"background\"} 0",
            "rewake_missing_memory_bytes 4096",
            "rewake_gates_opened_total 2",
            "rewake_gates_closed 1",
            "rewake_cache_hits_total 7",
            "rewake_store_read_bytes_total 1099511627776",
            "rewake_agent_uptime_seconds 1.5",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(text.contains("rewake_build_info{version=\""), "{text}");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').nth(1));
        let types: BTreeSet<&str> = types.collect();
        assert_eq!(types, BTreeSet::from(["counter", "gauge", "histogram"]), "older parsers know these");
    }

    #[test]
    fn of_a_cache_whose_disk_hangs_the_counters_are_exported() {
        let cache = example().cache.map(|(counts, _)| (counts, None));
        let text = Exposition { cache, ..example() }.text();
        assert!(text.contains("rewake_cache_hits_total 7"), "{text}");
        assert!(!text.contains("rewake_cache_images") && !text.contains("rewake_cache_bytes"), "{text}");
    }

    #[test]
    fn buckets_count_all_faults_up_to_their_bound() {
        let text = example().text();
        let value = |line: &str| {
            let labels = "memory=\"cpu\",source=\"cache\"";
            let found = text.lines().find_map(|found| {
                let (name, value) = found.rsplit_once(' ')?;
                (name == line.replace("LABELS", labels)).then_some(value)
            });
            found.unwrap_or_else(|| panic!("{line}\n{text}")).parse::<f64>().unwrap()
        };
        let bucket =
            |bound: &str| value(&format!("rewake_page_fault_seconds_bucket{{le=\"{bound}\",LABELS}}"));
        let wanted = [2.0, 2.0, 6.0, 6.0, 6.0];
        assert_eq!(["0.000001024", "0.000002048", "0.000004096", "17.179869184", "+Inf"].map(bucket), wanted);
        assert_eq!(value("rewake_page_fault_seconds_count{LABELS}"), 6.0);
        assert_eq!(value("rewake_page_fault_seconds_sum{LABELS}"), 1e-5);
    }

    #[test]
    fn without_a_cache_no_metric_of_one_is_exported() {
        let text = Exposition { cache: None, ..example() }.text();
        assert!(!text.contains("rewake_cache") && !text.contains("rewake_store"), "{text}");
    }

    #[test]
    fn every_metric_is_documented_and_no_other() {
        let text = example().text();
        let (metrics, lines) = names(&text);
        let (_, docs) = DOCS.split_once(DOCS_HEADING).expect("a part on metrics");
        let docs = docs.split("\n## ").next().unwrap_or_default();
        for metric in &metrics {
            assert!(
                docs.contains(&format!("`{metric}`")) || docs.contains(&format!("`{metric}_")),
                "{metric}"
            );
        }
        for name in named(docs) {
            assert!(lines.contains(name) || metrics.contains(name), "docs/diagnose.md has {name}");
        }
    }

    #[test]
    fn the_dashboard_names_exported_metrics_only() {
        let text = example().text();
        let (_, lines) = names(&text);
        let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
        let panels = dashboard["panels"].as_array().unwrap().iter();
        let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
        let expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
        let named: BTreeSet<&str> = expressions.iter().flat_map(|expression| named(expression)).collect();
        assert!(named.len() > 10, "{named:?}");
        assert_eq!(named.difference(&lines).collect::<Vec<_>>(), Vec::<&&str>::new());
    }
}
