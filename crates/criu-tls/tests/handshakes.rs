// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which peers are accepted, on both sides, and what those that are not are called.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use rewake_criu_tls::{EncryptedStream, HandshakeError, TlsClient, TlsOptions, TlsServer};
use rewake_testkit::authority::{Authority, Issued};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::server::TlsStream;

const HOST: &str = "127.0.0.1";
/// Bytes on the way.
const PIPE: usize = 64 << 10;
/// Time for bytes that are on the way.
const LIMIT: Duration = Duration::from_secs(20);

/// What each side says about the other; an accepted client also gets a byte.
#[derive(Debug, PartialEq, Eq)]
struct BothSides {
    server: Result<(), HandshakeError>,
    client: Result<(), HandshakeError>,
}

const ACCEPTED: BothSides = BothSides { server: Ok(()), client: Ok(()) };

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Makes a connection: the server's end, and the client's.
fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    (near, far)
}

/// Reads exactly `len` bytes, or no byte at the end of the stream.
fn read(stream: &mut EncryptedStream<UnixStream>, len: usize) -> Result<Vec<u8>, HandshakeError> {
    let (mut bytes, mut filled) = (vec![0; len], 0);
    let deadline = Instant::now() + LIMIT;
    while filled < len {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Ok(Vec::new()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => sleep(Duration::from_millis(1)),
            Err(error) => return Err(HandshakeError::of(&error).unwrap_or(HandshakeError::Closed)),
        }
        assert!(Instant::now() < deadline, "{filled} of {len} bytes");
    }
    Ok(bytes)
}

fn shake(server: &TlsServer, client: &TlsClient) -> BothSides {
    let (near, far) = pair();
    let client = client.clone();
    let connect = spawn(move || read(&mut client.connect(far)?, 1).map(|byte| assert_eq!(byte, b"x")));
    let server = runtime().block_on(async {
        let mut stream = server.accept(tokio::net::UnixStream::from_std(near).unwrap()).await?;
        stream.write_all(b"x").await.unwrap();
        stream.flush().await.unwrap();
        Ok(())
    });
    BothSides { server, client: connect.join().unwrap() }
}

/// The options of a peer with this certificate.
fn options(authority: &Authority, own: &Issued) -> TlsOptions {
    TlsOptions {
        ca: Some(authority.ca()),
        crl: None,
        certificate: Some(own.certificate.clone()),
        key: Some(own.key.clone()),
        any_name: false,
    }
}

fn any_name(options: TlsOptions) -> TlsOptions {
    TlsOptions { any_name: true, ..options }
}

/// A server for `HOST` and a client with this certificate; what the server says.
fn server_says(authority: &Authority, client: &Issued, list: Option<PathBuf>) -> Result<(), HandshakeError> {
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&TlsOptions { crl: list, ..options(authority, &own) }, Some(HOST)).unwrap();
    let client = TlsClient::new(&any_name(options(authority, client)), Some(HOST)).unwrap();
    shake(&server, &client).server
}

/// A client for `HOST` and a server with this certificate; what the client says.
fn client_says(authority: &Authority, server: &Issued, list: Option<PathBuf>) -> Result<(), HandshakeError> {
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&any_name(options(authority, server)), Some(HOST)).unwrap();
    let client = TlsClient::new(&TlsOptions { crl: list, ..options(authority, &own) }, Some(HOST)).unwrap();
    shake(&server, &client).client
}

/// What both sides say about a peer with this certificate.
fn both_say(authority: &Authority, peer: &Issued, list: Option<&PathBuf>) -> [Result<(), HandshakeError>; 2] {
    [server_says(authority, peer, list.cloned()), client_says(authority, peer, list.cloned())]
}

#[test]
fn peers_of_one_ca_with_the_right_name_are_accepted() {
    let authority = Authority::new();
    let both = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&options(&authority, &both), Some(HOST)).unwrap();
    let client = TlsClient::new(&options(&authority, &both), Some(HOST)).unwrap();
    assert_eq!(shake(&server, &client), ACCEPTED);
}

#[test]
fn a_certificate_of_another_ca_is_refused() {
    let (authority, other) = (Authority::new(), Authority::new());
    let stranger = other.issue(|request| request.address(HOST));
    let [server, client] = both_say(&authority, &stranger, None);
    assert_eq!([server, client], [Err(HandshakeError::UnknownCa), Err(HandshakeError::UnknownCa)]);
}

#[test]
fn an_expired_certificate_is_refused() {
    let authority = Authority::new();
    let old = authority.issue(|request| request.address(HOST).until(2020));
    assert_eq!(
        both_say(&authority, &old, None),
        [Err(HandshakeError::Expired), Err(HandshakeError::Expired)]
    );
}

#[test]
fn a_certificate_with_another_name_is_refused() {
    let authority = Authority::new();
    let other = authority.issue(|request| request.address("127.0.0.2"));
    for said in both_say(&authority, &other, None) {
        let Err(HandshakeError::WrongName { expected, found }) = said else { panic!("{said:?}") };
        assert_eq!(expected, HOST);
        assert!(found.contains("127.0.0.2"), "{found}");
    }
}

#[test]
fn a_revoked_certificate_is_refused_and_others_are_not() {
    let authority = Authority::new();
    let [good, bad] = [(); 2].map(|()| authority.issue(|request| request.address(HOST)));
    let list = authority.revoke(&bad, 2090);
    assert_eq!(
        both_say(&authority, &bad, Some(&list)),
        [Err(HandshakeError::Revoked), Err(HandshakeError::Revoked)]
    );
    assert_eq!(both_say(&authority, &good, Some(&list)), [Ok(()), Ok(())]);
    assert_eq!(both_say(&authority, &bad, None), [Ok(()), Ok(())]);
}

#[test]
fn a_revocation_list_past_its_next_update_admits_no_peer() {
    let authority = Authority::new();
    let [good, bad] = [(); 2].map(|()| authority.issue(|request| request.address(HOST)));
    let list = authority.revoke(&bad, 2020);
    assert_eq!(server_says(&authority, &good, Some(list)), Err(HandshakeError::OldRevocationList));
}

#[test]
fn a_revocation_list_of_another_ca_admits_no_peer() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let good = authority.issue(|request| request.address(HOST));
    let list = other.revoke(&other.issue(|request| request.address(HOST)), 2090);
    assert_eq!(server_says(&authority, &good, Some(list)), Err(HandshakeError::NoRevocationList));
}

#[test]
fn a_common_name_counts_without_alternative_names_only() {
    let authority = Authority::new();
    let common = authority.issue(|request| request.common_name("Host-A"));
    let both = authority.issue(|request| request.common_name("host-a").address("host-b"));
    let client = |server: &Issued, address| {
        let server = TlsServer::new(&any_name(options(&authority, server)), None).unwrap();
        let client = TlsClient::new(&options(&authority, &common), Some(address)).unwrap();
        shake(&server, &client).client
    };
    assert_eq!(client(&common, "host-a"), Ok(()));
    let Err(HandshakeError::WrongName { found, .. }) = client(&common, "host-b") else { panic!("accepted") };
    assert_eq!(found, "CN=Host-A");
    assert!(matches!(client(&both, "host-a"), Err(HandshakeError::WrongName { .. })));
    assert_eq!(client(&both, "host-b"), Ok(()));
    let address = authority.issue(|request| request.common_name(HOST));
    assert!(matches!(client(&address, HOST), Err(HandshakeError::WrongName { .. })), "as GnuTLS, measured");
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&options(&authority, &own), Some(HOST)).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority.ca()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let client = builder.unwrap().with_root_certificates(roots).with_no_client_auth();
    let (near, far) = duplex(PIPE);
    let said = runtime().block_on(async {
        let name = ServerName::try_from(HOST).unwrap();
        let connector = TlsConnector::from(Arc::new(client));
        tokio::join!(server.accept(near), connector.connect(name, far)).0.map(drop)
    });
    assert_eq!(said, Err(HandshakeError::NoCertificate));
}

#[test]
fn a_certificate_for_another_use_is_refused() {
    let authority = Authority::new();
    let servers_only = authority.issue(|request| request.address(HOST).for_servers_only());
    assert_eq!(both_say(&authority, &servers_only, None), [Err(HandshakeError::WrongPurpose), Ok(())]);
}

#[test]
fn a_certificate_of_a_ca_is_refused() {
    let authority = Authority::new();
    let is_ca = authority.issue(|request| request.address(HOST).ca());
    assert_eq!(both_say(&authority, &is_ca, None), [Err(HandshakeError::IsCa), Err(HandshakeError::IsCa)]);
}

#[test]
fn a_peer_issues_no_certificates() {
    let authority = Authority::new();
    let peer = authority.issue(|request| request.address("127.0.0.2"));
    let forged = authority.issue_by(&peer, |request| request.address(HOST));
    for said in both_say(&authority, &forged, None) {
        assert!(matches!(said, Err(HandshakeError::UnknownCa | HandshakeError::Other(_))), "{said:?}");
    }
}

#[test]
fn no_record_is_sent_after_a_handshake_or_with_another_write() {
    let authority = Authority::new();
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&options(&authority, &own), Some(HOST)).unwrap();
    let client = TlsClient::new(&options(&authority, &own), Some(HOST)).unwrap();
    let (near, far) = pair();
    let mut raw = far.try_clone().unwrap();
    let connect = spawn(move || client.connect(far).unwrap());
    runtime().block_on(async {
        let mut near = server.accept(tokio::net::UnixStream::from_std(near).unwrap()).await.unwrap();
        let _client = connect.join().unwrap();
        raw.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let ticket = raw.read(&mut [0]);
        assert!(ticket.is_err(), "a session ticket: {ticket:?}");
        for len in [24, 4096, 32] {
            near.write_all(&vec![7; len]).await.unwrap();
        }
        near.flush().await.unwrap();
    });
    records(&mut raw, &[24, 4096, 32]);
}

/// Reads records, and expects these numbers of bytes inside them.
fn records(raw: &mut UnixStream, expected: &[usize]) {
    raw.set_read_timeout(Some(LIMIT)).unwrap();
    for len in expected {
        let mut head = [0; 5];
        raw.read_exact(&mut head).unwrap();
        // Of TLS 1.3: one byte of the record's kind, and 16 of its tag.
        let inside = usize::from(u16::from_be_bytes([head[3], head[4]]));
        assert_eq!((head[0], inside), (23, len + 17));
        raw.read_exact(&mut vec![0; inside]).unwrap();
    }
}

/// A client and a server that accept each other; the server's socket, too.
struct Accepted {
    runtime: Runtime,
    near: TlsStream<tokio::net::UnixStream>,
    raw: UnixStream,
    far: EncryptedStream<UnixStream>,
}

fn accepted() -> Accepted {
    let authority = Authority::new();
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&options(&authority, &own), Some(HOST)).unwrap();
    let client = TlsClient::new(&options(&authority, &own), Some(HOST)).unwrap();
    let ((near, far), runtime) = (pair(), runtime());
    let raw = near.try_clone().unwrap();
    let connect = spawn(move || client.connect(far).unwrap());
    let near = runtime
        .block_on(async { server.accept(tokio::net::UnixStream::from_std(near).unwrap()).await.unwrap() });
    Accepted { runtime, near, raw, far: connect.join().unwrap() }
}

#[test]
fn each_write_of_a_client_is_a_record() {
    let Accepted { mut far, mut raw, .. } = accepted();
    for len in [24, 32] {
        far.write_all(&vec![7; len]).unwrap();
    }
    far.flush().unwrap();
    raw.set_nonblocking(false).unwrap();
    records(&mut raw, &[24, 32]);
}

#[test]
fn bytes_that_are_decrypted_already_are_announced() {
    let Accepted { runtime, mut near, mut far, .. } = accepted();
    assert!(!far.is_ready());
    assert_eq!(far.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    runtime.block_on(async {
        near.write_all(&[7; 3000]).await.unwrap();
        near.shutdown().await.unwrap();
    });
    assert_eq!(read(&mut far, 1000).unwrap(), [7; 1000]);
    assert!(far.is_ready());
    assert_eq!(read(&mut far, 2000).unwrap(), [7; 2000]);
    assert!(read(&mut far, 1).unwrap().is_empty(), "the end");
}

#[test]
fn a_client_s_end_waits_for_the_server_s() {
    let Accepted { runtime, mut near, far, .. } = accepted();
    let began = Instant::now();
    let ending = spawn(move || far.end(LIMIT).map(drop));
    runtime.block_on(async {
        assert_eq!(near.read(&mut [0]).await.unwrap(), 0, "the client's alert");
        near.shutdown().await.unwrap();
    });
    ending.join().unwrap().unwrap();
    assert!(began.elapsed() < LIMIT / 2);
    let Accepted { far, near: _silent, .. } = accepted();
    let began = Instant::now();
    far.end(Duration::from_millis(100)).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(100));
}

#[test]
fn a_client_sends_no_alert_to_a_server_it_refuses() {
    let (authority, other) = (Authority::new(), Authority::new());
    let stranger = other.issue(|request| request.address(HOST));
    let own = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&any_name(options(&authority, &stranger)), Some(HOST)).unwrap();
    let client = TlsClient::new(&options(&authority, &own), Some(HOST)).unwrap();
    let (near, far) = pair();
    let kept = far.try_clone().unwrap();
    let connect = spawn(move || client.connect(far).map(drop));
    runtime().block_on(async {
        let accept = server.accept(tokio::net::UnixStream::from_std(near).unwrap());
        let accepted = timeout(Duration::from_millis(500), accept).await;
        assert!(accepted.is_err(), "{accepted:?}");
    });
    assert_eq!(connect.join().unwrap(), Err(HandshakeError::UnknownCa));
    drop(kept);
}

#[test]
fn a_peer_without_tls_is_named() {
    let authority = Authority::new();
    let server = authority.issue(|request| request.address(HOST));
    let server = TlsServer::new(&options(&authority, &server), Some(HOST)).unwrap();
    let said = runtime().block_on(async {
        let (near, mut far) = duplex(PIPE);
        far.write_all(&[4, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
        server.accept(near).await.map(drop)
    });
    assert_eq!(said, Err(HandshakeError::NotTls));
    let said = runtime().block_on(async {
        let (near, far) = duplex(PIPE);
        drop(far);
        server.accept(near).await.map(drop)
    });
    assert_eq!(said, Err(HandshakeError::Closed));
}

#[test]
fn missing_and_damaged_files_are_named_with_their_option() {
    let authority = Authority::new();
    let good = options(&authority, &authority.issue(|request| request.address(HOST)));
    let other = options(&authority, &authority.issue(|request| request.address(HOST)));
    let says = |options: TlsOptions| format!("{:#}", TlsServer::new(&options, Some(HOST)).unwrap_err());
    let empty = || Some(authority.file("empty", ""));
    let missing = || Some(authority.path("missing"));
    assert!(says(TlsOptions { ca: missing(), ..good.clone() }).contains("--tls-cacert"));
    assert!(says(TlsOptions { ca: empty(), ..good.clone() }).contains("--tls-cacert"));
    assert!(says(TlsOptions { crl: missing(), ..good.clone() }).contains("--tls-cacrl"));
    assert!(says(TlsOptions { crl: empty(), ..good.clone() }).contains("--tls-cacrl"));
    assert!(says(TlsOptions { certificate: empty(), ..good.clone() }).contains("--tls-cert"));
    assert!(says(TlsOptions { key: empty(), ..good.clone() }).contains("--tls-key"));
    let mixed = says(TlsOptions { key: other.key, ..good.clone() });
    assert!(mixed.contains("--tls-cert") && mixed.contains("--tls-key"), "{mixed}");
    let any = format!("{:#}", TlsServer::new(&good, Some("0.0.0.0")).unwrap_err());
    assert!(any.contains("--tls-no-cn-verify"), "{any}");
    TlsServer::new(&any_name(good), Some("0.0.0.0")).unwrap();
}
