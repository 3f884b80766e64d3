// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses three counts and private checkpoint data. What is parsed is written back the same, and can be
//! changed.
#![no_main]

use rewake_amdgpu_uapi::criu::blob::Private;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let [devices, bos, objects, bytes @ ..] = input else { return };
    let Ok(mut private) = Private::read(bytes, (*devices).into(), (*bos).into(), (*objects).into()) else {
        return;
    };
    assert_eq!(private.write(), bytes);
    private.queues_mut().for_each(|queue| queue.percent = 0);
    for bo in private.bos_mut() {
        let mapped = bo.mapped();
        bo.set_mapped(&mapped).expect("its own GPUs");
    }
    let written = private.write();
    assert_eq!(written.len(), bytes.len());
    let again = Private::read(&written, (*devices).into(), (*bos).into(), (*objects).into());
    assert_eq!(again.expect("still private data"), private);
});
