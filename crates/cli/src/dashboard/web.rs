//! The page, and what it asks for while it is open.

use super::Shown;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream::{self, Stream};
use poseidon::live::LiveLevel;
use poseidon::{LiveJob, METRICS_CONTENT_TYPE};
use serde::Serialize;
use serde_json::Value;
use std::convert::Infallible;
use std::net::TcpListener;
use tokio::sync::watch::Receiver;

/// Answers callers until nobody tells what to show any more.
pub(super) fn serve(listener: TcpListener, shown: Receiver<Shown>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime.inspect_err(|e| tracing::error!("no dashboard: {e}")) else { return };
    let is_private = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let app = router(shown.clone(), is_private);
    let served = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let mut ended = shown;
        let over = async move { while ended.changed().await.is_ok() {} };
        tokio::select! {
            served = async { axum::serve(listener, app).await } => served,
            () = over => Ok(()),
        }
    });
    if let Err(error) = served {
        tracing::error!("the dashboard has ended: {error}");
    }
}

fn router(shown: Receiver<Shown>, is_private: bool) -> Router {
    let check = move |request: Request, next: Next| async move {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        if is_private && !host.is_some_and(names_this_machine) {
            // A page of somebody else could give its own name this address, and read the answer.
            let words = "This page is for this machine only: ask for 127.0.0.1 or localhost.\n";
            return (StatusCode::MISDIRECTED_REQUEST, words).into_response();
        }
        next.run(request).await
    };
    Router::new()
        .route("/", get(page))
        .route("/live", get(live))
        .route("/plan", get(plan))
        .route("/events", get(events))
        .route("/metrics", get(metrics))
        .fallback(|| async {
            (StatusCode::NOT_FOUND, "There is / here, /live, /plan and /metrics.\n")
        })
        .layer(middleware::from_fn(check))
        .with_state(shown)
}

/// Whether the host that a request is for can only be this machine.
fn names_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_loopback = |ip: std::net::IpAddr| ip.is_loopback();
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_loopback)
}

/// The page has what is known already, so that it is never empty.
async fn page(State(shown): State<Receiver<Shown>>) -> Response {
    let now = shown.borrow().clone();
    let first = First { news: News::of(&now), plan: &now.plan };
    // In a script no tag may end or begin.
    let first = text(&first).replace('<', "\\u003c");
    let html = PAGE.replace("/*FIRST*/null", &first);
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                  connect-src 'self'; img-src data:; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, html).into_response()
}

async fn live(State(shown): State<Receiver<Shown>>) -> Response {
    json_response(&News::of(&shown.borrow()))
}

async fn plan(State(shown): State<Receiver<Shown>>) -> Response {
    json_response(&*shown.borrow().plan)
}

async fn metrics(State(shown): State<Receiver<Shown>>) -> Response {
    let now = shown.borrow().clone();
    match (now.job, now.error) {
        (Some(job), None) => {
            ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], job.metrics()).into_response()
        }
        // Numbers of a job that is not heard any more would look like those of one that stands still.
        (_, error) => {
            let words = error.unwrap_or_else(|| "nothing was heard of the job yet".into());
            (StatusCode::SERVICE_UNAVAILABLE, format!("{words}\n")).into_response()
        }
    }
}

/// Everything that is heard of the job, as it is heard.
async fn events(
    State(shown): State<Receiver<Shown>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let told = stream::unfold(shown, |mut shown| async move {
        shown.changed().await.ok()?;
        let data = text(&News::of(&shown.borrow_and_update()));
        Some((Ok(Event::default().data(data)), shown))
    });
    Sse::new(told).keep_alive(KeepAlive::default())
}

/// What a page that is opened knows already.
#[derive(Serialize)]
struct First<'a> {
    news: News<'a>,
    plan: &'a Value,
}

/// What a page is told once a second.
#[derive(Serialize)]
struct News<'a> {
    job: Option<&'a LiveJob>,
    concerns: Option<Vec<(LiveLevel, String)>>,
    heard_ms: u64,
    error: Option<&'a str>,
}

impl<'a> News<'a> {
    fn of(shown: &'a Shown) -> Self {
        let job = shown.job.as_deref();
        let concerns = job.map(LiveJob::concerns);
        Self { job, concerns, heard_ms: shown.heard_ms, error: shown.error.as_deref() }
    }
}

/// At once, and not by way of a tree of values: the page hears so much every second, as long as the
/// job runs.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers, words and lists of them are JSON")
}

fn json_response(value: &impl Serialize) -> Response {
    let mut headers = HeaderMap::new();
    let json = header::HeaderValue::from_static("application/json");
    headers.insert(header::CONTENT_TYPE, json);
    (headers, text(value)).into_response()
}

const PAGE: &str = include_str!("page.html");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_answered_where_it_is_private() {
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.8.0.1", "[::1]:8080"] {
            assert!(names_this_machine(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:8080", "10.0.0.1:8080", "localhost.evil", "[::2]"]
        {
            assert!(!names_this_machine(host), "{host}");
        }
    }
}
