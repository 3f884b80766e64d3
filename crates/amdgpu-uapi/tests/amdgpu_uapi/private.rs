// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads private checkpoint data by its layout, and writes it back byte for byte, except for requested
//! changes.

use proptest::prelude::*;
use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_USERPTR, KFD_IOC_ALLOC_MEM_FLAGS_VRAM, KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE,
};
use rewake_amdgpu_uapi::criu::blob::{self, Object, Private};

/// Returns a blob with one GPU, one buffer mapped on it, and one object of each kind.
fn good_blob() -> Vec<u8> {
    let mut bytes = vec![0; blob::PROCESS + blob::DEVICE + blob::BO];
    bytes[0] = 1;
    let bo = blob::PROCESS + blob::DEVICE;
    bytes[bo..bo + 8].copy_from_slice(&0x7000_u64.to_le_bytes());
    bytes[bo + 8] = 9;
    bytes[bo + 12] = 77;
    let mut queue = [0; blob::QUEUE];
    queue[8] = 0x10;
    queue[108] = 3; // bytes of control stack
    queue[112] = 2; // bytes of MQD
    bytes.extend(queue);
    bytes.extend([0xaa, 0xbb, 1, 2, 3]);
    let mut event = [0; blob::EVENT];
    (event[0], event[16], event[28]) = (1, 42, 1);
    bytes.extend(event);
    let mut range = [0; blob::RANGE + 5 * 8];
    (range[0], range[8], range[16], range[24], range[28]) = (2, 5, 6, 7, 8);
    bytes.extend(range);
    bytes
}

#[test]
fn private_data_is_read_by_its_layout() {
    let private = Private::read(&good_blob(), 1, 1, 3).unwrap();
    let bo = &private.bos()[0];
    assert_eq!((bo.user_address, bo.idr_handle, bo.mapped().as_slice()), (0x7000, 9, &[77][..]));
    let queue = private.queues().next().unwrap();
    assert_eq!((queue.ring, queue.mqd(), queue.control_stack()), (0x10, &[0xaa, 0xbb][..], &[1, 2, 3][..]));
    let event = private.events().next().unwrap();
    assert_eq!((event.id, event.signalled), (42, 1));
    let range = private.ranges().next().unwrap();
    assert_eq!((range.page, range.pages, range.attributes().len(), range.attributes()[0]), (5, 6, 5, (7, 8)));
    assert!(matches!(private.objects()[0], Object::Queue(_)));
}

#[test]
fn registered_memory_is_that_of_userptrs_and_ranges() {
    let private = Private::read(&good_blob(), 1, 1, 3).unwrap();
    let userptr = KFD_IOC_ALLOC_MEM_FLAGS_USERPTR | KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE;
    let of = |flags, bytes| -> Vec<(u64, u64)> {
        let registered = private.registered([(flags, bytes)].into_iter());
        registered.iter().map(|range| (range.start, range.end)).collect()
    };
    assert_eq!(of(KFD_IOC_ALLOC_MEM_FLAGS_VRAM, 0x2000), [(0x5000, 0xb000)]);
    assert_eq!(of(userptr, 0x2000), [(0x5000, 0xb000)], "inside the other");
    assert_eq!(of(userptr, u64::MAX), [(0x5000, u64::MAX)]);
}

#[test]
fn private_data_that_ends_early_or_late_is_refused() {
    let good = good_blob();
    for length in 0..good.len() {
        assert!(Private::read(&good[..length], 1, 1, 3).is_err(), "{length} bytes");
    }
    let mut long = good;
    long.push(0);
    let error = Private::read(&long, 1, 1, 3).unwrap_err().to_string();
    assert!(error.contains("1 bytes after the last object"), "{error}");
    assert!(Private::read(&long, usize::MAX, usize::MAX, usize::MAX).is_err());
}

proptest! {
    #[test]
    fn no_private_data_panics(
        bytes: Vec<u8>,
        devices in 0_usize..70,
        bos in 0_usize..9,
        objects in 0_usize..9,
    ) {
        if let Ok(private) = Private::read(&bytes, devices, bos, objects) {
            prop_assert_eq!(private.write(), bytes);
        }
    }

    #[test]
    fn no_changed_private_data_panics(at in 0_usize..500, value: u8) {
        let mut bytes = good_blob();
        let length = bytes.len();
        bytes[at % length] = value;
        if let Ok(private) = Private::read(&bytes, 1, 1, 3) {
            prop_assert_eq!(private.write(), bytes);
        }
    }
}

/// Returns a record that begins with the kernel's word for its kind, with random other bytes.
fn record(kind: u32, length: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), length).prop_map(move |mut bytes| {
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes
    })
}

/// Returns a queue with an MQD and a control stack.
fn queue() -> impl Strategy<Value = Vec<u8>> {
    (record(0, blob::QUEUE), any::<[u8; 5]>(), any::<[u8; 3]>()).prop_map(|(mut bytes, mqd, stack)| {
        bytes[108..112].copy_from_slice(&3_u32.to_le_bytes());
        bytes[112..116].copy_from_slice(&5_u32.to_le_bytes());
        [&bytes[..], &mqd, &stack].concat()
    })
}

prop_compose! {
    /// Returns private data with random bytes wherever the layout does not fix them, and its counts.
    fn noise()(devices in 0_usize..5)(
        devices in Just(devices),
        head in prop::collection::vec(any::<u8>(), 4 + devices * blob::DEVICE),
        bos in prop::collection::vec(prop::collection::vec(any::<u8>(), blob::BO), 0..4),
        objects in prop::collection::vec(
            prop_oneof![queue(), record(1, blob::EVENT), record(2, blob::RANGE + (devices + 4) * 8)], 0..6,
        ),
    ) -> (Vec<u8>, usize, usize, usize) {
        let bytes = [vec![1, 0, 0, 0], head, bos.concat(), objects.concat()].concat();
        (bytes, devices, bos.len(), objects.len())
    }
}

proptest! {
    #[test]
    fn every_byte_is_written_back((bytes, devices, bos, objects) in noise()) {
        let private = Private::read(&bytes, devices, bos, objects).unwrap();
        prop_assert_eq!(private.write(), bytes);
    }

    #[test]
    fn a_removed_buffer_removes_only_its_bytes((bytes, devices, bos, objects) in noise(), which: usize) {
        let mut private = Private::read(&bytes, devices, bos, objects).unwrap();
        let gone = which.checked_rem(bos);
        private.retain_bos(|index| Some(index) != gone);
        let mut left = bytes;
        if let Some(gone) = gone {
            let start = blob::PROCESS + devices * blob::DEVICE + gone * blob::BO;
            left.drain(start..start + blob::BO);
        }
        prop_assert_eq!(private.write(), left);
    }

    #[test]
    fn a_change_changes_only_its_bytes((bytes, devices, bos, objects) in noise(), percent: u32) {
        let mut private = Private::read(&bytes, devices, bos, objects).unwrap();
        let before = private.queues().count();
        private.queues_mut().for_each(|queue| queue.percent = percent);
        let written = private.write();
        prop_assert_eq!(written.len(), bytes.len());
        let changed = written.iter().zip(&bytes).filter(|(new, old)| new != old).count();
        prop_assert!(changed <= before * 4);
        let again = Private::read(&written, devices, bos, objects).unwrap();
        prop_assert!(again.queues().all(|queue| queue.percent == percent));
        prop_assert_eq!(again, private);
    }
}

#[test]
fn a_change_of_gpus_keeps_the_bytes_after_the_list() {
    let mut bytes = good_blob();
    let bo = blob::PROCESS + blob::DEVICE;
    let list = bo + 12;
    // Two GPUs, the end, and bytes that the kernel did not clear.
    for (place, word) in [(0, 77_u32), (1, 78), (2, 0), (3, 0xdead), (5, 0xbeef)] {
        bytes[list + place * 4..list + place * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    let word = |bytes: &[u8], place: usize| {
        u32::from_le_bytes(bytes[list + place * 4..list + place * 4 + 4].try_into().unwrap())
    };
    let mut private = Private::read(&bytes, 1, 1, 3).unwrap();
    for (gpus, expected) in [
        (&[5][..], [5, 0, 0, 0xdead, 0, 0xbeef]),
        (&[], [0, 0, 0, 0xdead, 0, 0xbeef]),
        (&[5, 6, 7], [5, 6, 7, 0, 0, 0xbeef]),
        (&[77, 78], [77, 78, 0, 0, 0, 0xbeef]),
    ] {
        private.bos_mut()[0].set_mapped(gpus).unwrap();
        assert_eq!(private.bos()[0].mapped(), gpus);
        let written = private.write();
        assert_eq!(std::array::from_fn(|place| word(&written, place)), expected, "{gpus:?}");
        assert_eq!((&written[..list], &written[bo + blob::BO..]), (&bytes[..list], &bytes[bo + blob::BO..]));
    }
    let all: Vec<u32> = (1..=64).collect();
    private.bos_mut()[0].set_mapped(&all).unwrap();
    assert_eq!(private.bos()[0].mapped(), all, "a full list has no end mark");
    let error = private.bos_mut()[0].set_mapped(&[1; 65]).unwrap_err().to_string();
    assert!(error.contains("64 GPUs"), "{error}");
    private.bos_mut()[0].set_mapped(&[1, 0]).unwrap_err();
    assert_eq!(private.bos()[0].mapped(), all, "a refused list changes nothing");
}

#[test]
fn an_unknown_object_is_named_with_its_offset() {
    let mut bytes = good_blob();
    let queue = blob::PROCESS + blob::DEVICE + blob::BO;
    bytes[queue] = 3;
    let error = Private::read(&bytes, 1, 1, 3).unwrap_err().to_string();
    assert!(error.contains("at 0x120: object of kind 3, expected 0, 1 or 2"), "{error}");
}

/// Returns private data of one object, whose record is `length` ascending bytes, except for these words.
fn counting(kind: u32, length: usize, words: &[(usize, u32)]) -> (Vec<u8>, Private) {
    let mut record: Vec<u8> = (0..=u8::MAX).cycle().take(length).collect();
    for (at, word) in [&[(0, kind)], words].concat() {
        record[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let bytes = [&[1, 0, 0, 0, 9, 0, 0, 0][..], &record].concat();
    let private = Private::read(&bytes, 0, 0, 1).unwrap();
    (bytes, private)
}

#[test]
fn fields_are_at_the_kernels_offsets() {
    let word = |at: u8| u32::from_le_bytes([at, at + 1, at + 2, at + 3]);
    let long = |at: u8| u64::from(word(at)) | u64::from(word(at + 4)) << 32;

    let (_, private) = counting(0, blob::QUEUE, &[(108, 0), (112, 0)]);
    let q = private.queues().next().unwrap();
    assert_eq!([q.ring, q.ring_size, q.read_pointer, q.write_pointer], [8, 16, 24, 32].map(long));
    assert_eq!([q.doorbell_offset, q.end_of_pipe, q.save_area], [40, 48, 56].map(long));
    assert_eq!([q.gpu, q.kind, q.format, q.id, q.priority, q.percent], [64, 68, 72, 76, 80, 84].map(word));
    assert_eq!([q.doorbell, q.gws, q.sdma], [88, 92, 96].map(word));
    assert_eq!([q.end_of_pipe_size, q.save_area_size], [100, 104].map(word));

    let (_, private) = counting(1, blob::EVENT, &[]);
    let event = private.events().next().unwrap();
    assert_eq!(event.page, long(8));
    assert_eq!([event.id, event.auto_reset, event.kind, event.signalled], [16, 20, 24, 28].map(word));

    let (_, private) = counting(2, blob::RANGE + 4 * 8, &[]);
    let range = private.ranges().next().unwrap();
    assert_eq!([range.page, range.pages], [8, 16].map(long));
    assert_eq!(range.attributes(), [24, 32, 40, 48].map(|at| (word(at), word(at + 4))));
}

#[test]
fn a_gated_queue_differs_only_in_its_percentage() {
    let (bytes, mut private) = counting(0, blob::QUEUE, &[(108, 0), (112, 0)]);
    private.queues_mut().for_each(|queue| queue.percent = 0);
    let mut expected = bytes;
    expected[blob::PROCESS + 84..blob::PROCESS + 88].fill(0);
    assert_eq!(private.write(), expected);
}
