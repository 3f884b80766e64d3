// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers GET /metrics. One request a connection, in bounded time: a slow client delays no other work of the
//! agent.

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rewake_node_cache::{CacheContents, NodeCache};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::exposition::{CONTENT, Exposition};
use super::shared_look::{REQUEST_LIMIT, SharedLook};
use crate::agent::cache::AgentCache;
use crate::agent::session::Registry;

/// Clients at once. More wait to be accepted.
const MAX_SCRAPERS: usize = 8;
/// Bytes of a request's head: the least that hyper allows.
const HEAD_LIMIT: usize = 8 << 10;
/// Pause after a client could not be accepted, because descriptors or memory are then used up for a moment.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Answers clients as long as the agent runs.
pub(in crate::agent) async fn serve(listener: TcpListener, registry: Rc<Registry>, cache: AgentCache) {
    let cache = cache.cache.map(|cache| {
        let looked_at = Arc::clone(&cache);
        (cache, SharedLook::new(move || looked_at.contents()))
    });
    let (scraper, room) = (Rc::new(Scraper { registry, cache }), Arc::new(Semaphore::new(MAX_SCRAPERS)));
    loop {
        // It fails only if the semaphore was closed, which no code does.
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let scraper = Rc::clone(&scraper);
                tokio::task::spawn_local(async move {
                    scraper.connection(stream).await;
                    drop(place);
                });
            }
            Err(error) => {
                warn!(%error, "accepting a client of the metrics");
                sleep(ACCEPT_INTERVAL).await;
            }
        }
    }
}

struct Scraper {
    registry: Rc<Registry>,
    cache: Option<(Arc<NodeCache>, Rc<SharedLook<CacheContents>>)>,
}

impl Scraper {
    async fn connection(self: Rc<Self>, stream: TcpStream) {
        let service = service_fn(|request| {
            let scraper = Rc::clone(&self);
            async move { Ok::<_, Infallible>(scraper.answer(&request).await) }
        });
        let mut http = http1::Builder::new();
        http.keep_alive(false).max_buf_size(HEAD_LIMIT);
        match timeout(REQUEST_LIMIT, http.serve_connection(TokioIo::new(stream), service)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "a client of the metrics was dropped"),
            Err(_) => debug!("a client of the metrics was dropped: no request within {REQUEST_LIMIT:?}"),
        }
    }

    async fn answer(&self, request: &Request<Incoming>) -> Response<String> {
        if request.uri().path() != "/metrics" {
            return text(StatusCode::NOT_FOUND, "this is `rewake serve`: GET /metrics\n");
        }
        if request.method() != Method::GET {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "expected GET\n");
            answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            return answer;
        }
        let mut answer = Response::new(self.scrape().await);
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(CONTENT));
        answer
    }

    async fn scrape(&self) -> String {
        let cache = match &self.cache {
            Some((cache, contents)) => Some((cache.counts(), contents.latest().await)),
            None => None,
        };
        Exposition { status: self.registry.status(), cache }.text()
    }
}

fn text(status: StatusCode, text: &str) -> Response<String> {
    let mut answer = Response::new(text.to_owned());
    *answer.status_mut() = status;
    answer
}
