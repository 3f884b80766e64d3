// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which peers are accepted, on both sides, and what those that are not are called.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rewake_criu_tls::{HandshakeError, TlsClient, TlsOptions, TlsServer};
use rewake_testkit::authority::{Authority, Issued};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

const HOST: &str = "127.0.0.1";
/// Bytes on the way.
const PIPE: usize = 64 << 10;

/// What each side says about the other; an accepted client also gets a byte.
#[derive(Debug, PartialEq, Eq)]
struct BothSides {
    server: Result<(), HandshakeError>,
    client: Result<(), HandshakeError>,
}

const ACCEPTED: BothSides = BothSides { server: Ok(()), client: Ok(()) };

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

fn shake(server: &TlsServer, client: &TlsClient) -> BothSides {
    let (near, far) = duplex(PIPE);
    runtime().block_on(async {
        let serve = async {
            let mut stream = server.accept(near).await?;
            stream.write_all(b"x").await.unwrap();
            stream.flush().await.unwrap();
            Ok(())
        };
        let connect = async {
            let mut stream = client.connect(far).await?;
            let read = stream.read_exact(&mut [0]).await.map(drop);
            read.map_err(|error| HandshakeError::of(&error).unwrap_or(HandshakeError::Closed))
        };
        let (server, client) = tokio::join!(serve, connect);
        BothSides { server, client }
    })
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
    let (near, far) = duplex(PIPE);
    runtime().block_on(async {
        let (near, far) = tokio::join!(server.accept(near), client.connect(far));
        let (mut near, mut raw) = (near.unwrap(), far.unwrap().into_inner().0);
        let ticket = timeout(Duration::from_millis(50), raw.read_u8()).await;
        assert!(ticket.is_err(), "a session ticket: {ticket:?}");
        for len in [24, 4096, 32] {
            near.write_all(&vec![7; len]).await.unwrap();
        }
        near.flush().await.unwrap();
        for len in [24, 4096, 32] {
            let mut head = [0; 5];
            raw.read_exact(&mut head).await.unwrap();
            // Of TLS 1.3: one byte of the record's kind, and 16 of its tag.
            let inside = usize::from(u16::from_be_bytes([head[3], head[4]]));
            assert_eq!((head[0], inside), (23, len + 17));
            raw.read_exact(&mut vec![0; inside]).await.unwrap();
        }
    });
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
