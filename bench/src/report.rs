// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes tables from samples: the spread of a figure, the ratio pair by pair, and what is wanted.

use std::fmt::{self, Write as _};

pub(crate) const MIB: f64 = (1 << 20) as f64;

/// One compared figure of samples `S`.
pub(crate) struct Figure<S> {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// Which direction is good; none where neither is.
    pub(crate) better: Option<Better>,
    pub(crate) value: fn(&S) -> Option<f64>,
}

/// Which of two values of a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Lower,
    Higher,
}

/// Smallest, middle and largest of some values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// None for no values. The median of an even number is the mean of the middle two.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { min, median: f64::midpoint(low, high), max })
    }

    /// The values as shares of `whole`.
    pub(crate) fn of_whole(self, whole: f64) -> Self {
        Self { min: self.min / whole, median: self.median / whole, max: self.max / whole }
    }
}

impl<S> Figure<S> {
    /// The cell of these samples.
    pub(crate) fn cell<'a>(&self, samples: impl Iterator<Item = &'a S>) -> String
    where
        S: 'a,
    {
        spread(Spread::of(samples.filter_map(self.value)))
    }

    /// How many times better the second of each pair is than the first. Both ran in one round, so that a
    /// machine that slows down in time slows both.
    pub(crate) fn gain<'a>(&self, pairs: impl Iterator<Item = (&'a S, &'a S)>) -> String
    where
        S: 'a,
    {
        let ratio = |(first, second): (&S, &S)| {
            let (first, second) = ((self.value)(first)?, (self.value)(second)?);
            let ratio = if self.better? == Better::Lower { first / second } else { second / first };
            ratio.is_finite().then_some(ratio)
        };
        spread(Spread::of(pairs.filter_map(ratio)))
    }
}

/// The required value of a figure's median.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Wanted {
    AtLeast(f64),
    AtMost(f64),
    Nothing,
}

impl Wanted {
    /// What is wanted, and whether it is met. A figure without samples is not.
    pub(crate) fn cells(self, figure: Option<Spread>) -> [String; 2] {
        let median = figure.map_or(f64::NAN, |figure| figure.median);
        let (text, is_met) = match self {
            Self::AtLeast(value) => (format!("at least {}", number(value)), median >= value),
            Self::AtMost(value) => (format!("at most {}", number(value)), median <= value),
            Self::Nothing => return [String::new(), String::new()],
        };
        [text, if is_met { "yes" } else { "**MISSED**" }.to_owned()]
    }
}

/// A table in Markdown, for a terminal and for a page.
#[derive(Debug)]
pub(crate) struct Table(String);

/// A column: its heading, and its value of a sample.
pub(crate) type Column<'a, S> = (&'static str, &'a dyn Fn(&S) -> Option<f64>);

impl Table {
    pub(crate) fn new(heads: &[&str]) -> Self {
        Self(format!("| {} |\n|{}\n", heads.join(" | "), "---|".repeat(heads.len())))
    }

    /// A table of spreads: a row is of some samples.
    pub(crate) fn of<S>(first: &str, columns: &[Column<'_, S>]) -> Self {
        Self::new(&[&[first], &heads(columns)[..]].concat())
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        let _ = writeln!(self.0, "| {} |", cells.join(" | "));
    }

    /// A row of [`Table::of`], with the medians of samples.
    pub(crate) fn spreads<'a, S: 'a>(
        &mut self,
        name: String,
        samples: impl Iterator<Item = &'a S>,
        columns: &[Column<'_, S>],
    ) {
        self.row(&[vec![name], cells(samples, columns)].concat());
    }

    /// A row of a figure with what is wanted of it.
    pub(crate) fn wanted(&mut self, name: &str, figure: Option<Spread>, wanted: Wanted) {
        let [text, met] = wanted.cells(figure);
        self.row(&[name.to_owned(), spread(figure), text, met]);
    }
}

pub(crate) fn heads<S>(columns: &[Column<'_, S>]) -> Vec<&'static str> {
    columns.iter().map(|(head, _)| *head).collect()
}

/// The spreads of samples, one for each column.
pub(crate) fn cells<'a, S: 'a>(
    samples: impl Iterator<Item = &'a S>,
    columns: &[Column<'_, S>],
) -> Vec<String> {
    let samples: Vec<&S> = samples.collect();
    let cell = |(_, value): &Column<'_, S>| spread(Spread::of(samples.iter().copied().filter_map(*value)));
    columns.iter().map(cell).collect()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `median (min .. max)`, or a dash.
pub(crate) fn spread(spread: Option<Spread>) -> String {
    let Some(Spread { min, median, max }) = spread else { return "-".to_owned() };
    format!("{} ({} .. {})", number(median), number(min), number(max))
}

/// Three significant digits; whole numbers from 100 on.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size == 0.0 || size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_middle_value() {
        let spread = |min, median, max| Some(Spread { min, median, max });
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), spread(1.0, 2.0, 3.0));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]), spread(1.0, 2.5, 4.0));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn a_gain_is_taken_pair_by_pair_and_above_one_is_better() {
        let figure = |better| Figure { name: "", unit: "", better, value: |value: &f64| Some(*value) };
        let pairs = || [(&8.0, &2.0), (&6.0, &3.0), (&1.0, &0.0)].into_iter();
        assert_eq!(figure(Some(Better::Lower)).gain(pairs()), "3.00 (2.00 .. 4.00)");
        assert_eq!(figure(Some(Better::Higher)).gain(pairs()), "0.250 (0 .. 0.500)");
        assert_eq!(figure(None).gain(pairs()), "-");
        assert_eq!(figure(Some(Better::Lower)).gain(std::iter::empty()), "-");
    }

    #[test]
    fn a_missed_or_unmeasured_figure_is_marked() {
        let cells = |wanted: Wanted, value| wanted.cells(Spread::of(value)).join(" | ");
        assert_eq!(cells(Wanted::AtLeast(0.9), Some(0.95)), "at least 0.900 | yes");
        assert_eq!(cells(Wanted::AtLeast(0.9), Some(0.85)), "at least 0.900 | **MISSED**");
        assert_eq!(cells(Wanted::AtMost(5.0), Some(5.0)), "at most 5.00 | yes");
        assert_eq!(cells(Wanted::AtMost(5.0), None), "at most 5.00 | **MISSED**");
        assert_eq!(cells(Wanted::Nothing, None), " | ");
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let shown = [0.01234, 0.5, 1.239, 12.34, 123.4, 123_456.0, 0.0].map(number);
        assert_eq!(shown, ["0.012", "0.500", "1.24", "12.3", "123", "123456", "0"]);
    }
}
