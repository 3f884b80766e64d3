// SPDX-License-Identifier: MIT OR Apache-2.0
//! The generated sources in the tree are what `proto/` gives today. `REWAKE_BLESS=1` writes them instead.

use std::fs;
use std::path::Path;

const PROTO: &str = "control.proto";
const PACKAGE: &str = "rewake.control";

#[test]
fn generated_code_is_current() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = here.join("src/control/generated/control.rs");
    let descriptors = protox::compile([PROTO], [here.join("../proto")]).expect("the .proto file compiles");
    let module = prost_build::Module::from_protobuf_package_name(PACKAGE);
    let requests = descriptors.file.into_iter().map(|file| (module.clone(), file)).collect();
    let mut modules = prost_build::Config::new().generate(requests).expect("prost accepts the file");
    let body = modules.remove(&module).expect("one module for one package");
    let wanted = format!(
        "// SPDX-License-Identifier: MIT OR Apache-2.0\n// Generated from proto/{PROTO}: `cargo xtask codegen`\n{body}"
    );
    if std::env::var_os("REWAKE_BLESS").is_some() {
        fs::write(&out, &wanted).expect("the generated file can be written");
    }
    let found = fs::read_to_string(&out).unwrap_or_default();
    assert!(found == wanted, "{} is not what proto/{PROTO} gives: run `cargo xtask codegen`", out.display());
}
