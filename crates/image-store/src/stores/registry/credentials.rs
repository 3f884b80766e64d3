// SPDX-License-Identifier: MIT OR Apache-2.0
//! The credentials for a registry, from the files of podman and Docker: `podman login`, `skopeo login` and
//! `docker login` write them.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use docker_credential::{CredentialRetrievalError, DockerCredential, get_credential_from_reader};
use nix::unistd::getuid;

/// The names under which credentials for Docker Hub are stored: by podman, and by Docker.
const DOCKER_HUB: [&str; 2] = ["docker.io", "https://index.docker.io/v1/"];
/// The most bytes of a file that are read.
const MAX_FILE: u64 = 1 << 20;
/// What a credential helper writes if it has none for a registry.
const NOT_FOUND: &str = "credentials not found";

/// A user of a registry. It has no `Debug`, so that no message has the password.
#[derive(Clone)]
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
}

/// Reads the credentials for a registry. `variable` reads the environment. Without any, requests are
/// anonymous.
///
/// # Errors
/// A file cannot be read, or has them in a way that is not followed here.
pub(super) fn read(
    registry: &str,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Option<Login>, String> {
    let servers = if registry == DOCKER_HUB[0] { DOCKER_HUB.to_vec() } else { vec![registry] };
    for path in files(variable) {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let mut text = Vec::new();
        let read = file.take(MAX_FILE).read_to_end(&mut text);
        read.map_err(|error| format!("{}: {error}", path.display()))?;
        for server in &servers {
            match get_credential_from_reader(&*text, server) {
                Ok(DockerCredential::UsernamePassword(user, password)) => {
                    return Ok(Some(Login { user, password }));
                }
                Ok(DockerCredential::IdentityToken(_)) => {
                    return Err(format!(
                        "{}: it has an identity token for {registry}, which is not followed here: log in \
                         with a user and a password, or an access token",
                        path.display()
                    ));
                }
                Err(CredentialRetrievalError::NoCredentialConfigured) => {}
                Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains(NOT_FOUND) => {
                }
                Err(error) => return Err(refused(&path, registry, &error)),
            }
        }
    }
    Ok(None)
}

/// Where credentials may be, the first place first.
fn files(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(path) = variable("REGISTRY_AUTH_FILE") {
        return vec![path.into()];
    }
    let below = |name: &str, path: &str| variable(name).map(|folder| Path::new(&folder).join(path));
    let podman = below("XDG_RUNTIME_DIR", "containers/auth.json")
        .unwrap_or_else(|| format!("/run/containers/{}/auth.json", getuid()).into());
    let docker = below("DOCKER_CONFIG", "config.json").or_else(|| below("HOME", ".docker/config.json"));
    [podman].into_iter().chain(docker).collect()
}

/// Says what is wrong. What a helper has written is not shown: it may have the password.
fn refused(path: &Path, registry: &str, error: &CredentialRetrievalError) -> String {
    let what = match error {
        CredentialRetrievalError::HelperFailure { helper, .. } => {
            format!("the credential helper {helper:?} failed")
        }
        CredentialRetrievalError::ConfigReadError => "it is not JSON as `docker login` writes it".to_owned(),
        other => other.to_string(),
    };
    format!("{}: no credentials for {registry}: {what}", path.display())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    /// Reads from these files below the home directory and the runtime directory.
    fn found(docker: Option<&str>, podman: Option<&str>) -> Result<String, String> {
        found_for("registry.example:5000", docker, podman)
    }

    fn found_for(registry: &str, docker: Option<&str>, podman: Option<&str>) -> Result<String, String> {
        let home = tempfile::tempdir().unwrap();
        for (name, text) in [(".docker/config.json", docker), ("containers/auth.json", podman)] {
            let path = home.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            text.inspect(|text| fs::write(&path, text).unwrap());
        }
        let auth =
            read(registry, |name| ["HOME", "XDG_RUNTIME_DIR"].contains(&name).then(|| home.path().into()));
        auth.map(|login| match login {
            Some(Login { user, password }) => format!("{user}:{password}"),
            None => "anonymous".to_owned(),
        })
    }

    #[test]
    fn podmans_file_is_first_and_then_that_of_docker() {
        // "user:secret" and "other:word".
        let podman = r#"{"auths":{"registry.example:5000":{"auth":"dXNlcjpzZWNyZXQ="}}}"#;
        let docker = r#"{"auths":{"registry.example:5000":{"auth":"b3RoZXI6d29yZA=="}}}"#;
        assert_eq!(found(Some(docker), Some(podman)), Ok("user:secret".to_owned()));
        assert_eq!(found(Some(docker), Some("{}")), Ok("other:word".to_owned()));
        assert_eq!(found(Some(docker), None), Ok("other:word".to_owned()));
        let elsewhere = r#"{"auths":{"elsewhere":{"auth":"b3RoZXI6d29yZA=="}}}"#;
        assert_eq!(found(Some(elsewhere), None), Ok("anonymous".to_owned()));
        assert_eq!(found(None, None), Ok("anonymous".to_owned()));
    }

    #[test]
    fn credentials_for_docker_hub_have_two_names() {
        for name in ["docker.io", "https://index.docker.io/v1/"] {
            let file = format!(r#"{{"auths":{{"{name}":{{"auth":"dXNlcjpzZWNyZXQ="}}}}}}"#);
            assert_eq!(found_for("docker.io", None, Some(&file)), Ok("user:secret".to_owned()), "{name}");
        }
    }

    #[test]
    fn podmans_file_without_a_runtime_directory_is_that_of_the_user() {
        let expected = format!("/run/containers/{}/auth.json", getuid());
        assert_eq!(files(|_| None), [Path::new(&expected)]);
    }

    #[test]
    fn what_is_not_followed_is_named_without_secrets() {
        let token = r#"{"auths":{"registry.example:5000":{"auth":"eDp5","identitytoken":"s3cr3t"}}}"#;
        let refused = found(Some(token), None).unwrap_err();
        assert!(refused.contains("identity token") && !refused.contains("s3cr3t"), "{refused}");
        assert!(found(Some("auths"), None).unwrap_err().contains("it is not JSON"));
        let base64 = r#"{"auths":{"registry.example:5000":{"auth":"s3cr3t!"}}}"#;
        let refused = found(Some(base64), None).unwrap_err();
        assert!(refused.contains("no credentials for registry.example:5000"), "{refused}");
        assert!(!refused.contains("s3cr3t") && refused.lines().count() == 1, "{refused}");
    }

    #[test]
    fn a_named_file_is_the_only_one() {
        let name = |name: &str| OsString::from_vec([b"/caf\xe9/", name.as_bytes()].concat());
        let found = files(|variable| Some(name(variable)));
        assert_eq!(found, [Path::new(&name("REGISTRY_AUTH_FILE"))]);
    }
}
