// SPDX-License-Identifier: MIT OR Apache-2.0
//! TCP sockets of a tree, as far as `/proc` shows them: their addresses must exist at the destination.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;

use anyhow::Context as _;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, sockopt};
use serde::{Deserialize, Serialize};

/// TCP states in `/proc/net/tcp`.
const ESTABLISHED: &str = "01";
const LISTEN: &str = "0A";

/// A socket that listens, or is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct TreeSocket {
    pub(crate) local: SocketAddr,
    pub(crate) listens: bool,
}

impl TreeSocket {
    /// Why this host cannot have it. The address is bound for a moment, and no client can connect to it.
    pub(crate) fn refused(self) -> Option<String> {
        // A connection's port may be the port of others.
        let port = if self.listens { self.local.port() } else { 0 };
        let error = bind((self.local.ip(), port).into()).err()?;
        Some(format!("{} ({})", self.local, io::Error::from(error)))
    }
}

/// Binds a socket that does not listen.
fn bind(address: SocketAddr) -> nix::Result<()> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // A listener that has ended leaves connections for a while.
    socket::setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(address))
}

/// The TCP sockets that a process has.
pub(crate) fn of_process(pid: i32) -> anyhow::Result<BTreeSet<TreeSocket>> {
    let folder = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(&folder).with_context(|| format!("listing {folder}"))?.flatten();
    let inode = |name: &str| name.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned);
    let names = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let inodes: BTreeSet<String> = names.filter_map(|name| inode(name.to_str()?)).collect();
    if inodes.is_empty() {
        return Ok(BTreeSet::new());
    }
    let mut found = BTreeSet::new();
    for name in ["tcp", "tcp6"] {
        // A kernel without IPv6 has no second file.
        let text = fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
        found.extend(text.lines().skip(1).filter_map(|line| parse(line, &inodes)));
    }
    Ok(found)
}

/// Reads a line, if its socket is one of these.
fn parse(line: &str, inodes: &BTreeSet<String>) -> Option<TreeSocket> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, state, inode) = (fields.get(1)?, *fields.get(3)?, *fields.get(9)?);
    if !inodes.contains(inode) || ![ESTABLISHED, LISTEN].contains(&state) {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Words of 32 bits in the machine's order, of an address in the network's.
    let word = |index: usize| u32::from_str_radix(address.get(index * 8..index * 8 + 8)?, 16).ok();
    let first = word(0)?.to_ne_bytes();
    let ip = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(first)),
        32 => {
            let rest = [word(1)?, word(2)?, word(3)?].map(u32::to_ne_bytes).concat();
            let bytes: [u8; 16] = [&first[..], &rest].concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(TreeSocket { local: (ip, port).into(), listens: state == LISTEN })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_socket_of_this_process_is_found_and_cannot_be_had_twice() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let local = listener.local_addr().unwrap();
            let found = of_process(std::process::id().cast_signed()).unwrap();
            let socket = TreeSocket { local, listens: true };
            assert!(found.contains(&socket), "{found:?}");
            assert!(socket.refused().unwrap().contains("in use"));
            drop(listener);
            assert_eq!(socket.refused(), None);
        }
        let connected = TreeSocket { local: "192.0.2.1:9".parse().unwrap(), listens: false };
        assert!(connected.refused().is_some());
    }
}
