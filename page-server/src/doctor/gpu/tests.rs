// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests which facts about GPUs lead to which verdicts.

use rewake_amdgpu_uapi::criu::queues::Release;

use super::super::CheckVerdict;
use super::*;

fn gfx(major: u32, minor: u32, step: u32) -> GfxVersion {
    GfxVersion { major, minor, step }
}

fn by_rings(memory: StagingMemory) -> CopyPath {
    CopyPath::Rings { rings: 2, version: (4, 4), memory, reason: None }
}

fn best() -> CopyMethod {
    CopyMethod { path: by_rings(StagingMemory::Pages), has_event: true }
}

fn gpu(gpu_id: u32, gfx: GfxVersion) -> Gpu {
    gpu_on(Release::new(6, 12, 48), gpu_id, gfx, 1)
}

/// A GPU with `xccs` XCCs and the driver of this kernel.
fn gpu_on(release: Release, gpu_id: u32, gfx: GfxVersion, xccs: u64) -> Gpu {
    let queues = QueueSupport::of(gfx, xccs, Some(release));
    Gpu { gpu_id, gfx, xccs, queues, vram: 64 << 30, minor: 128, copies: Ok(best()) }
}

/// The facts about a machine without any fault.
fn good() -> Facts {
    Facts {
        version: Ok((1, 17)),
        gpus: Ok(vec![gpu(0x1234, gfx(9, 0, 10))]),
        capabilities: CAPABILITIES,
        initial_user_namespace: true,
        switched_off: Ok(Vec::new()),
        call_hold: Ok(()),
        plugin: PluginFolders { found: Some("/opt/rewake".into()), ..PluginFolders::default() },
    }
}

/// Returns the one check that is not ok, or the last one if all are.
fn odd(facts: &Facts) -> Check {
    let mut checks = verdicts(Some(facts));
    let (bad, good): (Vec<_>, Vec<_>) = checks.drain(..).partition(|check| check.verdict != CheckVerdict::Ok);
    assert!(bad.len() <= 1, "{bad:?}");
    bad.into_iter().chain(good.into_iter().rev()).next().unwrap()
}

fn outcome(facts: &Facts) -> (&'static str, CheckVerdict) {
    let check = odd(facts);
    (check.name, check.verdict)
}

fn with_plugin(plugin: PluginFolders) -> Facts {
    Facts { plugin, ..good() }
}

fn with_copies(copies: Result<CopyMethod, String>) -> Facts {
    Facts { gpus: Ok(vec![gpu(1, gfx(9, 0, 10)), Gpu { copies, ..gpu(2, gfx(9, 0, 10)) }]), ..good() }
}

#[test]
fn a_machine_without_a_gpu_has_one_line_and_nothing_is_wrong() {
    let checks = verdicts(None);
    assert_eq!(checks, [Check::info("gpu", "no AMD GPU: CPU memory only")]);
}

#[test]
fn a_good_machine_passes_every_check() {
    let checks = verdicts(Some(&good()));
    let names: Vec<_> = checks.iter().map(|check| check.name).collect();
    let all = [
        "gpu",
        "gpu privilege",
        "gpu topology",
        "gpu queues",
        "gpu copies",
        "gpu registered memory",
        "gpu checks",
        "gpu plugin",
    ];
    assert_eq!(names, all);
    assert!(checks.iter().all(|check| check.verdict == CheckVerdict::Ok), "{checks:?}");
    assert_eq!(checks[2].found, "0x1234 gfx90a 64.0 GiB, renderD128");
}

#[test]
fn a_driver_that_is_too_old_or_cannot_be_opened_fails() {
    assert_eq!(outcome(&Facts { version: Ok((1, 8)), ..good() }).1, CheckVerdict::Ok);
    assert_eq!(outcome(&Facts { version: Ok((1, 7)), ..good() }), ("gpu", CheckVerdict::Failed));
    let unusable = odd(&Facts { version: Err("open /dev/kfd: EACCES".into()), ..good() });
    assert_eq!((unusable.name, unusable.verdict), ("gpu", CheckVerdict::Failed));
    assert!(unusable.found.contains("EACCES"), "{unusable:?}");
}

#[test]
fn one_capability_in_the_initial_user_namespace_is_needed() {
    for capability in [1 << 21, 1 << 40] {
        assert_eq!(outcome(&Facts { capabilities: capability, ..good() }).1, CheckVerdict::Ok);
    }
    let failed = ("gpu privilege", CheckVerdict::Failed);
    assert_eq!(outcome(&Facts { capabilities: !CAPABILITIES, ..good() }), failed);
    let inside = odd(&Facts { initial_user_namespace: false, ..good() });
    assert_eq!((inside.name, inside.verdict), failed);
    assert!(inside.found.contains("user namespace"), "{inside:?}");
}

#[test]
fn a_topology_that_cannot_be_read_or_is_empty_fails() {
    let failed = ("gpu topology", CheckVerdict::Failed);
    assert_eq!(outcome(&Facts { gpus: Err("generation_id: no number".into()), ..good() }), failed);
    assert_eq!(outcome(&Facts { gpus: Ok(Vec::new()), ..good() }), failed);
}

#[test]
fn gpus_whose_queues_cannot_be_restored_are_named_with_the_reason() {
    for (gpus, reason) in [
        (vec![gpu(0x11, gfx(11, 0, 0))], "the queues of 0x11 (gfx1100) are run by firmware (MES)"),
        (vec![gpu(0x12, gfx(12, 0, 1))], "the queues of 0x12 (gfx1201) are run by firmware (MES)"),
        (
            vec![gpu_on(Release::new(6, 12, 48), 0x94, gfx(9, 4, 2), 8)],
            "the queues of 0x94 (gfx942) are spread over 8 XCCs, of which this kernel saves one",
        ),
        (
            vec![gpu_on(Release::new(7, 2, 13), 0x94, gfx(9, 4, 2), 8)],
            "the queues of 0x94 (gfx942) are spread over 8 XCCs, and this kernel saves their state and \
             refuses",
        ),
    ] {
        let check = odd(&Facts { gpus: Ok(gpus), ..good() });
        assert_eq!((check.name, check.verdict), ("gpu queues", CheckVerdict::Warning));
        assert!(check.found.contains(reason), "{check:?}");
        let kernels = "6.16.4 to 6.18.41 and 6.19 to 7.1.5";
        assert_eq!(check.advice.unwrap().contains(kernels), reason.contains("XCC"), "{reason}");
    }
    for kind in [
        gpu_on(Release::new(6, 18, 41), 1, gfx(9, 4, 2), 8),
        gpu_on(Release::new(7, 2, 13), 1, gfx(9, 4, 2), 1),
    ] {
        assert_eq!(outcome(&Facts { gpus: Ok(vec![kind]), ..good() }).1, CheckVerdict::Ok);
    }
    let both = vec![gpu(1, gfx(11, 0, 0)), gpu(2, gfx(10, 3, 0))];
    let check = odd(&Facts { gpus: Ok(both), ..good() });
    assert!(check.found.contains("0x1 (gfx1100)") && !check.found.contains("0x2"), "{check:?}");
}

#[test]
fn copies_on_a_slower_path_are_a_warning_with_what_is_missing() {
    let by_cpu = CopyPath::Cpu { reason: "no ring".into() };
    for (path, found, advised) in
        [(by_cpu, "by the CPU (no ring)", "copy ring"), (by_rings(StagingMemory::Gtt), "GTT", "udmabuf")]
    {
        let check = odd(&with_copies(Ok(CopyMethod { path, has_event: true })));
        assert_eq!((check.name, check.verdict), ("gpu copies", CheckVerdict::Warning));
        assert!(check.found.contains("0x2: ") && check.found.contains(found), "{check:?}");
        let advice = check.advice.unwrap();
        assert!(advice.contains(advised) && !advice.contains("6.6"), "{advice}");
    }
    let check = odd(&with_copies(Ok(CopyMethod { has_event: false, ..best() })));
    let advice = check.advice.unwrap();
    assert!(advice.contains("6.6") && !advice.contains("udmabuf"), "{advice}");
}

#[test]
fn a_render_node_that_cannot_be_used_fails() {
    let check = odd(&with_copies(Err("EACCES".into())));
    assert_eq!((check.name, check.verdict), ("gpu copies", CheckVerdict::Failed));
    assert!(check.found.contains("0x2: renderD128: EACCES"), "{check:?}");
}

#[test]
fn a_kernel_that_cannot_hold_calls_is_a_warning() {
    let without = odd(&Facts { call_hold: Err("no bpf".into()), ..good() });
    assert_eq!((without.name, without.verdict), ("gpu registered memory", CheckVerdict::Warning));
}

#[test]
fn checks_that_are_switched_off_are_named_and_wrong_values_fail() {
    let off = odd(&Facts { switched_off: Ok(vec!["KFD_NUMA_CHECK"]), ..good() });
    assert_eq!((off.name, off.verdict), ("gpu checks", CheckVerdict::Info));
    assert!(off.found.contains("KFD_NUMA_CHECK"), "{off:?}");
    let wrong = Facts { switched_off: Err("KFD_NUMA_CHECK=2: expected 0, NO, 1 or YES".into()), ..good() };
    assert_eq!(outcome(&wrong), ("gpu checks", CheckVerdict::Failed));
}

#[test]
fn the_plugin_is_ours_or_crius_or_missing() {
    let (ours, stock): (PathBuf, PathBuf) = ("/opt/rewake".into(), "/usr/lib/criu/".into());
    let both =
        odd(&with_plugin(PluginFolders { found: Some(ours), stock: Some(stock.clone()), variable: None }));
    assert_eq!((both.name, both.verdict), ("gpu plugin", CheckVerdict::Info));
    assert!(both.found.contains("/opt/rewake; CRIU without --libdir"), "{both:?}");
    // The variable names CRIU's own folder: both are one.
    let one = PluginFolders {
        found: Some("/usr/lib/criu".into()),
        stock: Some(stock.clone()),
        variable: Some(stock.clone()),
    };
    assert_eq!(outcome(&with_plugin(one)).1, CheckVerdict::Ok);
    let only_stock = PluginFolders { stock: Some(stock.clone()), ..PluginFolders::default() };
    assert_eq!(outcome(&with_plugin(only_stock)), ("gpu plugin", CheckVerdict::Warning));
    assert_eq!(outcome(&with_plugin(PluginFolders::default())), ("gpu plugin", CheckVerdict::Failed));
    let elsewhere =
        odd(&with_plugin(PluginFolders { variable: Some("/x".into()), stock: Some(stock), found: None }));
    assert_eq!((elsewhere.name, elsewhere.verdict), ("gpu plugin", CheckVerdict::Failed));
    assert!(elsewhere.found.contains("CRIU_LIBS_DIR is /x"), "{elsewhere:?}");
}
