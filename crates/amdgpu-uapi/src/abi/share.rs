// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes a change of a queue's share of time, for a call by another process.

use super::generated::*;

/// Returns the number and the argument bytes of UPDATE_QUEUE.
#[must_use]
pub fn update_queue(argument: kfd_ioctl_update_queue_args) -> (u32, Vec<u8>) {
    let kfd_ioctl_update_queue_args {
        ring_base_address,
        queue_id,
        ring_size,
        queue_percentage,
        queue_priority,
    } = argument;
    let mut bytes = ring_base_address.to_ne_bytes().to_vec();
    for field in [queue_id, ring_size, queue_percentage, queue_priority] {
        bytes.extend(field.to_ne_bytes());
    }
    (IOC_UPDATE_QUEUE, bytes)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn fields_are_at_the_kernels_offsets() {
        let argument = kfd_ioctl_update_queue_args {
            ring_base_address: 1,
            queue_id: 2,
            ring_size: 3,
            queue_percentage: 4,
            queue_priority: 5,
        };
        let (_, bytes) = update_queue(argument);
        assert_eq!(bytes.len(), size_of::<kfd_ioctl_update_queue_args>());
        assert_eq!(bytes[..8], 1_u64.to_ne_bytes());
        let places = [
            offset_of!(kfd_ioctl_update_queue_args, queue_id),
            offset_of!(kfd_ioctl_update_queue_args, ring_size),
            offset_of!(kfd_ioctl_update_queue_args, queue_percentage),
            offset_of!(kfd_ioctl_update_queue_args, queue_priority),
        ];
        for (place, value) in places.into_iter().zip(2_u32..) {
            assert_eq!(bytes[place..place + 4], value.to_ne_bytes());
        }
    }
}
