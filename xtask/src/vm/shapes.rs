// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machines that the suite's tests run in: what differs on each, and which test programs depend on that.

use super::options::Series;

/// Which test programs a machine runs.
#[derive(Debug)]
pub(super) enum Programs {
    /// Every one but these, which another machine runs.
    AllBut(&'static [&'static str]),
    /// These.
    Only(&'static [&'static str]),
}

impl Programs {
    /// Whether a program is one of them.
    pub(super) fn have(&self, program: &str) -> bool {
        match self {
            Self::AllBut(others) => !others.contains(&program),
            Self::Only(these) => these.contains(&program),
        }
    }

    /// Those that have to exist.
    pub(super) fn named(&self) -> &'static [&'static str] {
        match self {
            Self::AllBut(named) | Self::Only(named) => named,
        }
    }
}

/// One machine that tests run in.
#[derive(Debug)]
pub(super) struct Shape {
    /// Its name in tables and in `tests/expected-skips`.
    pub(super) name: &'static str,
    /// What differs on it.
    pub(super) why: &'static str,
    pub(super) series: Series,
    /// softgpu.ko's parameters.
    pub(super) module_arguments: &'static str,
    /// More words for the kernel's command line.
    pub(super) kernel_arguments: &'static str,
    pub(super) programs: Programs,
}

/// What copies contents, for machines that differ in nothing else.
const COPIERS: &[&str] = &["copy_engine", "plugin", "plugin_contents"];

/// What depends on whether GPUs retry faults: only this family's queues are restored by a kernel that knows such processes.
const RETRIED: &[&str] = &["both", "lazy_pages"];

/// What depends on whether calls are held.
const UNHELD: &[&str] = &["unheld", "gated"];

const WHOLE: Shape = Shape {
    name: "",
    why: "",
    series: Series::Linux6_12,
    module_arguments: "gpus=2 gfx=90a xgmi=1",
    kernel_arguments: "",
    programs: Programs::AllBut(&[]),
};

/// The suite's machines. Each test runs on one of them at least.
pub(super) const SHAPES: [Shape; 7] = [
    Shape { name: "6.12-90a", why: "", ..WHOLE },
    Shape { name: "7-90a", series: Series::Linux7, ..WHOLE },
    Shape {
        name: "6.12-1100",
        module_arguments: "gpus=2 gfx=1100 small_bar=1 fresh=zero copy_mbps=100",
        ..WHOLE
    },
    Shape {
        name: "7-942",
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=942 xnack=1 seed=7",
        ..WHOLE
    },
    Shape {
        name: "6.12-poison",
        module_arguments: "gpus=2 gfx=90a xgmi=1 sdma_rings=0 fresh=poison",
        programs: Programs::Only(COPIERS),
        ..WHOLE
    },
    Shape {
        name: "7-xnack",
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=90a xgmi=1 xnack=1",
        programs: Programs::Only(RETRIED),
        ..WHOLE
    },
    Shape {
        name: "7-unheld",
        series: Series::Linux7,
        kernel_arguments: "lsm=capability,yama",
        programs: Programs::Only(UNHELD),
        ..WHOLE
    },
];
