// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machines of the suite's tests: their differences, and the tests that depend on these.

use super::options::Series;

/// Tests by the beginning of their path, which ends where a part of the path does: a module, or one test of a
/// module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Named(&'static str);

impl Named {
    /// Whether a test is one of them.
    pub(super) fn has(self, test: &str) -> bool {
        test.strip_prefix(self.0).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    }
}

/// Which tests a machine runs.
#[derive(Debug)]
pub(super) enum Tests {
    /// Every test except these, which another machine runs.
    AllBut(&'static [&'static str]),
    /// These.
    Only(&'static [&'static str]),
}

impl Tests {
    /// Whether a test is one of them.
    pub(super) fn have(&self, test: &str) -> bool {
        let is_named = self.named().any(|named| named.has(test));
        match self {
            Self::AllBut(_) => !is_named,
            Self::Only(_) => is_named,
        }
    }

    /// Tests that must exist.
    pub(super) fn named(&self) -> impl Iterator<Item = Named> {
        let (Self::AllBut(named) | Self::Only(named)) = self;
        named.iter().copied().map(Named)
    }
}

/// One machine that tests run in.
#[derive(Debug)]
pub(super) struct Shape {
    /// Its name in tables and in `tests/expected-skips`.
    pub(super) name: &'static str,
    /// How it differs from the others.
    pub(super) why: &'static str,
    pub(super) series: Series,
    /// softgpu.ko's parameters.
    pub(super) module_arguments: &'static str,
    /// More words for the kernel's command line.
    pub(super) kernel_arguments: &'static str,
    pub(super) tests: Tests,
}

// A restore takes seconds in an emulated machine, so a test runs only where its result can differ, and on
// 6.12-90a if that is everywhere the same. Tests that restore servers (`gated`, `killed`, `streaming` and
// others) depend on neither kernel nor kind of GPU. Modules that only use the driver take seconds, and run on
// every kind of GPU that they support.

/// Tests that other machines run.
///
/// * `lazy_pages`, `modes`, `plugin_render`, `svm`: need kinds of memory that only the newer kernel has.
/// * `cpu_access`: 7-90a runs all, and 6.12-1100, which has this kernel, those that depend on it.
/// * `no_bpf_lsm`: needs the kernel of 7-no-bpf.
/// * `copy_engine`: 6.12-1100 has copies that take time, and 6.12-poison copies by the CPU.
/// * `plugin`: 7-90a runs all, and 6.12-poison, which has this kernel, those that depend on it.
/// * `stock_plugin`: 7-90a restores the same queues, and has memory with attributes.
const ELSEWHERE: &[&str] = &[
    "copy_engine",
    "lazy_pages",
    "modes",
    "plugin",
    "plugin_render",
    "stock_plugin",
    "svm",
    "cpu_access",
    "no_bpf_lsm",
];

/// Tests that depend on the kernel: its GPU driver, its userfaultfd, its hooks for calls. `both` runs on
/// this kernel in 7-xnack. `modes` restores every kind of memory, shared buffers too. `xccs` loads GPUs with
/// several compute dies itself.
const OF_THE_KERNEL: &[&str] = &[
    "bad_use",
    "criu::our_plugin_in_both_versions",
    "criu_ops",
    "dmabuf",
    "faults",
    "judge_reports",
    "fuzz",
    "ioctl_filter",
    "judge",
    "lazy_pages",
    "memory",
    "modes",
    "peers",
    "plugin",
    "plugin_render",
    "queues",
    "sdma",
    "stock_plugin",
    "svm",
    "topology",
    "cpu_access",
    "userptr",
    "xccs::a_dump_of_one_xcc_is_refused_and_the_program_continues",
    "xccs::in_cpx_mode_every_kernel_restores_queues",
];

/// Tests that depend on queues run by firmware, on memory that CPUs cannot access, and on slow copies.
///
/// * `plugin`: queues of such GPUs are refused, by ours at the dump already.
/// * `cpu_access`: mappings are swapped on this kernel, and copies take long enough for a page fault among
///   them.
/// * `workload`: one process and several, and work that is interrupted.
const OF_FIRMWARE_AND_SMALL_BAR: &[&str] = &[
    "copy_engine",
    "criu_ops",
    "memory",
    "peers",
    "plugin::one_gpu",
    "plugin::our_plugin_restores_the_stock_plugin_s_dump",
    "queues",
    "topology",
    "cpu_access::a_program_that_executes_another_or_ends_is_released",
    "cpu_access::by_its_own_code",
    "cpu_access::demand_loads_are_before_the_background_load",
    "cpu_access::mappings_may_change_while_their_buffer_is_missing",
    "workload::a_server_answers",
    "workload::a_server_answers_from_weights_that_the_cpu_cannot_access",
    "workload::a_server_answers_on_two_gpus_with_two_processes",
    "workload::a_server_answers_while_long_dispatches_run",
    "workload::a_server_answers_while_the_cpu_reads_weights",
];

/// Tests that depend on several compute dies in one GPU, and on other numbers of GPUs. `plugin`: such GPUs
/// are dumped, and their restore is refused, by both plugins.
const OF_SEVERAL_DIES: &[&str] = &[
    "criu_ops",
    "memory",
    "peers",
    "plugin::one_gpu",
    "plugin::our_plugin_restores_the_stock_plugin_s_dump",
    "plugin::the_stock_plugin_restores_our_dump",
    "plugin::two_processes_on_two_gpus",
    "queues",
    "svm",
    "topology",
    "workload::a_server_answers",
    "workload::a_server_answers_on_two_gpus_with_two_processes",
    "workload::a_server_answers_while_long_dispatches_run",
    "workload::a_server_answers_while_memory_with_attributes_changes",
];

/// Tests that depend on how contents are copied. `plugin`: by CPUs, where the stock plugin cannot; memory of
/// every kind whose contents the plugin copies.
const COPIERS: &[&str] = &[
    "copy_engine",
    "plugin::one_gpu",
    "plugin::our_plugin_restores_the_stock_plugin_s_dump",
    "plugin::two_processes_on_two_gpus",
    "plugin::weights_in_registered_memory",
    "plugin::weights_that_the_cpu_cannot_access",
    "plugin::while_buffers_are_allocated_and_freed",
    "plugin::while_numbers_change_in_host_memory",
    "plugin_contents",
];

/// Tests that depend on whether GPUs retry faults: of memory that GPUs reach without the driver's knowledge.
const RETRIED: &[&str] = &[
    "both::a_registration_of_missing_memory_waits_for_it",
    "both::gpu_memory_is_loaded_after_cpu_memory",
    "both::registered_memory_is_resident_before_queues_start",
    "lazy_pages",
];

/// Tests that depend on whether the filter can delay calls: gates stay closed until all memory is
/// resident.
const WITHOUT_BPF_LSM: &[&str] = &[
    "gated::a_dump_waits_for_a_closed_gate_and_past_its_limit_is_refused",
    "gated::rewake_restore_reports_the_result_after_any_death",
    "no_bpf_lsm",
];

const SHAPE: Shape = Shape {
    name: "",
    why: "",
    series: Series::Linux6_12,
    module_arguments: "gpus=2 gfx=90a xgmi=1",
    kernel_arguments: "",
    tests: Tests::Only(&[]),
};

/// The suite's machines. Each test runs on one of them at least, or the suite fails.
pub(super) const SHAPES: [Shape; 7] = [
    Shape {
        name: "6.12-90a",
        why: "Debian 13's kernel; GPUs whose queues every kernel restores",
        tests: Tests::AllBut(ELSEWHERE),
        ..SHAPE
    },
    Shape {
        name: "7-90a",
        why: "Debian sid's kernel: memory with attributes, render nodes that report their buffers",
        series: Series::Linux7,
        tests: Tests::Only(OF_THE_KERNEL),
        ..SHAPE
    },
    Shape {
        name: "6.12-1100",
        why: "queues that firmware runs and that cannot be restored; memory that CPUs cannot access; slow \
            copies",
        module_arguments: "gpus=2 gfx=1100 small_bar=1 fresh=zero copy_mbps=100",
        tests: Tests::Only(OF_FIRMWARE_AND_SMALL_BAR),
        ..SHAPE
    },
    Shape {
        name: "7-942",
        why: "several compute dies in a GPU, whose queues this kernel does not restore; other numbers of \
            GPUs",
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=942 xnack=1 seed=7",
        tests: Tests::Only(OF_SEVERAL_DIES),
        ..SHAPE
    },
    Shape {
        name: "6.12-poison",
        why: "no copy rings, so that CPUs copy; fresh memory that is not zero",
        module_arguments: "gpus=2 gfx=90a xgmi=1 sdma_rings=0 fresh=poison",
        tests: Tests::Only(COPIERS),
        ..SHAPE
    },
    Shape {
        name: "7-xnack",
        why: "GPUs that retry faults and whose queues are restored",
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=90a xgmi=1 xnack=1",
        // As on real machines; the others go without (see `machine.rs`).
        kernel_arguments: "sysctl.kernel.randomize_va_space=2",
        tests: Tests::Only(RETRIED),
    },
    Shape {
        name: "7-no-bpf",
        why: "a kernel without BPF LSM, so that no call is delayed",
        series: Series::Linux7,
        kernel_arguments: "lsm=capability,yama",
        tests: Tests::Only(WITHOUT_BPF_LSM),
        ..SHAPE
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_runs_all_but_some_or_only_some() {
        assert!(Tests::AllBut(&["a"]).have("b::x") && !Tests::AllBut(&["a"]).have("a::x"));
        assert!(Tests::Only(&["a"]).have("a::x") && !Tests::Only(&["a"]).have("ab::x"));
        assert!(Tests::Only(&["a::x"]).have("a::x") && !Tests::Only(&["a::x"]).have("a::y"));
    }

    #[test]
    fn machines_have_names_of_their_own_and_say_why_they_exist() {
        for (number, shape) in SHAPES.iter().enumerate() {
            assert!(!shape.why.is_empty() && !shape.name.is_empty());
            assert!(SHAPES[..number].iter().all(|other| other.name != shape.name), "{}", shape.name);
        }
    }
}
