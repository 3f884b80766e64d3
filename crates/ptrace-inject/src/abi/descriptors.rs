// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves descriptors between processes with SCM_RIGHTS.
//!
//! Sources: `include/linux/socket.h`, `net/core/scm.c` of Linux 6.18; unix(7).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use super::check;

/// The buffers that a process passes to `recvmsg` to receive one descriptor: `struct user_msghdr`, `struct
/// iovec`, a byte, and `struct cmsghdr` with one number. Pointers are addresses in that process.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceiveBuffer {
    name: u64,
    name_length: u64,
    buffers: u64,
    buffer_count: u64,
    control: u64,
    control_length: u64,
    flags: u64,
    buffer: [u64; 2],
    byte: u64,
    control_bytes: [u64; 3],
}

const RECEIVE_BYTES: usize = size_of::<ReceiveBuffer>();

const _: () = {
    assert!(RECEIVE_BYTES == 104);
    assert!(size_of::<libc::msghdr>() == offset_of!(ReceiveBuffer, buffer));
    assert!(size_of::<libc::iovec>() == 16);
    assert!(offset_of!(libc::msghdr, msg_iov) == offset_of!(ReceiveBuffer, buffers));
    assert!(offset_of!(libc::msghdr, msg_iovlen) == offset_of!(ReceiveBuffer, buffer_count));
    assert!(offset_of!(libc::msghdr, msg_control) == offset_of!(ReceiveBuffer, control));
    assert!(offset_of!(libc::msghdr, msg_controllen) == offset_of!(ReceiveBuffer, control_length));
    assert!(offset_of!(libc::msghdr, msg_flags) == offset_of!(ReceiveBuffer, flags));
    assert!(size_of::<libc::cmsghdr>() == 16);
};

/// Bytes of `struct cmsghdr` and one number, without and with padding (CMSG_LEN, CMSG_SPACE).
const ONE_NUMBER: u64 = 20;
const ONE_NUMBER_PADDED: u64 = 24;

impl ReceiveBuffer {
    /// Creates a buffer for this `address` of the process.
    pub(crate) fn at(address: u64) -> Self {
        Self {
            name: 0,
            name_length: 0,
            buffers: address + offset_of!(Self, buffer) as u64,
            buffer_count: 1,
            control: address + offset_of!(Self, control_bytes) as u64,
            control_length: ONE_NUMBER_PADDED,
            flags: 0,
            buffer: [address + offset_of!(Self, byte) as u64, 1],
            byte: 0,
            control_bytes: [0; 3],
        }
    }

    /// Returns the bytes for the process's memory.
    pub(crate) fn to_bytes(self) -> [u8; RECEIVE_BYTES] {
        // SAFETY: thirteen u64 without padding: every byte is initialised, and both types have the same size.
        unsafe { std::mem::transmute(self) }
    }

    /// Reads the buffer as the kernel has written it.
    pub(crate) fn of_bytes(bytes: [u8; RECEIVE_BYTES]) -> Self {
        // SAFETY: any bytes are valid u64, and both types have the same size.
        unsafe { std::mem::transmute(bytes) }
    }

    /// Returns the number of the received descriptor, or `None` if the process has no free number
    /// (MSG_CTRUNC).
    pub(crate) fn number(&self) -> Option<RawFd> {
        let [length, level_and_type, number] = self.control_bytes;
        let rights =
            u64::from(libc::SOL_SOCKET.cast_unsigned()) | u64::from(libc::SCM_RIGHTS.cast_unsigned()) << 32;
        let came = self.control_length >= ONE_NUMBER && length == ONE_NUMBER && level_and_type == rights;
        came.then(|| RawFd::from_le_bytes(std::array::from_fn(|byte| number.to_le_bytes()[byte])))
    }
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        Self::at(0)
    }
}

/// Sends a copy of `descriptor` through a socket, with one byte of data.
pub(crate) fn send(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut byte = 0_u8;
    let mut buffer = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let rights =
        u64::from(libc::SOL_SOCKET.cast_unsigned()) | u64::from(libc::SCM_RIGHTS.cast_unsigned()) << 32;
    let mut control = [ONE_NUMBER, rights, u64::from(descriptor.as_raw_fd().cast_unsigned())];
    // SAFETY: null pointers and zeros are a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut buffer;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the kernel reads the message, its buffer and its control data, all of which live through the
    // call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    check(sent.try_into().map_err(io::Error::other)?).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
    use std::os::unix::net::UnixDatagram;

    use super::*;

    /// Receives into this process's own memory, as an injected call does in another.
    fn receive(socket: &UnixDatagram) -> ReceiveBuffer {
        let mut receipt = Box::new(ReceiveBuffer::default());
        let address = (&raw const *receipt).expose_provenance();
        *receipt = ReceiveBuffer::at(address as u64);
        let message: *mut libc::msghdr = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the receipt lives through the call, and its addresses are its own.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC) };
        assert_eq!(got, 1, "{}", io::Error::last_os_error());
        ReceiveBuffer::of_bytes(receipt.to_bytes())
    }

    #[test]
    fn a_sent_descriptor_has_a_number_in_the_buffer() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let (kept, sent) = UnixDatagram::pair().unwrap();
        send(ours.as_fd(), sent.as_fd()).unwrap();
        drop(sent);
        let number = receive(&theirs).number().unwrap();
        // SAFETY: the kernel has just installed it, and only this test knows its number.
        let copy = UnixDatagram::from(unsafe { OwnedFd::from_raw_fd(number) });
        copy.send(b"x").unwrap();
        assert_eq!(kept.recv(&mut [0; 2]).unwrap(), 1);
    }

    #[test]
    fn a_message_without_a_descriptor_has_none() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.send(b"x").unwrap();
        assert_eq!(receive(&theirs).number(), None);
    }
}
