// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of the scene's restores as one table, and what they must show.

use std::fmt;
use std::time::Duration;

/// How many times sooner a process runs on demand, at least.
const SOONER: f64 = 2.0;
/// All is resident on demand after this share of the eager time, at most.
const LATER: f64 = 1.1;

/// One restore; times are since its command was started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figures {
    /// The process answers a request that needs no GPU.
    pub(super) runs: Duration,
    /// It has generated another token of the unfinished answer.
    pub(super) token: Duration,
    /// All its memory is resident.
    pub(super) resident: Duration,
    /// Bytes that were moved to the GPU.
    pub(super) moved: u64,
}

/// Both kinds of restores.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) eager: Vec<Figures>,
    pub(super) on_demand: Vec<Figures>,
}

/// Why the figures do not show what they must.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shortfall(String);

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "on demand did not show its point in this run: {}", self.0)
    }
}

impl Comparison {
    /// Each figure as the mean of its restores.
    pub(super) fn table(&self) -> String {
        let mut table = format!("{:22}{:>12}{:>12}{:>12}\n", "", "eager", "on demand", "ratio");
        let mut row = |name: &str, unit: &str, of: &dyn Fn(&Figures) -> f64| {
            let (eager, on_demand) = (mean(&self.eager, of), mean(&self.on_demand, of));
            let ratio = on_demand / eager;
            let cells = [eager, on_demand].map(|value| format!("{value:.2} {unit}"));
            table += &format!("{name:22}{:>12}{:>12}{ratio:>12.2}\n", cells[0], cells[1]);
        };
        row("runs after", "s", &runs);
        row("first token after", "s", &|figures| figures.token.as_secs_f64());
        row("all resident after", "s", &resident);
        #[expect(clippy::cast_precision_loss, reason = "far less than 2^53")]
        row("GPU memory moved", "MB", &|figures| figures.moved as f64 / 1e6);
        table
    }

    /// The first requirement that they miss.
    pub(super) fn verdict(&self) -> Result<(), Shortfall> {
        let sooner = mean(&self.eager, runs) / mean(&self.on_demand, runs);
        if sooner < SOONER {
            return Err(Shortfall(format!(
                "the process ran {sooner:.2} times sooner than eagerly, expected {SOONER} times"
            )));
        }
        let later = mean(&self.on_demand, resident) / mean(&self.eager, resident);
        if later > LATER {
            return Err(Shortfall(format!(
                "all memory was resident after {later:.2} times the eager time, expected {LATER} times at \
                 most"
            )));
        }
        Ok(())
    }
}

fn runs(figures: &Figures) -> f64 {
    figures.runs.as_secs_f64()
}

fn resident(figures: &Figures) -> f64 {
    figures.resident.as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "a handful of restores")]
fn mean(all: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    all.iter().map(of).sum::<f64>() / all.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(runs: u64, token: u64, resident: u64) -> Figures {
        let [runs, token, resident] = [runs, token, resident].map(Duration::from_millis);
        Figures { runs, token, resident, moved: 142_000_000 }
    }

    fn comparison(runs: u64, resident: u64) -> Comparison {
        Comparison {
            eager: vec![figures(8000, 9000, 8000), figures(10_000, 11_000, 10_000)],
            on_demand: vec![figures(runs, 10_500, resident)],
        }
    }

    #[test]
    fn the_table_has_means_side_by_side_with_their_ratio() {
        let table = comparison(3000, 9450).table();
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["eager", "on", "demand", "ratio"]);
        assert_eq!(lines[1], ["runs", "after", "9.00", "s", "3.00", "s", "0.33"]);
        assert_eq!(lines[2], ["first", "token", "after", "10.00", "s", "10.50", "s", "1.05"]);
        assert_eq!(lines[3], ["all", "resident", "after", "9.00", "s", "9.45", "s", "1.05"]);
        assert_eq!(lines[4], ["GPU", "memory", "moved", "142.00", "MB", "142.00", "MB", "1.00"]);
        let width = table.lines().next().unwrap().len();
        assert!(table.lines().all(|line| line.len() == width), "{table}");
    }

    #[test]
    fn twice_as_soon_and_hardly_later_is_enough() {
        assert_eq!(comparison(4500, 9890).verdict(), Ok(()));
    }

    #[test]
    fn a_process_that_runs_too_late_is_said() {
        let shortfall = comparison(4600, 9000).verdict().unwrap_err().to_string();
        assert!(shortfall.contains("ran 1.96 times sooner than eagerly, expected 2 times"), "{shortfall}");
    }

    #[test]
    fn memory_that_is_resident_too_late_is_said() {
        let shortfall = comparison(1000, 9950).verdict().unwrap_err().to_string();
        assert!(shortfall.contains("after 1.11 times the eager time, expected 1.1 times"), "{shortfall}");
    }
}
