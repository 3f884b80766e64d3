// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps the events that took longest, in bounded memory.

/// The most events: a user looks at no more; 10 KiB.
const MOST: usize = 256;

/// The longest of all events, in the order of their arrival.
#[derive(Debug)]
pub(super) struct Longest<T> {
    kept: Vec<(u64, T)>,
    /// The shortest that is kept: when full, a new one must be longer.
    shortest: u64,
}

impl<T> Default for Longest<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), shortest: 0 }
    }
}

impl<T: Copy> Longest<T> {
    /// Adds an event that took this long.
    pub(super) fn push(&mut self, took: u64, one: T) {
        if self.kept.len() >= MOST {
            if took <= self.shortest {
                return;
            }
            if let Some(shortest) = self.kept.iter().position(|(took, _)| *took == self.shortest) {
                self.kept.remove(shortest);
            }
        }
        self.kept.push((took, one));
        self.shortest = self.kept.iter().map(|(took, _)| *took).min().unwrap_or_default();
    }

    /// Returns the events that are kept.
    pub(super) fn all(&self) -> Vec<T> {
        self.kept.iter().map(|(_, one)| *one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_stay_in_their_order() {
        let mut longest = Longest::default();
        // 0, 7, 14, ... 993, 1, 8, ...: each number below 1000 once.
        for number in (0..1000_u64).map(|number| number * 7 % 1000) {
            longest.push(number, number);
        }
        let wanted: Vec<u64> =
            (0..1000).map(|number| number * 7 % 1000).filter(|took| *took >= 744).collect();
        assert_eq!(longest.all(), wanted);
        assert_eq!(wanted.len(), MOST);
    }

    #[test]
    fn of_equals_the_first_stay() {
        let mut longest = Longest::default();
        (0..1000).for_each(|number| longest.push(5, number));
        assert_eq!(longest.all(), (0..256).collect::<Vec<_>>());
    }
}
