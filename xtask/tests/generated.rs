// SPDX-License-Identifier: MIT OR Apache-2.0
//! The generated sources in the tree are what `proto/` gives today. `REWAKE_BLESS=1` writes them instead.

use std::fs;
use std::path::Path;

/// The generated files: the file in `proto/`, its package, and the Rust file from the repository's root.
const GENERATED: &[(&str, &str, &str)] = &[
    ("criu.proto", "rewake.criu", "crates/criu-images/src/generated/criu.rs"),
    ("amdgpu.proto", "rewake.amdgpu", "crates/criu-images/src/generated/amdgpu.rs"),
    ("rewake_gpu.proto", "rewake.gpu", "crates/criu-images/src/generated/gpu.rs"),
    ("handover.proto", "rewake.handover", "crates/plugin-protocol/src/generated/handover.rs"),
    ("manifest.proto", "rewake.manifest", "crates/manifest/src/generated/manifest.rs"),
    ("store.proto", "rewake.store", "crates/image-store/src/stores/generated/store.rs"),
    ("image.proto", "rewake.image", "crates/image-transfer/src/protocol/generated/image.rs"),
    ("control.proto", "rewake.control", "crates/plugin-protocol/src/control/generated/control.rs"),
];

fn generate(proto: &str, package: &str, root: &Path) -> String {
    let descriptors = protox::compile([proto], [root.join("proto")]).expect("the .proto file compiles");
    let module = prost_build::Module::from_protobuf_package_name(package);
    let requests = descriptors.file.into_iter().map(|file| (module.clone(), file)).collect();
    let mut modules = prost_build::Config::new().generate(requests).expect("prost accepts the file");
    let body = modules.remove(&module).expect("one module for one package");
    format!(
        "// SPDX-License-Identifier: MIT OR Apache-2.0\n// Generated from proto/{proto}: `cargo xtask \
         codegen`\n{body}"
    )
}

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (proto, package, out) in GENERATED {
        let wanted = generate(proto, package, &root);
        let path = root.join(out);
        if std::env::var_os("REWAKE_BLESS").is_some() {
            fs::write(&path, &wanted).expect("the generated file can be written");
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == wanted, "{out} is not what proto/{proto} gives: run `cargo xtask codegen`");
    }
}
