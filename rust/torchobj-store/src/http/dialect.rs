//! The trait by which a provider interprets errors and redirects. Sends no requests.

use async_trait::async_trait;
use torchobj_core::error::{Error, Operation};

use super::{ErrorResponse, HostAddress, Origin, Refusal};

/// The conventions of a provider: URLs, error responses and redirects.
#[async_trait]
pub(crate) trait Dialect: Send + Sync {
    /// The URL of a key or of the bucket, for messages.
    fn url(&self, key: Option<&str>) -> String;

    /// Parses an error response.
    fn refusal(&self, operation: Operation, response: &ErrorResponse<'_>) -> Refusal;

    /// Returns where to send requests that are redirected to `server`; `None` if it does not belong to the same store, and so
    /// must not receive signatures, tokens or keys.
    fn redirected(&self, server: &HostAddress) -> Option<Origin>;

    /// Updates the region, the clock skew or the credentials from an error response. Returns the error with the kind that
    /// determines whether the request is retried.
    async fn recover(&self, operation: Operation, response: &ErrorResponse<'_>, error: Error) -> Error;
}

/// Turns an error response into an error.
pub(crate) async fn error_of(
    dialect: &dyn Dialect,
    operation: Operation,
    key: Option<&str>,
    response: &ErrorResponse<'_>,
) -> Error {
    let error = dialect.refusal(operation, response).into_error(operation, dialect.url(key), response);
    dialect.recover(operation, response, error).await
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use torchobj_core::error::{ErrorKind, Result};
    use torchobj_core::types::Payload;

    use super::super::{
        Authorize, Dialer, Failure, PoolMap, Request, RequestHead, Response, Unauthorized, kind_of_status, send,
    };
    use super::*;
    use crate::config::HttpConfig;
    use crate::fake::{Fake, http_response};

    struct Bearer(&'static str);

    impl Authorize for Bearer {
        fn authorize(&self, _: &Unauthorized<'_>, head: &mut RequestHead) -> Result<(), Failure> {
            head.push("authorization", &format!("Bearer {}", self.0))
        }
    }

    /// A provider whose errors are a code, a space and a message.
    struct TestDialect {
        pools: PoolMap,
        refusals: AtomicU32,
    }

    impl TestDialect {
        fn new() -> Self {
            let pools = PoolMap::new(Arc::new(Dialer::new(&HttpConfig::default()).unwrap()));
            Self { pools, refusals: AtomicU32::new(0) }
        }

        fn origin(&self, server: &HostAddress) -> Origin {
            Origin { pool: self.pools.pool(server), host: server.host_header(), path: b"/v1/".to_vec() }
        }

        async fn get(&self, fake: &Fake, token: &'static str) -> Result<Response> {
            let port = fake.url.rsplit_once(':').unwrap().1.parse().unwrap();
            let origin = self.origin(&HostAddress { host: "127.0.0.1".into(), port, tls: false });
            let payload = Payload::default();
            let request = Request {
                operation: Operation::Get,
                method: "GET",
                key: Some("a/b"),
                path: b"o/a%2Fb".to_vec(),
                query: &[("alt", "media"), ("fields", "a,b")],
                headers: vec![("x-project", Cow::Borrowed("p"))],
                payload: &payload,
            };
            send(&request, &origin, &Bearer(token), self).await
        }
    }

    #[async_trait]
    impl Dialect for TestDialect {
        fn url(&self, key: Option<&str>) -> String {
            ["test://b/", key.unwrap_or_default()].concat()
        }

        fn refusal(&self, operation: Operation, response: &ErrorResponse<'_>) -> Refusal {
            let text = String::from_utf8_lossy(response.body);
            let (code, message) = text.split_once(' ').unzip();
            let [code, message] = [code, message].map(|text| text.map(str::to_owned));
            let kind = match code.as_deref() {
                Some("expired") => ErrorKind::ExpiredCredentials,
                _ => kind_of_status(operation, response.status),
            };
            Refusal { kind, code, message, request_id: (response.header)("x-id"), hint: Some("log in".into()) }
        }

        fn redirected(&self, server: &HostAddress) -> Option<Origin> {
            (server.host == "localhost").then(|| self.origin(server))
        }

        async fn recover(&self, _: Operation, response: &ErrorResponse<'_>, error: Error) -> Error {
            self.refusals.fetch_add(u32::from(response.status), Ordering::Relaxed);
            error
        }
    }

    #[tokio::test]
    async fn a_token_is_sent_again_after_a_redirect_that_the_dialect_accepts() {
        let fake = Fake::start(|head| {
            let host = head.lines().find(|line| line.starts_with("host: ")).unwrap();
            let location = format!("Location: http://localhost:{}/other\r\n", host.rsplit_once(':').unwrap().1);
            if host.contains("localhost") { http_response(200, "", "x") } else { http_response(307, &location, "") }
        })
        .await;
        let response = TestDialect::new().get(&fake, "t0ken").await.unwrap();
        assert_eq!((response.status, response.length()), (200, Some(1)));
        assert_eq!(fake.heads().len(), 2);
        for head in fake.heads() {
            assert!(head.starts_with("GET /v1/o/a%2Fb?alt=media&fields=a%2Cb HTTP/1.1\r\n"), "{head}");
            assert!(
                head.contains("\r\nx-project: p\r\n") && head.contains("\r\nauthorization: Bearer t0ken\r\n"),
                "{head}"
            );
            assert!(!head.contains("content-length"), "{head}");
        }
    }

    #[tokio::test]
    async fn an_error_response_becomes_the_error_that_the_dialect_parses() {
        for (status, body, expected) in [
            (401, "expired since noon", "401 expired: since noon, after 1 attempt (request id i1); log in"),
            (429, "", "429: Too Many Requests, after 1 attempt (request id i1); log in"),
            (308, "", "308: Permanent Redirect, after 1 attempt (request id i1); log in"),
        ] {
            let fake = Fake::start(move |_| http_response(status, "x-id: i1\r\n", body)).await;
            let dialect = TestDialect::new();
            let error = dialect.get(&fake, "t0ken").await.err().unwrap();
            assert_eq!(error.to_string(), format!("get test://b/a/b: {expected}"));
            assert_eq!(error.kind() == ErrorKind::ExpiredCredentials, status == 401);
            assert_eq!(dialect.refusals.load(Ordering::Relaxed), u32::from(status));
        }
    }

    #[tokio::test]
    async fn a_token_that_no_header_can_contain_is_neither_sent_nor_shown() {
        let fake = Fake::start(|_| http_response(200, "", "x")).await;
        let error = TestDialect::new().get(&fake, "CANARY\r\nx-evil: 1").await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("authorization") && !error.to_string().contains("CANARY"), "{error}");
        assert_eq!(fake.heads(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn an_error_in_the_body_of_a_successful_response_is_an_error() {
        let fake = Fake::start(|_| http_response(200, "", "slow down")).await;
        let dialect = TestDialect::new();
        let response = dialect.get(&fake, "t0ken").await.unwrap();
        let error = response.unless_error(Operation::Get, Some("a/b"), &dialect).await.err().unwrap();
        assert_eq!((error.status(), error.code()), (Some(200), Some("slow")));
        let fake = Fake::start(|_| http_response(200, "", "data")).await;
        let response = dialect.get(&fake, "t0ken").await.unwrap();
        let mut response = response.unless_error(Operation::Get, Some("a/b"), &dialect).await.unwrap();
        assert_eq!(response.read_text(10).await.unwrap(), b"data");
    }
}
