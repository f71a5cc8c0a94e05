//! The HTTP client of the AWS SDK: hyper over our own connections, so that proxies, CA bundles and the closing of sockets
//! in a forked child apply to requests of the SDK too.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::body::SdkBody;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::Error as ClientError;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tower_service::Service;

use crate::http::{Dialer, HostAddress, Proxy, Transport, is_html};

/// The response to a request that deletes is a page for a browser: another server has answered, such as a login page.
#[derive(Debug)]
pub(super) struct PageError;

impl std::error::Error for PageError {}

impl fmt::Display for PageError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the response is a page, and not one of S3")
    }
}

/// The HTTP client of the AWS SDK.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    client: Client<Dial, SdkBody>,
    dialer: Arc<Dialer>,
}

impl Connector {
    /// A client over connections of `dialer`, which keeps idle ones for `keep_alive`.
    pub(super) fn new(dialer: Arc<Dialer>, keep_alive: Duration) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(keep_alive)
            .build(Dial(dialer.clone()));
        Self { client, dialer }
    }
}

impl HttpClient for Connector {
    fn http_connector(&self, _settings: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let mut request = match request.try_into_http1x() {
            Ok(request) => request,
            Err(error) => return HttpConnectorFuture::ready(Err(ConnectorError::user(error.into()))),
        };
        let forward_proxy = self.dialer.forward_proxy(&HostAddress::of(request.uri()));
        if let Some(authorization) = forward_proxy.and_then(Proxy::authorization) {
            let mut value = HeaderValue::from_str(authorization).expect("Base64 fits a header");
            value.set_sensitive(true);
            request.headers_mut().insert(http::header::PROXY_AUTHORIZATION, value);
        }
        let deletes = request.method() == Method::DELETE;
        let response = self.client.request(request);
        HttpConnectorFuture::new(async move {
            match response.await {
                Ok(response) if deletes && is_page(&response) => Err(ConnectorError::other(PageError.into(), None)),
                Ok(response) => HttpResponse::try_from(response.map(SdkBody::from_body_1_x))
                    .map_err(|error| ConnectorError::other(error.into(), None)),
                Err(error) => Err(ConnectorError::io(error.into())),
            }
        })
    }
}

/// Whether a successful response has a page as its body. S3 sends none, and the SDK does not look at it.
fn is_page<B>(response: &Response<B>) -> bool {
    let header = |name| response.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    response.status().is_success()
        && response.status() != StatusCode::NO_CONTENT
        && header(CONTENT_LENGTH) != Some("0")
        && header(CONTENT_TYPE).is_some_and(is_html)
}

/// The error of our dialer, if it caused an error of the SDK.
pub(super) fn dial_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.find(|cause| cause.downcast_ref().is_some_and(ClientError::is_connect))?;
    causes.find_map(|cause| cause.downcast_ref())
}

/// Connects with our dialer.
#[derive(Debug, Clone)]
struct Dial(Arc<Dialer>);

impl Service<Uri> for Dial {
    type Response = TokioIo<Box<dyn Transport>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialer = self.0.clone();
        Box::pin(async move { Ok(TokioIo::new(dialer.dial(&HostAddress::of(&uri)).await?)) })
    }
}

impl Connection for Box<dyn Transport> {
    fn connected(&self) -> Connected {
        Connected::new().proxy(self.is_forwarded())
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use torchobj_core::error::{ErrorKind, Operation};
    use torchobj_core::store::ObjectStore;
    use torchobj_core::types::GetRequest;

    use super::*;
    use crate::config::S3Config;
    use crate::fake::{Fake, http_response};
    use crate::s3::{Account, S3Store};

    #[tokio::test]
    async fn a_page_in_response_to_a_delete_is_not_its_success() {
        let page = "Content-Type: text/html; charset=utf-8\r\n";
        for (status, headers, body, deleted) in [
            (200, page, "<html>log in</html>", false),
            (200, page, "", true),
            (204, page, "", true),
            (200, "Content-Type: application/xml\r\n", "<a/>", true),
        ] {
            let fake = Fake::start(move |_| http_response(status, headers, body)).await;
            let config = S3Config { endpoint_url: Some(fake.url.clone()), anonymous: true, ..S3Config::default() };
            let store = S3Store::new(Arc::new(Account::new(config).unwrap()), "b");
            let failed = store.delete(&["k".to_owned()]).await.unwrap();
            let kinds: Vec<_> = failed.iter().map(|(_, error)| error.kind()).collect();
            assert_eq!(kinds, if deleted { vec![] } else { vec![ErrorKind::OtherServer] }, "{status} {body}");
        }
    }

    #[tokio::test]
    async fn every_request_through_a_forward_proxy_has_its_authorization() {
        let proxy = Fake::start(|_| http_response(404, "x-amz-bucket-region: eu-west-1\r\n", "")).await;
        let url = proxy.url.replace("://", "://user:secret@");
        for force_sdk in [false, true] {
            let endpoint_url = Some("http://store.example:9000".into());
            let config = S3Config { endpoint_url, anonymous: true, force_sdk, ..S3Config::default() };
            let account = Account::with_dialer(Arc::new(Dialer::through(&url)), config, None);
            let store = S3Store::new(Arc::new(account), "b");
            store.delete(&["k".to_owned()]).await.unwrap();
            let error = store.open(GetRequest::whole("k")).await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            store.0.find_region(Operation::Get).await.unwrap();
        }
        let expected = format!("proxy-authorization: Basic {}", BASE64_STANDARD.encode("user:secret"));
        // The SDK also sends requests to the instance metadata service.
        let heads: Vec<_> = proxy.heads().into_iter().filter(|head| head.contains("store.example")).collect();
        assert!(heads.len() == 6, "{heads:?}");
        for head in heads {
            assert!(head.contains(" http://store.example:9000/b"), "{head}");
            assert!(head.to_ascii_lowercase().contains(&expected.to_ascii_lowercase()), "{head}");
        }
    }
}
