// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the metrics of a node agent.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, ensure};

const LIMIT: Duration = Duration::from_secs(10);

/// One scrape.
pub(super) struct Metrics(String);

impl Metrics {
    /// Asks the agent that serves metrics at an address.
    pub(super) fn scrape(address: &str) -> anyhow::Result<Self> {
        let ask = || {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(LIMIT))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = ask().with_context(|| format!("read http://{address}/metrics"))?;
        ensure!(answer.starts_with("HTTP/1.1 200 "), "http://{address}/metrics: {answer}");
        Ok(Self(answer))
    }

    /// The lines that begin with one of these.
    pub(super) fn lines(&self, beginnings: &[&str]) -> Vec<&str> {
        let is_it = |line: &&str| beginnings.iter().any(|beginning| line.starts_with(beginning));
        self.0.lines().filter(is_it).collect()
    }

    /// The sum of the values of lines that begin so.
    pub(super) fn sum(&self, beginning: &str) -> f64 {
        let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
        self.lines(&[beginning]).into_iter().filter_map(value).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_their_beginnings_and_added_up() {
        let metrics = Metrics("# TYPE a counter\na_total{x=\"1\"} 2\na_total{x=\"2\"} 3.5\nb 1\n".to_owned());
        assert_eq!(metrics.lines(&["a_total{x=\"1\"", "b"]), ["a_total{x=\"1\"} 2", "b 1"]);
        assert!((metrics.sum("a_total") - 5.5).abs() < 1e-9);
    }
}
