// SPDX-License-Identifier: MIT OR Apache-2.0
//! A committed list that a run is compared with: lines below the name of a machine.

use std::collections::BTreeMap;

use anyhow::Context as _;

use crate::{files, repository};

/// By machine and name.
#[derive(Debug)]
pub(super) struct List<T> {
    machines: BTreeMap<String, BTreeMap<String, T>>,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { machines: BTreeMap::new() }
    }
}

impl<T> List<T> {
    /// The repository's list in a file; `entry` reads a line.
    ///
    /// # Errors
    /// It cannot be read, or a line makes no sense.
    pub(super) fn read(file: &str, entry: fn(&str) -> anyhow::Result<(String, T)>) -> anyhow::Result<Self> {
        Self::parse(file, &files::read(repository::root().join(file))?, entry)
    }

    pub(super) fn parse(
        file: &str,
        text: &str,
        entry: fn(&str) -> anyhow::Result<(String, T)>,
    ) -> anyhow::Result<Self> {
        let mut list = Self::default();
        let mut machine = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                machine = Some(list.machines.entry(name.to_owned()).or_default());
                continue;
            }
            let place = || format!("{file}:{}", number + 1);
            let (name, value) = entry(line).with_context(place)?;
            machine.as_mut().context("no `[MACHINE]` before it").with_context(place)?.insert(name, value);
        }
        Ok(list)
    }

    /// Machines that the file names.
    pub(super) fn machines(&self) -> impl Iterator<Item = &str> {
        self.machines.keys().map(String::as_str)
    }

    /// The lines of a machine.
    pub(super) fn of(&self, machine: &str) -> impl Iterator<Item = (&String, &T)> {
        self.machines.get(machine).into_iter().flatten()
    }

    /// The line of that name.
    pub(super) fn get(&self, machine: &str, name: &str) -> Option<&T> {
        self.machines.get(machine)?.get(name)
    }
}
