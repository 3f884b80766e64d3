// SPDX-License-Identifier: MIT OR Apache-2.0
//! Both sides of a connection between Rewakes: who is admitted, what each side says, and that bytes arrive.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread::{scope, sleep, spawn};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use rewake_criu_tls::{HandshakeError, TlsClient, TlsOptions, TlsServer};
use rewake_peer_stream::{Admission, AllowedPeer, PeerRights, PeerStream, connect};
use rewake_testkit::authority::{Authority, Issued};

const HOST: &str = "127.0.0.1";
const LIMIT: Duration = Duration::from_secs(20);

fn options(authority: &Authority, own: &Issued) -> TlsOptions {
    TlsOptions {
        ca: Some(authority.ca()),
        certificate: Some(own.certificate.clone()),
        key: Some(own.key.clone()),
        ..TlsOptions::default()
    }
}

/// A connection's ends, before the handshake: the server's, and the client's.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, client)
}

/// What both sides say, in words.
struct Said {
    server: Result<PeerRights, String>,
    client: Result<(), String>,
}

fn meet(admission: &Admission, client: TlsClient) -> Said {
    let (near, far) = pair();
    let client = spawn(move || connect(far, Some(&client)).map(drop).map_err(|error| error.to_string()));
    let server = admission.admit(near).map(|(_, rights)| rights).map_err(|error| error.to_string());
    Said { server, client: client.join().unwrap() }
}

/// A server with this certificate that allows these peers.
fn server(authority: &Authority, own: &Issued, allowed: &[&str]) -> Admission {
    let tls = TlsServer::new(&options(authority, own), None).unwrap();
    Admission::encrypted(
        tls,
        allowed.iter().map(|allowed| AllowedPeer::of(allowed.as_ref()).unwrap()).collect(),
    )
}

fn own(authority: &Authority) -> Issued {
    authority.issue(|request| request.address(HOST))
}

fn client(authority: &Authority, own: &Issued) -> TlsClient {
    TlsClient::new(&options(authority, own), Some(HOST)).unwrap()
}

/// What a server that allows these peers says about host-b.
fn meets_host_b(allowed: &[&str]) -> Said {
    let authority = Authority::new();
    let host_b = authority.issue(|request| request.address("host-b"));
    meet(&server(&authority, &own(&authority), allowed), client(&authority, &host_b))
}

#[test]
fn without_a_list_all_certificates_of_the_ca_are_admitted() {
    let said = meets_host_b(&[]);
    assert_eq!((said.server, said.client), (Ok(PeerRights::All), Ok(())));
}

#[test]
fn an_allowed_certificate_gets_its_rights() {
    let folders = |names: &[&str]| PeerRights::Folders(names.iter().map(PathBuf::from).collect());
    for (allowed, rights) in [
        (&["host-a", "host-b"][..], PeerRights::All),
        (&["host-a", "host-b=web"], folders(&["web"])),
        (&["host-b=web", "host-b=db"], folders(&["web", "db"])),
        (&["host-b=web", "host-b"], PeerRights::All),
    ] {
        let said = meets_host_b(allowed);
        assert_eq!((said.server, said.client), (Ok(rights), Ok(())), "{allowed:?}");
    }
}

#[test]
fn another_certificate_is_refused_on_both_sides_by_its_name() {
    for allowed in [&["host-a"][..], &["host-a=web", "host"]] {
        let said = meets_host_b(allowed);
        let server = said.server.unwrap_err();
        assert!(server.starts_with("not admitted: --allow names none of"), "{server}");
        let client = said.client.unwrap_err();
        assert!(client.starts_with("refused by the server: its --allow names none of"), "{client}");
        assert!(server.contains("host-b") && client.contains("host-b"), "{server}; {client}");
    }
}

#[test]
fn a_common_name_is_allowed_without_alternative_names() {
    let authority = Authority::new();
    let common = authority.issue(|request| request.common_name("host-b"));
    let said = meet(&server(&authority, &own(&authority), &["host-b"]), client(&authority, &common));
    assert_eq!((said.server, said.client), (Ok(PeerRights::All), Ok(())));
}

#[test]
fn a_client_of_another_ca_knows_before_its_first_message() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let stranger = other.issue(|request| request.address(HOST));
    let said = meet(&server(&authority, &own(&authority), &[]), client(&authority, &stranger));
    assert_eq!(said.server, Err(HandshakeError::UnknownCa.to_string()));
    let client = said.client.unwrap_err();
    assert!(client.starts_with("the peer does not accept this side's certificate (UnknownCA)"), "{client}");
}

#[test]
fn a_server_with_another_name_is_refused_and_knows() {
    let authority = Authority::new();
    let other = authority.issue(|request| request.address("host-b"));
    let said = meet(&server(&authority, &other, &[]), client(&authority, &own(&authority)));
    let client = said.client.unwrap_err();
    assert!(client.contains("expected 127.0.0.1, the address that this side was given"), "{client}");
    let server = said.server.unwrap_err();
    assert!(server.starts_with("the peer does not accept this side's certificate"), "{server}");
}

#[test]
fn a_client_in_clear_is_named() {
    let authority = Authority::new();
    let (near, mut far) = pair();
    far.write_all(b"REWAKEMG and more bytes than a record's head").unwrap();
    let said = server(&authority, &own(&authority), &[]).admit(near).unwrap_err();
    assert_eq!(said.to_string(), HandshakeError::NotTls.to_string());
}

/// An encrypted connection: the server's end, and the client's.
fn connected() -> (PeerStream, PeerStream) {
    let authority = Authority::new();
    let (admission, client) =
        (server(&authority, &own(&authority), &[]), client(&authority, &own(&authority)));
    let (near, far) = pair();
    let client = spawn(move || connect(far, Some(&client)).unwrap());
    (admission.admit(near).unwrap().0, client.join().unwrap())
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / 3 + at * seed) % 251).unwrap()).collect()
}

/// More than sockets take: with reads that wait for writes, both sides would wait for ever.
#[test]
fn both_sides_send_at_once_and_every_byte_arrives() {
    const LEN: usize = 8 << 20;
    let (near, far) = connected();
    let start = Instant::now();
    scope(|scope| {
        for (stream, own, other) in [(&near, 1, 2), (&far, 2, 1)] {
            let socket = stream.socket();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket.set_write_timeout(Some(LIMIT)).unwrap();
            setsockopt(socket, sockopt::SndBuf, &(64 << 10)).unwrap();
            setsockopt(socket, sockopt::RcvBuf, &(64 << 10)).unwrap();
            let (mut writer, mut reader) = (stream.clone(), stream.clone());
            scope.spawn(move || writer.write_all(&pattern(LEN, own)).unwrap());
            scope.spawn(move || {
                // Both writers wait for the other side by then.
                sleep(Duration::from_millis(200));
                let mut bytes = vec![0; LEN];
                reader.read_exact(&mut bytes).unwrap();
                assert!(bytes == pattern(LEN, other));
            });
        }
    });
    assert!(start.elapsed() < LIMIT);
}

#[test]
fn a_read_has_its_limit_and_ends_with_the_connection() {
    let (mut near, far) = connected();
    near.socket().set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let error = near.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    far.socket().shutdown(Shutdown::Both).unwrap();
    assert_eq!(near.read(&mut [0; 8]).unwrap(), 0);
}

/// Rates of a loop of 64 KiB, in clear and encrypted.
#[test]
#[ignore = "a measurement: cargo test -p rewake-peer-stream -- --ignored --nocapture"]
fn rates() {
    const LEN: usize = 2 << 30;
    for (name, (near, far)) in [
        ("clear", {
            let (near, far) = pair();
            (PeerStream::from(near), PeerStream::from(far))
        }),
        ("tls", connected()),
    ] {
        let start = Instant::now();
        scope(|scope| {
            scope.spawn(|| {
                let mut near = near;
                let bytes = pattern(64 << 10, 1);
                (0..LEN / bytes.len()).for_each(|_| near.write_all(&bytes).unwrap());
            });
            let (mut far, mut bytes) = (far, vec![0; 2 << 20]);
            (0..LEN / bytes.len()).for_each(|_| far.read_exact(&mut bytes).unwrap());
        });
        println!("{name}: {:.2} GB/s", LEN as f64 / 1e9 / start.elapsed().as_secs_f64());
    }
}
