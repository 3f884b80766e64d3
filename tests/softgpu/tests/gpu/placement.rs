// SPDX-License-Identifier: MIT OR Apache-2.0
//! Placement of an image of this machine onto this machine.

use amdgpu_plugin::placement::{NoPlacement, Placement};
use amdgpu_plugin::topology::to_image;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_criu_images::amdgpu::NodeImage;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};
use softgpu_tests::isolated;

fn nodes() -> Vec<NodeImage> {
    Topology::read().unwrap().nodes.iter().map(to_image).collect()
}

fn gpus(nodes: &[NodeImage]) -> Vec<u32> {
    nodes.iter().map(|node| node.properties.gpu_id).filter(|id| *id != 0).collect()
}

#[test]
fn every_gpu_stays_under_its_name_where_it_was() {
    isolated(1, |_| {
        let nodes = nodes();
        let mapping = Placement::find(&nodes, &gpus(&nodes), &nodes, Checks::default()).unwrap();
        assert_eq!(mapping.pairs().len(), gpus(&nodes).len());
        for pair in mapping.pairs() {
            assert_eq!(pair.old, pair.new);
            let device = format!("/dev/dri/renderD{}", pair.render_minor);
            assert!(std::fs::exists(&device).unwrap(), "{device}");
        }
    });
}

#[test]
fn an_image_of_smaller_gpus_fits_and_one_of_larger_does_not() {
    isolated(1, |_| {
        let here = nodes();
        let mut image = here.clone();
        for node in image.iter_mut().filter(|node| node.properties.gpu_id != 0) {
            node.properties.gpu_id += 1;
            node.properties.vram_size -= 1 << 20;
            node.properties.fw_version -= 1;
        }
        Placement::find(&image, &gpus(&image), &here, Checks::default()).unwrap();
        for node in image.iter_mut().filter(|node| node.properties.gpu_id != 0) {
            node.properties.vram_size += 2 << 20;
        }
        let error = Placement::find(&image, &gpus(&image), &here, Checks::default()).unwrap_err();
        assert!(
            matches!(error, NoPlacement::NoCompatibleGpu(_))
                && error.to_string().contains("KFD_VRAM_SIZE_CHECK=0"),
            "{error}"
        );
        Placement::find(&image, &gpus(&image), &here, Checks::default().without(Switch::Vram)).unwrap();
    });
}

#[test]
fn a_missing_gpu_is_an_error() {
    isolated(1, |_| {
        let image = nodes();
        let gone = gpus(&image)[0];
        let here: Vec<NodeImage> =
            image.iter().filter(|node| node.properties.gpu_id != gone).cloned().collect();
        let error = Placement::find(&image, &gpus(&image), &here, Checks::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("GPU {gone:#x}")), "{error}");
    });
}
