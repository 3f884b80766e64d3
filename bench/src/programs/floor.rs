// SPDX-License-Identifier: MIT OR Apache-2.0
//! The floor of a first answer: the program runs as soon as stock restores it, and answers as if all of its memory were
//! resident. How near to it rewake comes.

use super::round::{Sample, Way};
use crate::report::{Spread, spread};

pub(super) const HEADING: &str = "\
### first right answer and its floor, s

Floor: the time after which stock's `criu restore` returns, and then that of the same answer when all memory is
resident, after an eager restore. Gap closed: the share of stock's time above the floor that rewake saves.

| program, image | floor | stock | rewake | gap closed |
|---|---|---|---|---|
";

/// The first answers of one round, in seconds.
#[derive(Debug, Clone, Copy)]
struct FirstAnswers {
    floor: f64,
    stock: f64,
    rewake: f64,
}

impl FirstAnswers {
    /// None where stock itself reached the floor.
    fn gap_closed(self) -> Option<f64> {
        let gap = self.stock - self.floor;
        (gap > 0.0).then(|| (self.stock - self.rewake) / gap)
    }
}

/// The cells of samples of one program in one state; none if no round was restored in every way.
pub(super) fn row(samples: &[Sample]) -> Option<String> {
    let rounds: Vec<FirstAnswers> = rounds(samples).collect();
    let of = |value: fn(&FirstAnswers) -> f64| spread(Spread::of(rounds.iter().map(value).collect()));
    let closed = Spread::of(rounds.iter().copied().filter_map(FirstAnswers::gap_closed).collect());
    let cells = [of(|round| round.floor), of(|round| round.stock), of(|round| round.rewake), spread(closed)];
    (!rounds.is_empty()).then(|| cells.join(" | "))
}

fn rounds(samples: &[Sample]) -> impl Iterator<Item = FirstAnswers> {
    samples.iter().filter(|sample| sample.way == Way::Stock).filter_map(|stock| {
        let other = |way| samples.iter().find(|other| other.way == way && other.round == stock.round);
        let (eager, rewake) = (other(Way::Eager)?, other(Way::Rewake)?);
        Some(FirstAnswers {
            floor: stock.figures.returned_s + eager.figures.first_repeated_s,
            stock: stock.figures.answered_s,
            rewake: rewake.figures.answered_s,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::sample;
    use super::*;
    use crate::programs::round::ImageState::Warm;

    #[test]
    fn the_gap_is_that_of_each_round_between_stock_and_the_floor() {
        // The floor is 0.25 s, when `criu restore` returns, and 0.5 s for the answer.
        let samples = [
            sample(Way::Eager, Warm, 1, 3.0),
            sample(Way::Stock, Warm, 1, 4.75),
            sample(Way::Rewake, Warm, 1, 1.75),
            sample(Way::Rewake, Warm, 2, 2.75),
            sample(Way::Stock, Warm, 2, 2.75),
            sample(Way::Eager, Warm, 2, 3.0),
        ];
        let expected = "0.750 (0.750 .. 0.750) | 3.75 (2.75 .. 4.75) | 2.25 (1.75 .. 2.75) | \
                        0.375 (0 .. 0.750)";
        assert_eq!(row(&samples).as_deref(), Some(expected));
    }

    #[test]
    fn a_round_that_lacks_a_way_has_no_floor_and_stock_at_the_floor_has_no_gap() {
        let mut samples = vec![sample(Way::Stock, Warm, 1, 0.5), sample(Way::Rewake, Warm, 1, 0.5)];
        assert_eq!(row(&samples), None);
        samples.push(sample(Way::Eager, Warm, 1, 3.0));
        assert!(row(&samples).unwrap().ends_with(" | -"), "{samples:?}");
    }
}
