// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues of MI300, whose compute dies (XCCs) work on a queue together (SPX mode), or are a GPU each (CPX
//! mode). What kernels do with such queues is in [`QueueSupport`].

use std::path::Path;

use rewake_amdgpu_uapi::criu::queues::QueueSupport;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::dumped::dies;
use softgpu_tests::server::small;
use softgpu_tests::{Judge, Machine, REAL_GPUS, Server, isolated};

const SPX: [(&str, &str); 3] = [("gfx", "942"), ("xgmi", "0"), ("xccs", "8")];
const CPX: [(&str, &str); 3] = [("gfx", "942"), ("xgmi", "0"), ("xccs", "1")];

fn support() -> QueueSupport {
    QueueSupport::here(Topology::read().unwrap().gpus().next().unwrap())
}

fn criu(plugin: Plugin, folder: &Path) -> Criu {
    Criu::with(plugin, Version::V4_2, &folder.join("images")).unwrap()
}

#[test]
fn in_cpx_mode_every_kernel_restores_queues() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&CPX), REAL_GPUS);
        assert_eq!(support(), QueueSupport::Restored);
        let folder = tempfile::tempdir().unwrap();
        let (ours, mut server) = (criu(Plugin::Ours, folder.path()), Server::start(&small(), folder.path()));
        ours.dump(server.pid).unwrap();
        server.was_dumped(&ours);
        ours.restore().unwrap();
        server.ends_well();
    });
}

#[test]
fn a_dump_of_one_xcc_is_refused_and_the_program_continues() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&SPX), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let (ours, mut server) = (criu(Plugin::Ours, folder.path()), Server::start(&small(), folder.path()));
        let dumped = ours.dump(server.pid);
        if support() == QueueSupport::FirstXccSaved {
            let error = dumped.unwrap_err().to_string();
            assert!(
                error.contains("this kernel saves the state of one: restored, they would never run"),
                "{error}"
            );
            return server.ends_well();
        }
        // The image is whole, so that another kernel can restore it.
        dumped.unwrap();
        server.was_dumped(&ours);
        assert!(ours.log("dump").contains("which this kernel refuses to restore"), "{}", ours.log("dump"));
    });
}

#[test]
fn a_stock_dump_of_one_xcc_hangs_and_is_refused() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&SPX), REAL_GPUS);
        assert_eq!(
            support(),
            QueueSupport::FirstXccSaved,
            "`plugin` has the dumps of kernels that save all XCCs"
        );
        let folder = tempfile::tempdir().unwrap();
        let (stock, mut server) =
            (criu(Plugin::Stock, folder.path()), Server::start(&small(), folder.path()));
        stock.dump(server.pid).unwrap();
        server.was_dumped(&stock);
        let error = criu(Plugin::Ours, folder.path()).restore().unwrap_err().to_string();
        assert!(error.contains("and the image has the state of fewer"), "{error}");
        stock.restore().unwrap();
        let judge = Judge::find().unwrap();
        assert_eq!(judge.alive()["partial_queues"], 1, "the hardware waits for the other XCCs");
        dies(server.pid);
        wait_for_the_end_of(server.pid).unwrap();
    });
}
