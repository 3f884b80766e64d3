// SPDX-License-Identifier: MIT OR Apache-2.0
//! HTTP with a registry: each request has limits and the authorization that the registry wants, and each
//! answer has a limit for its length.

use std::error::Error;
use std::fmt;

use reqwest::header::{AUTHORIZATION, HeaderValue, LOCATION, WWW_AUTHENTICATE};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use tokio::sync::Mutex;

use super::answers::{self, Challenge, Refusal, is_loopback, permitted};
use super::credentials::Login;
use crate::answer::bounded;
use crate::connect::RequestLimits;

/// The most bytes of an answer that is a manifest, or a list of tags.
pub(super) const MAX_ANSWER: usize = 4 << 20;
/// The most bytes of an answer that is a token: it is sent in a header, and servers take 8 to 64 KiB of
/// headers.
const MAX_TOKEN: usize = 64 << 10;
/// The most bytes of an answer that is an error.
const MAX_REFUSAL: usize = 64 << 10;
/// Redirections that are followed.
const MAX_REDIRECTS: usize = 10;
/// What the program calls itself.
const USER_AGENT: &str = concat!("rewake/", env!("CARGO_PKG_VERSION"));
/// The server of Docker Hub, which has another name in the names of images.
const DOCKER_HUB: [&str; 2] = ["docker.io", "index.docker.io"];

/// Why a request failed.
#[derive(Debug)]
pub(super) enum RegistryError {
    /// The registry does not have it.
    Missing,
    /// In one line and without addresses, because addresses of redirections may contain signatures. A retry
    /// gets the same answer.
    Refused(String),
    /// The same, and the same request may succeed later.
    Failed(String),
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the registry does not have it"),
            Self::Refused(reason) | Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl Error for RegistryError {}

impl From<Refusal> for RegistryError {
    fn from(Refusal { reason, is_missing, may_pass }: Refusal) -> Self {
        match (is_missing, may_pass) {
            (true, _) => Self::Missing,
            (false, true) => Self::Failed(reason),
            (false, false) => Self::Refused(reason),
        }
    }
}

impl From<reqwest::Error> for RegistryError {
    fn from(error: reqwest::Error) -> Self {
        let mut cause: &dyn Error = &error;
        // What is around the first cause has addresses.
        while let Some(source) = cause.source() {
            cause = source;
        }
        let reason = bounded(&format!("the connection failed: {cause}"));
        if error.is_redirect() || error.is_builder() { Self::Refused(reason) } else { Self::Failed(reason) }
    }
}

/// What a request has for the registry, and for no other server.
#[derive(Clone, PartialEq, Eq)]
enum Authorization {
    /// The user and the password.
    Login,
    Token(HeaderValue),
}

/// A repository's requests.
pub(super) struct RegistryRequests {
    client: Client,
    /// The address of the repository, with a slash at its end.
    base: Url,
    /// What a token is for.
    scope: String,
    login: Option<Login>,
    /// What the registry has wanted so far. One request at a time gets a new one.
    authorization: Mutex<Option<Authorization>>,
    is_own: bool,
}

impl RegistryRequests {
    /// `write`: for a push.
    pub(super) fn new(
        registry: &str,
        repository: &str,
        login: Option<Login>,
        write: bool,
        limits: RequestLimits,
    ) -> Result<Self, String> {
        // A second call, or another provider of the program's, is no error.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let is_own = is_loopback(registry);
        let (scheme, host) = (
            if is_own { "http" } else { "https" },
            if registry == DOCKER_HUB[0] { DOCKER_HUB[1] } else { registry },
        );
        let base = Url::parse(&format!("{scheme}://{host}/v2/{repository}/"));
        let base = base.map_err(|error| format!("{registry} is no address of a registry: {error}"))?;
        let policy = Policy::custom(move |redirect| match permitted(redirect.url(), is_own) {
            Ok(()) if redirect.previous().len() <= MAX_REDIRECTS => redirect.follow(),
            Ok(()) => redirect.error(format!("more than {MAX_REDIRECTS} redirections")),
            Err(refused) => redirect.error(refused),
        });
        let mut client = Client::builder()
            .user_agent(USER_AGENT)
            .redirect(policy)
            // An address may have a signature, which the next server must not see.
            .referer(false)
            .connect_timeout(limits.connect)
            .read_timeout(limits.silence)
            .timeout(limits.request);
        if is_own {
            // To a proxy of the environment a server of this host would be another one.
            client = client.no_proxy();
        }
        let client = client.build().map_err(|error| RegistryError::from(error).to_string())?;
        let scope = format!("repository:{repository}:{}", if write { "pull,push" } else { "pull" });
        Ok(Self { client, base, scope, login, authorization: Mutex::default(), is_own })
    }

    /// Returns the address of something in the repository.
    pub(super) fn address(&self, path: &str) -> Result<Url, RegistryError> {
        let joined = self.base.join(path);
        joined.map_err(|error| RegistryError::Refused(bounded(&format!("{path} is no address: {error}"))))
    }

    /// Returns where an upload continues: the address in an answer, or none.
    pub(super) fn location(&self, answer: &Response) -> Result<Option<Url>, RegistryError> {
        let header = answer.headers().get(LOCATION).map(HeaderValue::as_bytes);
        answers::location(answer.url(), header, self.is_own).map_err(RegistryError::Refused)
    }

    /// Sends a request, and again with what the registry wants to see. `with` adds headers and the body.
    pub(super) async fn send(
        &self,
        method: Method,
        url: &Url,
        with: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response, RegistryError> {
        let is_registry = |url: &Url| url.origin() == self.base.origin();
        let mut known = self.authorization.lock().await.clone().filter(|_| is_registry(url));
        let mut is_first = true;
        loop {
            let request = with(self.client.request(method.clone(), url.clone()));
            let answer = match &known {
                Some(Authorization::Token(token)) => request.header(AUTHORIZATION, token.clone()),
                Some(Authorization::Login) => self.with_login(request),
                None => request,
            };
            let answer = answer.send().await?;
            if answer.status().is_success() {
                return Ok(answer);
            }
            // Another server may have redirected the request to the registry, and the next one would go to
            // that server.
            let is_asked =
                answer.status() == StatusCode::UNAUTHORIZED && is_registry(url) && is_registry(answer.url());
            if is_first
                && is_asked
                && let Some(new) = self.authorize(&answer, known).await?
            {
                (known, is_first) = (Some(new), false);
                continue;
            }
            let status = answer.status();
            return Err(answers::refusal(status, &beginning(answer).await).into());
        }
    }

    fn with_login(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.login {
            Some(login) => request.basic_auth(&login.user, Some(&login.password)),
            None => request,
        }
    }

    /// Gets what the registry wants to see in the place of `refused`, or `None` if there is nothing else.
    async fn authorize(
        &self,
        answer: &Response,
        refused: Option<Authorization>,
    ) -> Result<Option<Authorization>, RegistryError> {
        let mut current = self.authorization.lock().await;
        if current.is_some() && *current != refused {
            // Another request was quicker.
            return Ok(current.clone());
        }
        let headers = answer.headers().get_all(WWW_AUTHENTICATE);
        let challenge = answers::challenge(headers.iter().map(HeaderValue::as_bytes), self.is_own);
        let new = match challenge.map_err(RegistryError::Refused)? {
            Some(Challenge::Bearer { realm, service }) => {
                Some(Authorization::Token(self.token(realm, service).await?))
            }
            Some(Challenge::Basic) => self.login.as_ref().map(|_| Authorization::Login),
            None => None,
        };
        if new == refused {
            return Ok(None);
        }
        current.clone_from(&new);
        Ok(new)
    }

    /// Gets a token, for the login if there is one.
    async fn token(&self, mut realm: Url, service: Option<String>) -> Result<HeaderValue, RegistryError> {
        realm.query_pairs_mut().append_pair("scope", &self.scope);
        if let Some(service) = service {
            realm.query_pairs_mut().append_pair("service", &service);
        }
        let answer = self.with_login(self.client.get(realm)).send().await?;
        let status = answer.status();
        if status.is_success() {
            return answers::token(&body(answer, MAX_TOKEN, "a token").await?)
                .map_err(RegistryError::Refused);
        }
        let said = String::from_utf8_lossy(&beginning(answer).await).into_owned();
        let said = if said.trim().is_empty() { status.to_string() } else { said };
        let reason = bounded(&format!("the server of the registry's tokens refused: {said}"));
        let refusal = answers::refusal(status, &[]);
        Err(Refusal { reason, is_missing: false, ..refusal }.into())
    }
}

/// Reads an answer of at most `most` bytes. `what` it should be, for messages.
pub(super) async fn body(mut answer: Response, most: usize, what: &str) -> Result<Vec<u8>, RegistryError> {
    let mut bytes = Vec::new();
    while let Some(part) = answer.chunk().await? {
        if bytes.len() + part.len() > most {
            return Err(RegistryError::Refused(format!(
                "the registry's answer is longer than {most} bytes: expected {what}"
            )));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

/// Reads the beginning of an answer that is an error: as much as arrives.
async fn beginning(mut answer: Response) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Ok(Some(part)) = answer.chunk().await {
        let part = &part[..part.len().min(MAX_REFUSAL - bytes.len())];
        bytes.extend_from_slice(part);
        if bytes.len() == MAX_REFUSAL {
            break;
        }
    }
    bytes
}
